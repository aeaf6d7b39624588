"""A short profile: how long the operators of this model take on this device, in the order and sizes of the real run.

The model is cut where least lives across and its pieces are run as a chain, forward and then backward, as training does;
pieces alike share their measurement. A piece's time is shared out among its operators in proportion to their work.
On a CPU core the clock is the CPU time of the thread, the same that paces emulated devices, so that waiting for a core does
not count. What the other cores do does count: cores share caches and memory, and many share their arithmetic in pairs. So
for an emulated cluster the other devices' share of work is played at the same time. A real device is charged with all
the time that passes: a core that it gets half of is half as fast. (vTrain, 2024, and Sailor, 2025, profile one layer of a
kind in the same spirit.)
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from atoll.cluster.calibration import Calibration, OperatorTimes
from atoll.graph.graph import Graph, GraphIndex, Operator
from atoll.plan.job import Precision
from atoll.runtime.capture.stage import Captured, build_stage
from atoll.runtime.capture.weights import initialise
from atoll.runtime.heap import keep_heap
from atoll.runtime.profile_fixed import FixedCosts

__all__ = ["pieces", "profile"]

Signature = tuple[object, ...]


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


def profile(captured: Captured, precision: Precision, batches: Mapping[int, dict[str, torch.Tensor]], device: torch.device,
            seconds: float = 8.0, *, kind: str, check: Callable[[], None] = lambda: None, beside: Sequence[float] = (),
            speed: float | None = None) -> tuple[Calibration, ...]:
    """Measure every microbatch size of ``batches`` (samples -> the model's inputs for as many), smallest first, for about
    ``seconds`` in all, but at least two sizes; those for which no time is left are continued in a straight line.

    ``kind``: of this device, by the catalogue. ``beside``: shares of a core that emulated devices besides this one keep
    busy; each is played by a thread meanwhile. ``speed``: that the cluster says this device has; what is returned is for
    speed 1.0. None: the device is emulated, and one core of this computer has speed 1.0.
    ``check``: called between rounds; what it raises ends the profile.
    All weights must fit this device's memory once (without optimizer state).
    """
    keep_heap()
    bench = _Bench(captured, device, precision)
    found: list[_Times] = []
    ends = time.monotonic() + seconds
    for number, samples in enumerate(sizes := sorted(batches)):
        left = (ends - time.monotonic()) / (len(sizes) - number)
        if number >= 2 and found[-1].lasted_s * samples / sizes[number - 1] > 2 * left * (len(sizes) - number):
            first, second = found[-2:]
            found.append(first.continued(second, sizes[number - 2], sizes[number - 1], samples))
        else:
            found.append(bench.measure(batches[samples], left, beside, check))
    scale = 1.0 if speed is None else speed * bench.slowness
    return tuple(bench.calibration(samples, times, scale, kind, speed or 1.0)
                 for samples, times in zip(sizes, found, strict=True))


@dataclass(frozen=True, slots=True)
class _Times:
    """By signature: ns of forward, backward, input half, weight half. ``lasted_s``: how long it took to measure at least."""

    by_signature: dict[Signature, tuple[float, ...]]
    lasted_s: float

    def continued(self, other: _Times, here: int, there: int, wanted: int) -> _Times:
        """The line through two sizes, at a third that is larger than both."""
        far = (wanted - there) / (there - here)
        return _Times({signature: tuple(late + max(0.0, late - early) * far for early, late in
                                        zip(self.by_signature[signature], values, strict=True))
                       for signature, values in other.by_signature.items()}, other.lasted_s)


class _Bench:
    """The model's pieces, ready to be timed."""

    def __init__(self, captured: Captured, device: torch.device, precision: Precision) -> None:
        self._captured, self._graph, self._device, self._precision = captured, captured.graph, device, precision
        self._clock = _clock(device)
        self._chain = [_make(captured, low, high, device, split=False) for low, high in pairwise(pieces(captured.graph))]
        self._fixed = FixedCosts([piece.stage for piece in self._chain], precision.master, device, self._clock)
        self._chosen = {self._signature(piece): piece for piece in reversed(self._chain)}
        self._splits = {signature: _make(captured, piece.low, piece.high, device, split=True)
                        for signature, piece in self._chosen.items()}
        self._passed = self._worked = 0

    def _signature(self, piece: _Piece) -> Signature:
        return _signature(self._graph, piece.low, piece.high)

    @property
    def slowness(self) -> float:
        """Time that passed for each second of the clock: 2 on a core of which this process gets half."""
        return self._passed / max(1, self._worked)

    def measure(self, batch: dict[str, torch.Tensor], seconds: float, beside: Sequence[float],
                check: Callable[[], None]) -> _Times:
        """At least three rounds, the first to warm up."""
        known = _values(self._chain, batch)
        for piece in self._chain:
            piece.forward_ns, piece.backward_ns = [], []
        with self._played(known, beside):
            started = time.monotonic()
            rounds, least = 0, 0.0
            while rounds < 3 or (time.monotonic() - started < 0.6 * seconds and rounds < 50):
                check()
                passed, worked = time.perf_counter_ns(), self._clock()
                _round(self._chain, self._graph, batch, self._clock, keep=rounds > 0)
                self._fixed.measure()
                self._passed += time.perf_counter_ns() - passed
                self._worked += self._clock() - worked
                rounds += 1
                least = time.monotonic() - started if rounds == 3 else least
            began = time.monotonic()
            halves = {signature: self._halves(signature, known) for signature in self._chosen}
            least += time.monotonic() - began
        timed = _shared_times(self._graph, self._chain)
        return _Times({signature: (forward, backward, backward * halves[signature][0], backward * halves[signature][1])
                       for signature, (forward, backward) in timed.items()}, least)

    @contextmanager
    def _played(self, known: dict[str, torch.Tensor], shares: Sequence[float]) -> Iterator[None]:
        """Meanwhile a thread for each of ``shares`` runs one piece of each sort, forward and backward, with pauses, so that it
        keeps that much of a core busy."""
        stop = threading.Event()

        def play(share: float) -> None:
            own = [_make(self._captured, piece.low, piece.high, self._device, split=False) for piece in self._chosen.values()]
            while not stop.is_set():
                started, cpu = time.monotonic_ns(), time.thread_time_ns()
                for piece in own:
                    _timed_backward(piece, known, time.thread_time_ns, split=False)
                due = started + (time.thread_time_ns() - cpu) / share
                stop.wait(max(0.0, due - time.monotonic_ns()) / 1e9)

        threads = [threading.Thread(target=play, args=(share,), daemon=True) for share in shares]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def _halves(self, signature: Signature, known: dict[str, torch.Tensor]) -> tuple[float, float]:
        """The input half and the weight half of a split backward as fractions of the whole one, measured in turn. (The two
        add up to a little more than one: what is put off is kept.)"""
        first, second = [], []
        for attempt in range(4):
            (both,) = _timed_backward(self._chosen[signature], known, self._clock, split=False)
            one, other = _timed_backward(self._splits[signature], known, self._clock, split=True)
            if attempt:
                first.append(one / max(1, both))
                second.append(other / max(1, both))
        return statistics.median(first), statistics.median(second)

    def calibration(self, samples: int, times: _Times, scale: float, kind: str, speed: float) -> Calibration:
        operators: dict[str, OperatorTimes] = {}
        for piece in self._chain:
            measured = [scale * value for value in times.by_signature[self._signature(piece)]]
            operators.update(_share_out(self._graph.operators[piece.low:piece.high], measured))
        fixed = self._fixed
        return Calibration(kind=kind, speed=speed, graph=self._graph.name, work=self._graph.work,
                           precision=self._precision.compute, samples=samples, operators=operators,
                           update_ns_per_element=scale * fixed.update_ns_per_element,
                           reduce_ns_per_byte=scale * fixed.reduce_ns_per_byte,
                           vote_ns_per_byte=scale * fixed.vote_ns_per_byte, launch_ns=round(scale * fixed.launch_ns))


def _clock(device: torch.device) -> Callable[[], int]:
    if device.type == "cpu":
        return time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    synchronise = getattr(torch, device.type).synchronize

    def wall() -> int:
        synchronise()
        return time.perf_counter_ns()

    return wall


def _make(captured: Captured, low: int, high: int, device: torch.device, split: bool) -> _Piece:
    stage = build_stage(captured, low, high, device=device, split_backward=split)
    initialise(stage.parameters, captured, seed=0)
    return _Piece(low=low, high=high, stage=stage, outputs={}, forward_ns=[], backward_ns=[])


def _values(chain: Sequence[_Piece], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor that a piece reads or writes."""
    known = dict(batch)
    for piece in chain:
        with torch.no_grad():
            known.update(piece.stage(_inputs(piece, known)))
    return known


def _inputs(piece: _Piece, known: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leaves for the piece's inputs, as if they had come over a link."""
    return {name: known[name].detach().requires_grad_(known[name].is_floating_point()) for name in piece.stage.inputs}


def _round(chain: Sequence[_Piece], graph: Graph, batch: dict[str, torch.Tensor], clock: Callable[[], int], keep: bool) -> None:
    known = dict(batch)
    leaves: list[dict[str, torch.Tensor]] = []
    for piece in chain:
        started = clock()
        inputs = _inputs(piece, known)
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


def _signature(graph: Graph, low: int, high: int) -> Signature:
    shapes = {parameter.name: parameter.shape for parameter in graph.parameters}
    return tuple((o.kind, o.forward_flops, o.backward_weight_flops, o.saved_bytes, o.written_bytes,
                  tuple(shapes[name] for name in o.parameters)) for o in graph.operators[low:high])


def _shared_times(graph: Graph, chain: Sequence[_Piece]) -> dict[Signature, tuple[float, float]]:
    """Median over rounds, then mean over the pieces of one signature."""
    found: dict[Signature, list[tuple[float, float]]] = {}
    for piece in chain:
        found.setdefault(_signature(graph, piece.low, piece.high), []).append(
            (statistics.median(piece.forward_ns), statistics.median(piece.backward_ns)))
    return {signature: (statistics.fmean(f for f, _ in times), statistics.fmean(b for _, b in times))
            for signature, times in found.items()}


def _timed_backward(piece: _Piece, known: dict[str, torch.Tensor], clock: Callable[[], int], *,
                    split: bool) -> tuple[int, ...]:
    """Times of the whole backward, or of its two halves."""
    outputs = piece.stage(_inputs(piece, known))
    taken = [name for name, value in outputs.items() if value.requires_grad]
    grads = [torch.ones_like(outputs[name]) for name in taken]
    deferred = piece.stage.start_deferring() if split else []
    started = clock()
    torch.autograd.backward([outputs[name] for name in taken], grads)
    middle = clock()
    if not split:
        return (middle - started,)
    piece.stage.run_deferred(deferred)
    ended = clock()
    piece.stage.stop_deferring()
    return middle - started, ended - middle


def _share_out(operators: Sequence[Operator], measured: Sequence[float]) -> dict[str, OperatorTimes]:
    """Split a piece's times (forward, backward, input half, weight half) over its operators by work: FLOPs, and eight FLOPs'
    worth for each byte moved."""
    weights = [operator.forward_flops + 8 * (operator.read_bytes + operator.written_bytes) + 1 for operator in operators]
    total = sum(weights)
    result = {}
    for operator, weight in zip(operators, weights, strict=True):
        forward, backward, inputs, own = (round(value * weight / total) for value in measured)
        result[operator.name] = OperatorTimes(forward_ns=forward, backward_ns=backward, backward_input_ns=inputs,
                                              backward_weight_ns=own)
    return result
