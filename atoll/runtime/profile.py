"""A short profile: how long the operators of this model take on this device, in the order and sizes of the real run.

The model is cut where least lives across and its pieces are run as a chain, forward and then backward, as training does;
pieces alike share their measurement. A piece's time is shared out among its operators in proportion to their work.
On a CPU the clock is the CPU time of the thread, the same that paces emulated devices, so that other work on the machine
does not count. (vTrain, 2024, and Sailor, 2025, profile one layer of a kind in the same spirit.)
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from atoll.cluster.calibration import Calibration, OperatorTimes
from atoll.graph.graph import Graph, GraphIndex, Operator
from atoll.plan.job import Precision
from atoll.runtime.capture.stage import Captured, build_stage
from atoll.runtime.capture.weights import initialise
from atoll.runtime.state import sum_of_squares

__all__ = ["pieces", "profile"]

LAUNCH_NS = 60_000
"""What the lane engine adds to an instruction (measured by ``benchmarks/overhead.py``)."""
MESSAGE_NS = 150_000


@dataclass(slots=True)
class _Piece:
    low: int
    high: int
    stage: Any
    outputs: dict[str, torch.Tensor]
    forward_ns: list[int]
    backward_ns: list[int]


def pieces(graph: Graph) -> tuple[int, ...]:
    """Cuts (0, ..., n) between pieces: where least lives across, so that every piece holds some matrix product."""
    index = GraphIndex(graph)
    count = len(graph.operators)
    narrow = min(index.cut_bytes[1:count], default=0)
    cuts = [cut for cut in range(1, count) if index.cut_bytes[cut] == narrow]
    if len(cuts) < 4:
        cuts = [cut for cut in range(1, count) if graph.operators[cut - 1].forward_flops]
    result = [0]
    for cut in cuts:
        if any(operator.forward_flops for operator in graph.operators[result[-1]:cut]) and any(
                operator.forward_flops for operator in graph.operators[cut:]):
            result.append(cut)
    return (*result, count)


def profile(captured: Captured, precision: Precision, samples: int, batch: dict[str, torch.Tensor], device: torch.device,
            seconds: float = 2.0) -> Calibration:
    """Measure one microbatch size. ``batch``: the model's inputs for ``samples``. Takes about ``seconds``.

    All weights must fit this device's memory once (without optimizer state).
    """
    clock = _clock(device)
    cuts = pieces(captured.graph)
    chain = [_make(captured, low, high, device, split=False) for low, high in pairwise(cuts)]
    ends = time.monotonic() + seconds * 0.7
    rounds = 0
    while rounds < 3 or (time.monotonic() < ends and rounds < 50):
        _round(chain, captured.graph, batch, clock, keep=rounds > 0)
        rounds += 1
    shares = _split_shares(captured, chain, cuts, batch, device, clock)
    operators: dict[str, OperatorTimes] = {}
    timed = _shared_times(captured.graph, chain)
    for piece in chain:
        forward, backward = timed[_signature(captured.graph, piece.low, piece.high)]
        share = shares.get(_signature(captured.graph, piece.low, piece.high), 0.5)
        operators.update(_share_out(captured.graph.operators[piece.low:piece.high], forward, backward, share))
    return Calibration(device=device.type, graph=captured.graph.name, precision=precision.compute, samples=samples,
                       operators=operators, update_ns_per_element=_update_cost(precision, device, clock),
                       reduce_ns_per_byte=_reduce_cost(precision, clock), launch_ns=LAUNCH_NS, message_ns=MESSAGE_NS)


def _clock(device: torch.device) -> Callable[[], int]:
    if device.type == "cpu":
        return time.thread_time_ns
    synchronise = getattr(torch, device.type).synchronize

    def wall() -> int:
        synchronise()
        return time.perf_counter_ns()

    return wall


def _make(captured: Captured, low: int, high: int, device: torch.device, split: bool) -> _Piece:
    stage = build_stage(captured, low, high, device=device, split_backward=split)
    initialise(stage.parameters, captured, seed=0)
    return _Piece(low=low, high=high, stage=stage, outputs={}, forward_ns=[], backward_ns=[])


def _inputs(piece: _Piece, known: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leaves for the piece's inputs, as if they had come over a link."""
    return {name: known[name].detach().requires_grad_(known[name].is_floating_point()) for name in piece.stage.inputs}


def _round(chain: Sequence[_Piece], graph: Graph, batch: dict[str, torch.Tensor], clock: Callable[[], int], keep: bool) -> None:
    known = dict(batch)
    leaves: list[dict[str, torch.Tensor]] = []
    for piece in chain:
        inputs = _inputs(piece, known)
        started = clock()
        piece.outputs = piece.stage(inputs)
        ended = clock()
        if keep:
            piece.forward_ns.append(ended - started)
        known.update({name: value.detach() for name, value in piece.outputs.items()})
        leaves.append(inputs)
    deltas: dict[str, torch.Tensor] = {graph.loss: torch.ones_like(known[graph.loss])}
    for piece, inputs in zip(reversed(chain), reversed(leaves), strict=True):
        taken = [name for name in piece.outputs if name in deltas and piece.outputs[name].requires_grad]
        started = clock()
        torch.autograd.backward([piece.outputs[name] for name in taken], [deltas[name] for name in taken])
        ended = clock()
        if keep:
            piece.backward_ns.append(ended - started)
        for name, leaf in inputs.items():
            if leaf.grad is not None:
                deltas[name] = deltas[name] + leaf.grad if name in deltas else leaf.grad
        piece.outputs = {}


def _signature(graph: Graph, low: int, high: int) -> tuple[object, ...]:
    shapes = {parameter.name: parameter.shape for parameter in graph.parameters}
    return tuple((o.kind, o.forward_flops, o.backward_weight_flops, o.saved_bytes, o.written_bytes,
                  tuple(shapes[name] for name in o.parameters)) for o in graph.operators[low:high])


def _shared_times(graph: Graph, chain: Sequence[_Piece]) -> dict[tuple[object, ...], tuple[float, float]]:
    """Median over rounds, then mean over the pieces of one signature."""
    found: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for piece in chain:
        found.setdefault(_signature(graph, piece.low, piece.high), []).append(
            (statistics.median(piece.forward_ns), statistics.median(piece.backward_ns)))
    return {signature: (statistics.fmean(f for f, _ in times), statistics.fmean(b for _, b in times))
            for signature, times in found.items()}


def _split_shares(captured: Captured, chain: Sequence[_Piece], cuts: tuple[int, ...], batch: dict[str, torch.Tensor],
                  device: torch.device, clock: Callable[[], int]) -> dict[tuple[object, ...], float]:
    """Per signature the fraction of the backward that is its input half, measured on one piece of each."""
    chosen: dict[tuple[object, ...], tuple[int, int]] = {}
    for low, high in pairwise(cuts):
        chosen.setdefault(_signature(captured.graph, low, high), (low, high))
    known = dict(batch)
    for piece in chain:
        known.update({name: value.detach() for name, value in piece.stage(_inputs(piece, known)).items()})
    shares = {}
    for signature, (low, high) in chosen.items():
        piece = _make(captured, low, high, device, split=True)
        fractions = []
        for attempt in range(4):
            inputs = _inputs(piece, known)
            outputs = piece.stage(inputs)
            taken = [name for name, value in outputs.items() if value.requires_grad]
            grads = [torch.ones_like(outputs[name]) for name in taken]
            deferred = piece.stage.start_deferring()
            started = clock()
            torch.autograd.backward([outputs[name] for name in taken], grads)
            middle = clock()
            piece.stage.run_deferred(deferred)
            ended = clock()
            piece.stage.stop_deferring()
            if attempt:
                fractions.append((middle - started) / max(1, ended - started))
        shares[signature] = statistics.median(fractions)
    return shares


def _share_out(operators: Sequence[Operator], forward: float, backward: float, input_share: float) -> dict[str, OperatorTimes]:
    """Split a piece's times over its operators by work: FLOPs, and eight FLOPs' worth for each byte moved."""
    weights = [operator.forward_flops + 8 * (operator.read_bytes + operator.written_bytes) + 1 for operator in operators]
    total = sum(weights)
    result = {}
    for operator, weight in zip(operators, weights, strict=True):
        part = weight / total
        result[operator.name] = OperatorTimes(
            forward_ns=round(forward * part), backward_ns=round(backward * part),
            backward_input_ns=round(backward * part * input_share),
            backward_weight_ns=round(backward * part * (1 - input_share)))
    return result


def _update_cost(precision: Precision, device: torch.device, clock: Callable[[], int]) -> float:
    """ns per element of an AdamW step with its share of the gradient norm."""
    elements = 1 << 20
    parameter = torch.zeros(elements, dtype=getattr(torch, precision.master), device=device, requires_grad=True)
    gradient = parameter.grad = torch.ones_like(parameter)
    rule = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    times = []
    for _ in range(5):
        started = clock()
        sum_of_squares(gradient)
        rule.step()
        times.append(clock() - started)
    return statistics.median(times) / elements


def _reduce_cost(precision: Precision, clock: Callable[[], int]) -> float:
    size = 1 << 20
    left, right = (torch.ones(size, dtype=getattr(torch, precision.master)) for _ in range(2))
    times = []
    for _ in range(5):
        started = clock()
        left.add_(right)
        times.append(clock() - started)
    return statistics.median(times) / (size * left.element_size())
