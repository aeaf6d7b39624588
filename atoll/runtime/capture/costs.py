"""What each traced operation costs for one sample, found by running it on fake tensors (shapes only, no memory).

* FLOPs: what PyTorch's FlopCounterMode counts (2mnk a matrix product), also for the two halves of the backward: towards
  activations, and towards weights (anything computed from parameters alone). Attention by SDPA is counted in full, causal
  or not: 2bhs²(d + d_v) forward, and 2.5 times that backward, as that counter does for flash attention (the scores are
  computed again). It counts nothing for the CPU's fused kernel, hence the formula here.
* Saved bytes: storages autograd keeps, each once, charged to the operation that keeps it first; parameters, model inputs
  and constants (what depends on no input) excluded.
* Read and written bytes: every operation that makes a new tensor reads its activations and writes its result once; views
  cost nothing; parameters and what is computed from them alone are not counted (they are read once a pass, not once a
  sample); an embedding reads the rows it looks up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from atoll.runtime.capture.export import Traced, copy_nodes

__all__ = ["NodeCost", "measure"]

_aten = torch.ops.aten
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Per sample. ``gradient``: whether autograd reaches the result."""

    forward_flops: int = 0
    backward_input_flops: int = 0
    backward_weight_flops: int = 0
    saved_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    gradient: bool = False


def measure(traced: Traced, constants: frozenset[fx.Node], weights: frozenset[fx.Node]) -> dict[fx.Node, NodeCost]:
    """Return the cost of every node of ``traced``.

    ``constants``: nodes that depend on no model input and no parameter; ``weights``: nodes that depend on parameters only.
    """
    graph = fx.Graph()
    outside = [*traced.parameters, *traced.constants, *traced.inputs]
    known = {node: graph.placeholder(node.name) for node in outside}
    copy_nodes(traced.nodes, graph, known, samples=1, device=_CPU)
    with FakeTensorMode() as mode:
        env: dict[fx.Node, Any] = {}
        for node in outside:
            value = node.meta["val"]
            shape = traced.shapes[traced.inputs[node]] if node in traced.inputs else value.shape
            env[known[node]] = torch.empty(shape, dtype=value.dtype, device=_CPU, requires_grad=node in traced.parameters)
        meter = _Meter(mode, {_storage(env[known[node]]) for node in outside})
        costs = {}
        for node in traced.nodes:
            light = {known[argument] for argument in node.all_input_nodes if argument in known
                     and (argument in weights or argument in traced.parameters)}
            costs[node] = meter.run(known[node], env, light, exempt=node in constants)
    return costs


class _Meter:
    """Runs nodes one after the other; remembers which storages were charged."""

    def __init__(self, mode: FakeTensorMode, exempt: set[int]) -> None:
        self.mode = mode
        self.charged = exempt
        self.fresh = 0
        self.flops: dict[Any, tuple[int, int, int]] = {}
        self.alive: list[Any] = []  # storages must not die, or an identity would be met twice

    def run(self, node: fx.Node, env: dict[fx.Node, Any], weights: set[fx.Node], exempt: bool) -> NodeCost:
        args = fx.map_arg(node.args, env.__getitem__)
        kwargs = fx.map_arg(node.kwargs, env.__getitem__)
        self.fresh = 0
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept):
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        env[node] = result
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        given = [(source, env[source]) for source in node.all_input_nodes]
        sources = {_storage(leaf) for _, value in given for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in outputs if _storage(leaf) not in sources]
        self.alive.append(made)
        if exempt:
            self.charged.update(_storage(leaf) for leaf in made)
            return NodeCost()
        forward, to_input, to_weight = self._flops(node, weights, args, kwargs)
        return NodeCost(forward_flops=forward, backward_input_flops=to_input, backward_weight_flops=to_weight,
                        saved_bytes=self.fresh, gradient=any(leaf.requires_grad for leaf in outputs),
                        read_bytes=_read(node, given, weights, made), written_bytes=sum(_size(leaf) for leaf in made))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _storage(tensor)
        if key not in self.charged:
            self.charged.add(key)
            self.fresh += tensor.untyped_storage().nbytes()
            self.alive.append(tensor)
        return tensor

    def _flops(self, node: fx.Node, weights: set[fx.Node], args: Any, kwargs: Any) -> tuple[int, int, int]:
        if node.target is _aten.scaled_dot_product_attention.default:
            query, value = args[0], args[2]
            batch, heads, length, width = query.shape
            forward = 2 * batch * heads * length * value.shape[-2] * (width + value.shape[-1])
            gradient = any(argument.requires_grad for argument in args[:3])
            return forward, forward * 5 // 2 if gradient else 0, 0
        roles = tuple(_roles(argument, weights) for argument in (node.args, node.kwargs))
        key = (node.target, tree_map(_shape_key, (args, kwargs)), roles).__repr__()
        if key not in self.flops:
            self.flops[key] = _count(node, weights, args, kwargs)
        return self.flops[key]


def _count(node: fx.Node, weights: set[fx.Node], args: Any, kwargs: Any) -> tuple[int, int, int]:
    """FLOPs of one operation on fresh leaves: forward, backward towards activations, backward towards weights."""
    light: list[torch.Tensor] = []
    heavy: list[torch.Tensor] = []

    def fresh(argument: Any, value: Any) -> Any:
        if isinstance(argument, fx.Node) and isinstance(value, torch.Tensor):
            leaf = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device,
                                       requires_grad=value.requires_grad)
            if value.requires_grad:
                (light if argument in weights else heavy).append(leaf)
            return leaf
        if isinstance(argument, list | tuple):
            return type(argument)(fresh(inner, item) for inner, item in zip(argument, value, strict=True))
        return value

    new_args = tuple(fresh(argument, value) for argument, value in zip(node.args, args, strict=True))
    new_kwargs = {name: fresh(node.kwargs[name], value) for name, value in kwargs.items()}
    with FlopCounterMode(display=False) as counter:
        result = node.target(*new_args, **new_kwargs)  # type: ignore[operator]
    forward = counter.get_total_flops()
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    halves = []
    for leaves in (heavy, light):
        flops = 0
        if forward and outputs and leaves:
            with FlopCounterMode(display=False) as counter:
                torch.autograd.grad(outputs, leaves, [torch.empty_like(output) for output in outputs],
                                    retain_graph=True, allow_unused=True)
            flops = counter.get_total_flops()
        halves.append(flops)
    return forward, halves[0], halves[1]


def _roles(argument: Any, weights: set[fx.Node]) -> Any:
    return fx.map_arg(argument, lambda node: node in weights)


def _shape_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad)
    return value


def _read(node: fx.Node, given: Iterable[tuple[fx.Node, Any]], weights: set[fx.Node], made: list[torch.Tensor]) -> int:
    if not made:
        return 0
    total = 0
    if node.target is _aten.embedding.default:
        total += sum(_size(leaf) for leaf in made)
    for source, value in given:
        if source not in weights:
            total += sum(_size(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return total


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
