"""Predicted beside measured, as a record (``report.json``) that tables and pictures show.

Errors are (predicted - measured) / measured in percent: negative means that the prediction was too fast.

The *twin law*: both interpreters read one program, so every step must show the same set of spans
(worker, instruction, name, lane, bytes); only the times may differ. What differs is found by ``atoll.trace.diff``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import msgspec

from atoll.records import Record
from atoll.report.analysis import (
    bubbles,
    by_lane,
    by_step,
    complete_steps,
    kind_means_ns,
    latencies,
    link_use,
    shown_step,
    step_lengths,
    worker_shares,
)
from atoll.trace.diff import diff
from atoll.trace.span import Span, Trace, TraceHeader

__all__ = ["Comparison", "KindRow", "LaneRow", "StepRow", "TwinVerdict", "WorkerRow", "compare", "error_percent", "twin"]

SHOWN_DIFFERENCES = 12
"""A twin verdict lists this many differences in words and counts the rest."""

MOST_STEPS = 200
"""Medians of workers, lanes and kinds are taken over this many steps, evenly spread (step times and the twin law: over all)."""

Key = tuple[str, int, str, str, int]


class StepRow(Record):
    """Length of a step as in ``analysis.step_lengths``; measured: the median. ``low_ns``, ``high_ns``: 10 % and 90 % of the
    measured steps.

    Bubbles are fractions of the step (``*_makespan``) and of each worker's own span of compute (``*_span``).
    """

    predicted_ns: int | None
    measured_ns: int | None
    low_ns: int | None
    high_ns: int | None
    steps: int
    error_percent: float | None
    predicted_bubble_makespan: float | None
    predicted_bubble_span: float | None
    measured_bubble_makespan: float | None
    measured_bubble_span: float | None


class WorkerRow(Record):
    """Per step, in ns: the whole compute lane, and what was exposed, waited and idle. Measured: median over steps."""

    worker: str
    predicted_compute_ns: int | None
    measured_compute_ns: int | None
    error_percent: float | None
    predicted_exposed_ns: int | None
    measured_exposed_ns: int | None
    predicted_waiting_ns: int | None
    measured_waiting_ns: int | None


class LaneRow(Record):
    """One lane of one worker in one step: bytes that moved, ns in which it was taken (measured: medians)."""

    worker: str
    lane: str
    predicted_bytes: int | None
    measured_bytes: int | None
    predicted_busy_ns: int | None
    measured_busy_ns: int | None
    error_percent: float | None


class KindRow(Record):
    """Mean duration of one kind of instruction on one worker (``count``: a step's number of them)."""

    worker: str
    kind: str
    count: int
    predicted_ns: float | None
    measured_ns: float | None
    error_percent: float | None


class TwinVerdict(Record):
    """``holds``: None when there was nothing to hold together. ``spans``: of one predicted step; ``steps``: measured steps
    checked; ``partial``: measured steps left out because the run broke off in them."""

    holds: bool | None
    spans: int
    steps: int
    partial: tuple[int, ...]
    differences: tuple[str, ...]
    more: int

    @property
    def sentence(self) -> str:
        if self.holds is None:
            return "The twin law was not checked: it needs a predicted and a measured trace."
        left_out = f"; step {self.partial[0]} broke off and is left out" if self.partial else ""
        if self.holds:
            return (f"The twin law holds: each of {self.steps} measured steps has exactly the {self.spans} predicted spans "
                    f"(worker, instruction, lane, bytes){left_out}.")
        count = len(self.differences) + self.more
        return f"The twin law is broken: {count} difference{'s' * (count != 1)} over {self.steps} measured steps{left_out}."


class Comparison(Record):
    """``predicted_step``, ``measured_step``: the steps that stand for the rest in pictures and in predicted figures."""

    predicted_step: int | None
    measured_step: int | None
    step: StepRow
    workers: tuple[WorkerRow, ...]
    lanes: tuple[LaneRow, ...]
    kinds: tuple[KindRow, ...]
    twin: TwinVerdict


def error_percent(predicted: float | None, measured: float | None) -> float | None:
    """(predicted - measured) / measured in percent; None when either is missing or nothing was measured."""
    if predicted is None or not measured:
        return None
    return 100.0 * (predicted - measured) / measured


def compare(predicted: Trace | None, measured: Trace | None) -> Comparison:
    """Hold a predicted trace beside a measured one; either may be missing, then its figures are None."""
    foretold = by_step(predicted) if predicted else {}
    happened = by_step(measured) if measured else {}
    one = shown_step(predicted, foretold) if predicted else None
    many = _settled(happened)
    workers = _workers(predicted, measured)
    left = foretold[one] if one is not None else None
    right = [happened[step] for step in _spread(many, MOST_STEPS)]
    foretold_ns = step_lengths(foretold).get(one) if one is not None else None
    happened_ns = sorted(length for step, length in step_lengths(happened).items() if step in many)
    return Comparison(predicted_step=one, measured_step=shown_step(measured, happened) if measured else None,
                      step=_step_row(left, right, foretold_ns, happened_ns),
                      workers=_worker_rows(left, right, workers), lanes=_lane_rows(left, right),
                      kinds=_kind_rows(left, right, workers), twin=twin(foretold, happened))


def _spread(steps: list[int], most: int) -> list[int]:
    """At most ``most`` of ``steps``, evenly apart."""
    return steps if len(steps) <= most else [steps[index * len(steps) // most] for index in range(most)]


def _workers(*traces: Trace | None) -> list[str]:
    names: dict[str, None] = {}
    for trace in traces:
        if trace is not None:
            names.update(dict.fromkeys(trace.header.workers))
            names.update(dict.fromkeys(span.worker for span in trace.spans))
    return list(names)


def _settled(steps: Mapping[int, Sequence[Span]]) -> list[int]:
    """Complete steps without the first two (they warm up), when enough remain."""
    complete = complete_steps(steps)
    return complete[2:] if len(complete) > 4 else complete[1:] if len(complete) > 1 else complete


def _middle(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(median(known)) if known else None


def _step_row(left: Sequence[Span] | None, right: Sequence[Sequence[Span]], predicted: int | None,
              lengths: list[int]) -> StepRow:
    measured = _middle(lengths)
    before = bubbles(left) if left else None
    after = [bubbles(spans) for spans in right]
    return StepRow(predicted_ns=predicted, measured_ns=measured,
                   low_ns=lengths[len(lengths) // 10] if lengths else None,
                   high_ns=lengths[-1 - len(lengths) // 10] if lengths else None,
                   steps=len(lengths), error_percent=error_percent(predicted, measured),
                   predicted_bubble_makespan=before[0] if before else None,
                   predicted_bubble_span=before[1] if before else None,
                   measured_bubble_makespan=median(pair[0] for pair in after) if after else None,
                   measured_bubble_span=median(pair[1] for pair in after) if after else None)


def _worker_rows(left: Sequence[Span] | None, right: Sequence[Sequence[Span]], workers: Sequence[str],
                 ) -> tuple[WorkerRow, ...]:
    before = worker_shares(left, workers) if left else None
    after = [worker_shares(spans, workers) for spans in right]
    rows = []
    for index, worker in enumerate(workers):
        old = before[index] if before else None
        new = [shares[index] for shares in after]
        compute = _middle([share.compute_ns for share in new])
        rows.append(WorkerRow(
            worker=worker, predicted_compute_ns=old.compute_ns if old else None, measured_compute_ns=compute,
            error_percent=error_percent(old.compute_ns if old else None, compute),
            predicted_exposed_ns=old.exposed_ns if old else None,
            measured_exposed_ns=_middle([share.exposed_ns for share in new]),
            predicted_waiting_ns=sum(old.waiting_ns.values()) if old else None,
            measured_waiting_ns=_middle([sum(share.waiting_ns.values()) for share in new])))
    return tuple(rows)


def _lane_use(spans: Sequence[Span],
              latency_ns: Mapping[tuple[str, str], int] | None) -> dict[tuple[str, str], tuple[int, int]]:
    """By (worker, lane): bytes, and ns in which the lane was taken (of what goes out: in which the link was busy)."""
    found = {key: (sum(span.size_bytes for span in row), sum(span.end_ns - span.start_ns for span in row))
             for key, row in by_lane(spans).items()}
    for (source, target), (_, size, busy) in link_use(spans, latency_ns).items():
        found[source, f"out:{target}" if target else "native"] = size, busy
    return found


def _lane_rows(left: Sequence[Span] | None, right: Sequence[Sequence[Span]]) -> tuple[LaneRow, ...]:
    latency_ns = latencies(left) if left else None
    before = _lane_use(left, latency_ns) if left else {}
    after = [_lane_use(spans, latency_ns) for spans in right]
    rows = []
    for key in sorted({*before, *(key for use in after for key in use)}, key=lambda key: (key[0], key[1] != "compute", key[1])):
        old = before.get(key, (0, 0)) if left else (None, None)
        taken = [use.get(key, (0, 0)) for use in after]
        busy = _middle([pair[1] for pair in taken])
        rows.append(LaneRow(worker=key[0], lane=key[1], predicted_bytes=old[0],
                            measured_bytes=_middle([pair[0] for pair in taken]), predicted_busy_ns=old[1],
                            measured_busy_ns=busy, error_percent=error_percent(old[1], busy)))
    return tuple(rows)


def _kind_rows(left: Sequence[Span] | None, right: Sequence[Sequence[Span]], workers: Sequence[str]) -> tuple[KindRow, ...]:
    rows = []
    old_means, new_means = _means_by_worker(left or ()), [_means_by_worker(spans) for spans in right]
    for worker in workers:
        before = old_means.get(worker, {})
        after = [means.get(worker, {}) for means in new_means]
        for kind in dict.fromkeys([*before, *(kind for means in after for kind in means)]):
            counts = [means[kind] for means in after if kind in means]
            old = before[kind][1] if kind in before else None
            new = fmean(mean for _, mean in counts) if counts else None
            rows.append(KindRow(worker=worker, kind=kind, count=before[kind][0] if kind in before else counts[0][0],
                                predicted_ns=old, measured_ns=new, error_percent=error_percent(old, new)))
    return tuple(rows)


def _means_by_worker(spans: Sequence[Span]) -> dict[str, dict[str, tuple[int, float]]]:
    own: dict[str, list[Span]] = {}
    for span in spans:
        own.setdefault(span.worker, []).append(span)
    return {worker: kind_means_ns(row) for worker, row in own.items()}


def twin(predicted: Mapping[int, Sequence[Span]], measured: Mapping[int, Sequence[Span]]) -> TwinVerdict:
    """Hold every measured step's set of spans against the predicted one.

    Only the LAST measured step may be left out as broken off (it has fewer spans than predicted, all of them known);
    any other difference breaks the law. Cost: O(spans).
    """
    if not predicted or not measured:
        return TwinVerdict(holds=None, spans=0, steps=0, partial=(), differences=(), more=0)
    pattern = next(iter(predicted.values()))
    expected = _keys(pattern)
    found: list[str] = []
    for step, spans in predicted.items():
        found.extend(_differences(pattern, spans, f"predicted step {step}"))
    partial: list[int] = []
    last = max(measured)
    for step, spans in measured.items():
        if step == last and len(spans) < len(pattern) and not _keys(spans) - expected:
            partial.append(step)
        else:
            found.extend(_differences(pattern, spans, f"step {step}"))
    checked = len(measured) - len(partial)
    return TwinVerdict(holds=not found if checked or found else None, spans=len(pattern), steps=checked,
                       partial=tuple(partial), differences=tuple(found[:SHOWN_DIFFERENCES]),
                       more=max(0, len(found) - SHOWN_DIFFERENCES))


def _keys(spans: Sequence[Span]) -> Counter[Key]:
    return Counter((span.worker, span.instruction, span.name, span.lane, span.size_bytes) for span in spans)


def _differences(pattern: Sequence[Span], spans: Sequence[Span], where: str) -> list[str]:
    """In words; the sets are compared first, because that is cheap and nearly always all there is to do."""
    if _keys(pattern) == _keys(spans):
        return []
    names = {(span.worker, span.instruction): span.name for span in (*spans, *pattern)}
    apart = diff(_as_step_zero(pattern), _as_step_zero(spans))
    lines = [f"{where}: {worker} did not run {names[worker, index]} (instruction {index})"
             for worker, _, index in apart.missing]
    lines += [f"{where}: {worker} ran {names[worker, index]} (instruction {index}), which was not predicted"
              for worker, _, index in apart.extra]
    lines += [f"{where}: {change.field} of instruction {change.instruction} of {change.worker} was {change.second!r}, "
              f"predicted {change.first!r}" for change in apart.changed]
    repeated = len(spans) - len({(span.worker, span.instruction) for span in spans})
    return lines + ([f"{where}: {repeated} spans are written more than once"] if repeated else [])


def _as_step_zero(spans: Sequence[Span]) -> Trace:
    header = TraceHeader(program="", clock="", workers=())
    return Trace(header=header, spans=tuple(msgspec.structs.replace(span, step=0) for span in spans))
