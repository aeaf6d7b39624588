"""The model graph: operators in an order that can be executed, and what lives across every cut.

All amounts are for ONE sample (one sequence); whatever is ``batched`` grows linearly with the number
of samples. Parameters do not. An operator is named after the module path that runs it; a second visit
to the same module gets the suffix ``#2``. A *cut* ``k`` lies before operator ``k`` (0 <= k <= number of
operators); a stage is a half-open range of operators between two cuts.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

from atoll.errors import GraphError
from atoll.records import Record

__all__ = ["DTYPE_BYTES", "Edge", "Graph", "GraphIndex", "Operator", "ParameterSpec", "StageCost", "TensorSpec"]

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2,
               "int8": 1, "uint8": 1, "bool": 1}


class TensorSpec(Record):
    """A tensor that operators hand on. ``shape`` is for one sample, axis 0 is the batch when ``batched``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    batched: bool = True

    def size_bytes(self, samples: int) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype] * (samples if self.batched else 1)

    @property
    def carries_gradient(self) -> bool:
        return self.dtype in ("float64", "float32", "bfloat16", "float16")


class ParameterSpec(Record):
    """One logical parameter; a tied weight is one parameter with the other names as ``aliases``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


class Operator(Record):
    """One step of the model.

    ``forward_flops`` counts multiply and add of matrix products, convolutions and attention (elementwise work
    counts as bytes only, as PyTorch's FlopCounterMode does). ``backward_input_flops`` and ``backward_weight_flops``
    are the two halves of the backward. Causal attention is counted in full, 4bhs²d forward and 2.5 times that backward
    (the scores are computed again). ``saved_bytes``: activation bytes kept for the backward, each storage charged to
    the first operator that keeps it. ``read_bytes``/``written_bytes``: memory traffic of the forward, operation by
    operation, without parameters (those are read once a pass, whatever the number of samples).
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: tuple[str, ...] = ()
    forward_flops: int = 0
    backward_input_flops: int = 0
    backward_weight_flops: int = 0
    saved_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class Edge(Record):
    """All tensors that stage ``source`` hands to stage ``target`` for one microbatch (one message each way)."""

    source: int
    target: int
    tensors: tuple[TensorSpec, ...]

    def forward_bytes(self, samples: int) -> int:
        return sum(tensor.size_bytes(samples) for tensor in self.tensors)

    def backward_bytes(self, samples: int) -> int:
        return sum(tensor.size_bytes(samples) for tensor in self.tensors if tensor.carries_gradient)


class StageCost(Record):
    """Sums over a range of operators, per sample except ``parameter_bytes`` and ``parameter_elements``."""

    operators: int
    forward_flops: int
    backward_input_flops: int
    backward_weight_flops: int
    saved_bytes: int
    read_bytes: int
    written_bytes: int
    parameter_bytes: int
    parameter_elements: int


class Graph(Record):
    """A model as operators in executable order.

    ``inputs``: what the data set supplies (token ids, targets); any stage may ask for them, they cross no cut.
    ``loss``: name of the scalar tensor (sum over the samples of the microbatch) that training descends.
    ``source``: "analytic" or "captured".
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    operators: tuple[Operator, ...]
    loss: str
    source: str = "analytic"
    sequence_length: int = 0

    def __post_init__(self) -> None:
        known = {tensor.name for tensor in self.inputs}
        names: set[str] = set()
        parameters = {parameter.name for parameter in self.parameters}
        for operator in self.operators:
            if operator.name in names:
                raise GraphError(f"graph {self.name}: two operators are called {operator.name!r}")
            names.add(operator.name)
            for needed in operator.inputs:
                if needed not in known:
                    raise GraphError(f"graph {self.name}: operator {operator.name!r} reads {needed!r}, "
                                     "which no earlier operator writes")
            for parameter in operator.parameters:
                if parameter not in parameters:
                    raise GraphError(f"graph {self.name}: operator {operator.name!r} uses unknown parameter {parameter!r}")
            known.update(tensor.name for tensor in operator.outputs)
        if self.loss not in known:
            raise GraphError(f"graph {self.name}: no operator writes the loss {self.loss!r}")

    @property
    def work(self) -> int:
        """FLOPs and bytes moved for one sample, summed: graphs of one name that differ in size or dtype differ in this."""
        return sum(operator.forward_flops + operator.read_bytes + operator.written_bytes for operator in self.operators)


class GraphIndex:
    """Look-ups over one graph that planning asks often: positions, cut bytes, range sums. Built once, read only."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.position = {operator.name: index for index, operator in enumerate(graph.operators)}
        self.tensor: dict[str, TensorSpec] = {}
        self.producer: dict[str, int] = {}
        self.last_use: dict[str, int] = {}
        inputs = {tensor.name for tensor in graph.inputs}
        for index, operator in enumerate(graph.operators):
            for name in operator.inputs:
                if name not in inputs:
                    self.last_use[name] = index
            for tensor in operator.outputs:
                self.tensor[tensor.name] = tensor
                self.producer[tensor.name] = index
        self.parameter = {parameter.name: parameter for parameter in graph.parameters}

    def live_across(self, cut: int) -> tuple[TensorSpec, ...]:
        """Tensors written before ``cut`` and still read at or after it."""
        return tuple(self.tensor[name] for name, last in self.last_use.items() if self.producer[name] < cut <= last)

    @cached_property
    def cut_bytes(self) -> tuple[int, ...]:
        """Bytes per sample that live across each cut 0..n (cut 0 and cut n: zero)."""
        delta = [0] * (len(self.graph.operators) + 2)
        for name, last in self.last_use.items():
            size = self.tensor[name].size_bytes(1)
            delta[self.producer[name] + 1] += size
            delta[last + 1] -= size
        return tuple(accumulate(delta[:-1]))

    def cut_after(self, name: str) -> int:
        """The cut right after operator ``name``."""
        return self._at(name) + 1

    def cut_before(self, name: str) -> int:
        return self._at(name)

    def _at(self, name: str) -> int:
        if name not in self.position:
            raise GraphError(f"graph {self.graph.name}: there is no operator {name!r} to cut at")
        return self.position[name]

    @cached_property
    def _sums(self) -> dict[str, list[int]]:
        fields = ("forward_flops", "backward_input_flops", "backward_weight_flops", "saved_bytes", "read_bytes",
                  "written_bytes")
        return {field: [0, *accumulate(getattr(operator, field) for operator in self.graph.operators)] for field in fields}

    def parameters_of(self, low: int, high: int) -> tuple[ParameterSpec, ...]:
        """Parameters that operators ``low``..``high``-1 use, each once, in graph order."""
        seen: dict[str, None] = {}
        for operator in self.graph.operators[low:high]:
            seen.update(dict.fromkeys(operator.parameters))
        return tuple(self.parameter[name] for name in seen)

    def stage_cost(self, low: int, high: int) -> StageCost:
        sums = {field: line[high] - line[low] for field, line in self._sums.items()}
        parameters = self.parameters_of(low, high)
        return StageCost(operators=high - low, parameter_bytes=sum(p.size_bytes for p in parameters),
                         parameter_elements=sum(p.elements for p in parameters), **sums)

    def edges(self, cuts: tuple[int, ...]) -> tuple[Edge, ...]:
        """The messages between the stages that ``cuts`` (0, ..., n) make; skip connections go straight to their users."""
        stage_of = [stage for stage, (low, high) in enumerate(pairwise(cuts)) for _ in range(low, high)]
        wanted: dict[tuple[int, int], dict[str, None]] = {}
        for index, operator in enumerate(self.graph.operators):
            for name in operator.inputs:
                if name in self.producer and stage_of[self.producer[name]] != stage_of[index]:
                    wanted.setdefault((stage_of[self.producer[name]], stage_of[index]), {})[name] = None
        return tuple(Edge(source=source, target=target, tensors=tuple(self.tensor[name] for name in names))
                     for (source, target), names in sorted(wanted.items()))

    def inputs_of(self, low: int, high: int) -> tuple[TensorSpec, ...]:
        """Model inputs (from the data set) that operators ``low``..``high``-1 read."""
        used = {name for operator in self.graph.operators[low:high] for name in operator.inputs}
        return tuple(tensor for tensor in self.graph.inputs if tensor.name in used)
