"""Building blocks of analytic graphs: each adds one operator with its exact costs for one sample.

Costs mean what ``Operator`` says and equal what capture measures (``runtime.capture.costs``), by test. ``saved_bytes``
counts a tensor where it is first kept, so a block is told when another has kept its input already.

Letters: T tokens of a sequence, E bytes of the compute dtype, S bytes of statistics (float32, float64 for float64).
"""

from __future__ import annotations

from typing import NamedTuple

from atoll.graph.graph import DTYPE_BYTES, Graph, Operator, ParameterSpec, TensorSpec

__all__ = ["ACTIVATIONS", "Activation", "Sketch"]


class Activation(NamedTuple):
    """Multiples of the width: tensors kept, read and written; ``keeps_output``: its result is among those kept."""

    saved: int
    read: int
    written: int
    keeps_output: bool = False


ACTIVATIONS = {
    "gelu": Activation(1, 1, 1),
    "gelu_pytorch_tanh": Activation(1, 1, 1),
    "silu": Activation(1, 1, 1),
    "relu": Activation(1, 1, 1, keeps_output=True),
    "gelu_new": Activation(4, 10, 8),  # eight elementwise operations in Python
    "gelu_fast": Activation(7, 12, 9),
}


class Sketch:
    """A graph in the making. Every method appends one operator and returns the name of the tensor it writes."""

    def __init__(self, sequence_length: int, dtype: str) -> None:
        self.length = sequence_length
        self.dtype = dtype
        self.size = DTYPE_BYTES[dtype]
        self.statistic = 8 if dtype == "float64" else 4
        self.operators: list[Operator] = []
        self.unbatched: set[str] = set()
        self.parameters: list[ParameterSpec] = []

    def parameter(self, name: str, *shape: int, aliases: tuple[str, ...] = ()) -> None:
        self.parameters.append(ParameterSpec(name=name, shape=shape, dtype=self.dtype, aliases=aliases))

    def _add(self, name: str, kind: str, inputs: tuple[str, ...], shape: tuple[int, ...], *, parameters: tuple[str, ...] = (),
             forward: int = 0, backward_input: int = 0, backward_weight: int = 0, saved: int = 0, read: int = 0,
             written: int = 0, batched: bool = True) -> str:
        output = TensorSpec(name=name, shape=shape, dtype=self.dtype, batched=batched)
        if not batched:
            self.unbatched.add(name)
        self.operators.append(Operator(
            name=name, kind=kind, inputs=inputs, outputs=(output,), parameters=parameters, forward_flops=forward,
            backward_input_flops=backward_input, backward_weight_flops=backward_weight, saved_bytes=saved, read_bytes=read,
            written_bytes=written))
        return name

    def embedding(self, name: str, weight: str, index: str | None, width: int) -> str:
        """Rows of ``weight``; ``index`` None: the positions, the same for every sample."""
        rows = self.length * width * self.size
        return self._add(name, "embedding", () if index is None else (index,), (1, self.length, width), parameters=(weight,),
                         read=rows + 8 * self.length, written=rows, batched=index is not None)

    def linear(self, name: str, x: str, width: int, out: int, *, kept: bool = False, bias: bool = False,
               weight: str | None = None, shape: tuple[int, ...] | None = None) -> str:
        """x times a matrix: 2·T·width·out FLOPs, as many again towards x and towards the weight. ``kept``: x is kept
        already. ``shape``: of the result, when the model splits heads right away."""
        flops = 2 * self.length * width * out
        row = self.length * self.size
        names = (weight or f"{name}.weight", *((f"{name}.bias",) if bias else ()))
        return self._add(name, "matmul", (x,), shape or (1, self.length, out), parameters=names, forward=flops,
                         backward_input=flops, backward_weight=flops, saved=0 if kept else row * width, read=row * width,
                         written=row * out)

    def layer_norm(self, name: str, x: str, width: int, *, kept: bool = False) -> str:
        """Keeps x, mean and 1/deviation."""
        row = self.length * width * self.size
        return self._add(name, "norm", (x,), (1, self.length, width), parameters=(f"{name}.weight", f"{name}.bias"),
                         saved=(0 if kept else row) + 2 * self.length * self.size, read=row, written=row)

    def rms_norm(self, name: str, x: str, width: int, *, rows: int = 1, shape: tuple[int, ...] | None = None) -> str:
        """Root mean square of ``rows`` vectors a token, in float32 whatever the compute dtype, operation by operation."""
        count = self.length * rows
        single, own, exact = 4 * count * width, self.size * count * width, self.size == 4
        to_single = (0, 0) if exact else (own, single)
        back = (0, 0) if exact else (single, own)
        scalar = 4 * count
        read = to_single[0] + single + single + scalar + scalar + (single + scalar) + back[0] + own
        written = to_single[1] + single + scalar + scalar + scalar + single + back[1] + own
        return self._add(name, "norm", (x,), shape or (1, self.length, width), parameters=(f"{name}.weight",),
                         saved=single + scalar + own, read=read, written=written)

    def attention(self, name: str, inputs: tuple[str, ...], heads: int, kv_heads: int, width: int, *, rotated: int = 0,
                  fused: bool = False, copies: bool = False) -> str:
        """Causal attention by SDPA: 4·heads·T²·width FLOPs (the masked half included), 2.5 times that backward.

        ``rotated``: width of the rotary part (0: none). ``fused``: q, k and v are views of one tensor, which is kept whole.
        ``copies``: the result is copied into another layout.
        """
        token = self.length * width * self.size
        q, k, v = heads * token, kv_heads * token, kv_heads * token
        read, written = q + k + v + (q if copies else 0), q + (q if copies else 0)
        if rotated:
            table = self.length * rotated * self.size
            part = (heads + kv_heads) * table
            joined = q + k if rotated != width or fused else 0
            read += part * 11 // 2 + 4 * table + joined
            written += part * 9 // 2 + joined
        saved = (q + k + v) + q + self.length * heads * self.statistic + (q + k if fused and rotated else 0)
        flops = 4 * heads * self.length * self.length * width
        return self._add(name, "attention", inputs, (1, self.length, heads * width), forward=flops, saved=saved, read=read,
                         backward_input=flops * 5 // 2, written=written)

    def activation(self, name: str, x: str, width: int, kind: str) -> str:
        spec, row = ACTIVATIONS[kind], self.length * width * self.size
        return self._add(name, "elementwise", (x,), (1, self.length, width), saved=spec.saved * row, read=spec.read * row,
                         written=spec.written * row)

    def add(self, name: str, inputs: tuple[str, ...], width: int) -> str:
        """The sum of two or three tensors, pairwise. Keeps nothing; what comes from weights alone is not counted as read."""
        row = self.length * width * self.size
        pairs = len(inputs) - 1
        read = 2 * pairs - len(self.unbatched.intersection(inputs))
        return self._add(name, "elementwise", inputs, (1, self.length, width), read=read * row, written=pairs * row)

    def gate(self, name: str, gate: str, up: str, width: int, *, kept: bool) -> str:
        """The product of two tensors; both are kept. ``kept``: the first is kept already."""
        row = self.length * width * self.size
        return self._add(name, "elementwise", (gate, up), (1, self.length, width), saved=row if kept else 2 * row,
                         read=2 * row, written=row)

    def finish(self, name: str, logits: str, vocabulary: int) -> Graph:
        """Add the cross entropy in float32 (float64 for float64), summed over tokens, and return the graph."""
        wide = self.statistic
        converts = self.size < wide
        full, own = self.length * vocabulary * wide, self.length * vocabulary * self.size
        loss = TensorSpec(name="loss", shape=(), dtype="float64" if wide == 8 else "float32", batched=False)
        self.operators.append(Operator(
            name="loss", kind="loss", inputs=(logits, "targets"), outputs=(loss,), saved_bytes=full + wide,
            read_bytes=full + 8 * self.length + (own if converts else 0), written_bytes=wide + (full if converts else 0)))
        given = tuple(TensorSpec(name=each, shape=(1, self.length), dtype="int64") for each in ("tokens", "targets"))
        return Graph(name=name, inputs=given, parameters=tuple(self.parameters), operators=tuple(self.operators),
                     loss="loss", source="analytic", sequence_length=self.length)
