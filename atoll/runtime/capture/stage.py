"""One stage of a captured model: only its own operators, its own parameters, as straight-line code.

A stage is generated once per number of samples (sizes are then plain numbers) and called with named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx, nn

from atoll.errors import GraphError
from atoll.graph.graph import Graph, GraphIndex, TensorSpec
from atoll.graph.spec import ModelSpec
from atoll.runtime.capture.export import Traced, copy_nodes, is_number, trace
from atoll.runtime.capture.models import model_source
from atoll.runtime.capture.operators import Layout, arrange
from atoll.runtime.capture.split import Ledger, deferring

__all__ = ["Captured", "Stage", "build_stage", "capture"]


@dataclass(frozen=True, slots=True)
class Captured:
    """A model as operations without weights; ``graph`` is its record, the rest is what stages are built from."""

    graph: Graph
    traced: Traced
    layout: Layout
    index: GraphIndex


def capture(spec: ModelSpec, sequence_length: int, samples: int = 1, compute_dtype: str = "float32") -> Captured:
    """Trace the model of ``spec``. No weight is allocated; about 1 s and 0.15 s a transformer layer on one old core.

    The record and the stages are good for every number of samples; ``samples`` is only looked at to be at least 1.
    ``compute_dtype``: of parameters, activations and gradients ("float32", "bfloat16", "float64").
    Raises ``GraphError`` (see ``model_source`` and ``trace``).
    """
    if samples < 1 or sequence_length < 1:
        raise GraphError(f"capture: found {samples} samples of {sequence_length} tokens, expected at least 1 of each")
    dtype = getattr(torch, compute_dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise GraphError(f"capture: compute dtype {compute_dtype!r} is not a floating-point type; use float32 or bfloat16")
    source = model_source(spec, sequence_length)
    traced = trace(source, dtype)
    layout = arrange(traced, source.name, source.prefix, sequence_length)
    return Captured(graph=layout.graph, traced=traced, layout=layout, index=GraphIndex(layout.graph))


@dataclass(slots=True)
class Stage:
    """Operators ``low``..``high``-1 of a captured model; obeys ``runtime.world.StageModule``.

    Call it with every tensor named in ``inputs``; it returns those named in ``outputs`` (the loss is ``graph.loss``).
    Parameters are allocated but hold nothing until ``weights.initialise`` or ``weights.load_weights`` fills them.
    """

    captured: Captured
    low: int
    high: int
    device: torch.device
    parameters: dict[str, nn.Parameter]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ledger: Ledger | None
    compile: bool
    nodes: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    programs: dict[int, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = field(default_factory=dict)
    probe: tuple[str, int] | None = None
    casts: tuple[tuple[int, torch.dtype], ...] = ()

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        samples = 1 if self.probe is None else tensors[self.probe[0]].numel() // self.probe[1]
        program = self.programs.get(samples) or self._generate(samples)
        given = [tensors[name] for name in self.inputs]
        for at, dtype in self.casts:
            given[at] = given[at].to(dtype)
        results = program[0](*self.parameters.values(), *program[1], *given)
        return dict(zip(self.outputs, results, strict=True))

    def start_deferring(self) -> list[object]:
        """See ``StageModule``. Raises ``GraphError`` unless the stage was built with ``split_backward``."""
        if self.ledger is None:
            raise GraphError(f"stage {self.low}..{self.high} was not built to split its backward")
        self.ledger.open = []
        return self.ledger.open

    def stop_deferring(self) -> None:
        """From here on backward computes weight gradients at once again."""
        if self.ledger is not None:
            self.ledger.open = None

    def run_deferred(self, deferred: list[object]) -> None:
        """See ``StageModule``."""
        Ledger.settle(deferred)

    def _generate(self, samples: int) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
        traced, layout = self.captured.traced, self.captured.layout
        graph = fx.Graph()
        names = {name: node for node, name in traced.parameters.items()}
        inputs = {name: node for node, name in traced.inputs.items()} | layout.tensors
        known: dict[fx.Node, fx.Node] = {}
        for node in (*(names[name] for name in self.parameters), *self.constants, *(inputs[name] for name in self.inputs)):
            known[node] = graph.placeholder(node.name)
        rewrite = None if self.ledger is None else deferring(traced.parameters, self.ledger)
        copy_nodes(self.nodes, graph, known, samples, self.device, rewrite)
        graph.output(tuple(self._handed_on(graph, known, inputs[name]) for name in self.outputs))
        function: Callable[..., Any] = fx.GraphModule({}, graph).forward
        if self.compile:
            function = torch.compile(function, dynamic=False)
        constants = _values(traced, layout, self.constants, samples, self.device)
        self.programs[samples] = (function, constants)
        return self.programs[samples]

    def _handed_on(self, graph: fx.Graph, known: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
        """A float tensor that no gradient reaches still gets one from its reader; give it a leaf to end in."""
        if node in self.captured.layout.gradients or not node.meta["val"].is_floating_point():
            return known[node]
        return graph.call_function(_ending, (known[node],))


def _ending(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled())


def build_stage(captured: Captured, low: int, high: int, *, device: torch.device | str, split_backward: bool = False,
                shared: dict[str, nn.Parameter] | None = None, compile: bool = False) -> Stage:
    """Build operators ``low``..``high``-1 on ``device``, alone.

    ``split_backward``: products with weights can put their weight gradients off. ``shared``: parameters of this worker by
    name; those found there are used as they are, new ones are added (so two stages of a worker tie a weight).
    ``compile``: run through ``torch.compile``; not together with ``split_backward``.
    Raises ``GraphError`` for an empty or impossible range.
    """
    graph, traced, layout = captured.graph, captured.traced, captured.layout
    if not 0 <= low < high <= len(graph.operators):
        raise GraphError(f"graph {graph.name}: there is no stage {low}..{high}; it has {len(graph.operators)} operators")
    if compile and split_backward:
        raise GraphError("a stage cannot be compiled and split its backward; choose a schedule with whole backwards "
                         "or set compile to false")
    device = torch.device(device)
    own = [node for run in layout.runs[low:high] for node in run]
    needed = _needed(own, traced, layout)
    nodes = tuple(node for node in traced.nodes if node in needed and node not in layout.constants)
    constants = tuple(dict.fromkeys(argument for node in nodes for argument in node.all_input_nodes
                                    if argument in layout.constants or argument in traced.constants))
    shared = {} if shared is None else shared
    parameters = {}
    for spec in captured.index.parameters_of(low, high):
        if spec.name not in shared:
            shared[spec.name] = nn.Parameter(torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device))
        parameters[spec.name] = shared[spec.name]
    handed = _handed_over(captured, low, high)
    model_inputs = captured.index.inputs_of(low, high)
    inputs = (*handed, *model_inputs)
    batched = next((spec for spec in inputs if spec.batched), None)
    return Stage(captured=captured, low=low, high=high, device=device, parameters=parameters, nodes=nodes, constants=constants,
                 inputs=tuple(spec.name for spec in inputs), outputs=_handed_out(captured, low, high),
                 ledger=Ledger() if split_backward else None, compile=compile,
                 probe=None if batched is None else (batched.name, prod(batched.shape)),
                 casts=tuple((at, getattr(torch, spec.dtype)) for at, spec in enumerate(inputs)
                             if at >= len(handed) and spec.carries_gradient))


def _needed(own: list[fx.Node], traced: Traced, layout: Layout) -> set[fx.Node]:
    """The nodes of a stage and the free ones they rest on, constants left out."""
    needed, pending = set(own), list(own)
    while pending:
        for argument in pending.pop().all_input_nodes:
            free = argument in layout.free and argument not in layout.constants
            if free and argument not in needed and not is_number(argument):
                needed.add(argument)
                pending.append(argument)
    return needed


def _handed_over(captured: Captured, low: int, high: int) -> tuple[TensorSpec, ...]:
    """Tensors that earlier operators hand to this range, in graph order."""
    index = captured.index
    read = {name for operator in captured.graph.operators[low:high] for name in operator.inputs}
    return tuple(index.tensor[name] for name, producer in index.producer.items() if name in read and producer < low)


def _handed_out(captured: Captured, low: int, high: int) -> tuple[str, ...]:
    index = captured.index
    return tuple(tensor.name for operator in captured.graph.operators[low:high] for tensor in operator.outputs
                 if tensor.name == captured.graph.loss or index.last_use.get(tensor.name, -1) >= high)


def _values(traced: Traced, layout: Layout, wanted: Iterable[fx.Node], samples: int, device: torch.device,
            ) -> tuple[torch.Tensor, ...]:
    """Compute constants on the CPU (every device gets the same bits) and put them on ``device``."""
    wanted = tuple(wanted)
    needed, pending = set(wanted), list(wanted)
    while pending:
        for argument in pending.pop().all_input_nodes:
            if argument not in needed and not is_number(argument):
                needed.add(argument)
                pending.append(argument)
    graph = fx.Graph()
    outside = [node for node in traced.constants if node in needed]
    known = {node: graph.placeholder(node.name) for node in outside}
    copy_nodes([node for node in traced.nodes if node in needed], graph, known, samples, torch.device("cpu"))
    graph.output(tuple(known[node] for node in wanted))
    with torch.no_grad():
        values = fx.GraphModule({}, graph).forward(*(traced.constants[node] for node in outside))
    return tuple(value.to(device) for value in values)
