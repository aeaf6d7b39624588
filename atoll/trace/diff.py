"""Lay one trace of a program over another: the same spans? the same bytes? how far apart in time?

The twin law of the house is ``diff(predicted, measured).same``; the errors in time are printed beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from statistics import median

from atoll.records import Record
from atoll.trace.span import Span, Trace

__all__ = ["Change", "DurationError", "SpanKey", "StepError", "TraceDiff", "diff"]

SpanKey = tuple[str, int, int]
"""(worker, step, instruction)."""


class Change(Record):
    """Two spans of one instruction that differ in ``field`` ("name", "lane" or "size_bytes")."""

    worker: str
    step: int
    instruction: int
    field: str
    first: str | int
    second: str | int


class DurationError(Record):
    """All spans of one kind of instruction on one kind of lane: how long the first trace says, how long the second.

    ``median_error`` and ``worst_error``: of (first - second) / second over the spans whose second duration is not zero
    (the worst: the largest in absolute value, with its sign).
    """

    kind: str
    lane: str
    count: int
    first_ns: int
    second_ns: int
    median_error: float
    worst_error: float


class StepError(Record):
    """A step's length: from the last end of the step before (or its own first start) to its last end, over all workers."""

    step: int
    first_ns: int
    second_ns: int

    @property
    def error(self) -> float:
        return (self.first_ns - self.second_ns) / self.second_ns if self.second_ns else 0.0


class TraceDiff(Record):
    """``missing``: spans of the first trace that the second lacks; ``extra``: the reverse."""

    missing: tuple[SpanKey, ...]
    extra: tuple[SpanKey, ...]
    changed: tuple[Change, ...]
    durations: tuple[DurationError, ...]
    steps: tuple[StepError, ...]

    @property
    def same(self) -> bool:
        """Every span of one is a span of the other: instruction, name, worker, lane and bytes (times aside)."""
        return not (self.missing or self.extra or self.changed)

    @property
    def median_step_error(self) -> float:
        """Median over the steps of |first - second| / second (0 when there are no steps)."""
        return median(abs(step.error) for step in self.steps) if self.steps else 0.0

    def sentence(self) -> str:
        if self.same:
            return f"same spans and bytes in {len(self.steps)} steps; step time off by {self.median_step_error:.1%} (median)"
        first = [f"{len(self.missing)} spans missing, first {_place(self.missing[0])}"] if self.missing else []
        first += [f"{len(self.extra)} spans too many, first {_place(self.extra[0])}"] if self.extra else []
        if self.changed:
            change = self.changed[0]
            where = _place((change.worker, change.step, change.instruction))
            first.append(f"{len(self.changed)} fields differ, first {change.field} of {where}: {change.first!r} against "
                         f"{change.second!r}")
        return "; ".join(first)


def diff(first: Trace, second: Trace, *, repeat_last: bool = False) -> TraceDiff:
    """Compare two traces of one program, span by span of (worker, step, instruction).

    ``repeat_last``: the last step of the first trace stands for every later step of the second (a prediction of a few
    steps against a long run). Cost: O(spans log spans).
    """
    left, right = _by_key(first.spans), _by_key(second.spans)
    if repeat_last and left:
        _repeat(left, max(step for _, step, _ in left), {step for _, step, _ in right})
    shared = [key for key in left if key in right]
    changed = [Change(worker=key[0], step=key[1], instruction=key[2], field=field, first=getattr(left[key], field),
                      second=getattr(right[key], field))
               for key in shared for field in ("name", "lane", "size_bytes")
               if getattr(left[key], field) != getattr(right[key], field)]
    return TraceDiff(missing=tuple(sorted(key for key in left if key not in right)),
                     extra=tuple(sorted(key for key in right if key not in left)), changed=tuple(changed),
                     durations=_durations([(left[key], right[key]) for key in shared]),
                     steps=_steps(left.values(), right.values()))


def _by_key(spans: Iterable[Span]) -> dict[SpanKey, Span]:
    return {(span.worker, span.step, span.instruction): span for span in spans}


def _repeat(spans: dict[SpanKey, Span], last: int, wanted: set[int]) -> None:
    """Copy the spans of step ``last`` to every later step in ``wanted``, one step length apart."""
    pattern = [span for (_, step, _), span in spans.items() if step == last]
    end = max(span.end_ns for span in pattern)
    before = [span.end_ns for (_, step, _), span in spans.items() if step < last]
    length = end - (max(before) if before else min(span.start_ns for span in pattern))
    for step in wanted:
        if step > last:
            shift = (step - last) * length
            for span in pattern:
                spans[span.worker, step, span.instruction] = Span(
                    worker=span.worker, step=step, instruction=span.instruction, name=span.name, lane=span.lane,
                    start_ns=span.start_ns + shift, end_ns=span.end_ns + shift, size_bytes=span.size_bytes)


def _durations(pairs: list[tuple[Span, Span]]) -> tuple[DurationError, ...]:
    groups: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for one, other in pairs:
        word = re.match(r"\d*([A-Za-z_]+)", one.name)  # "2F0": F; "2SEND_F0>5": SEND_F; "LOAD 0.3": LOAD
        key = (word.group(1) if word else one.name, one.lane.partition(":")[0])
        groups.setdefault(key, []).append((one.end_ns - one.start_ns, other.end_ns - other.start_ns))
    result = []
    for (kind, lane), times in sorted(groups.items()):
        errors = [(one - other) / other for one, other in times if other]
        result.append(DurationError(kind=kind, lane=lane, count=len(times), first_ns=sum(one for one, _ in times),
                                    second_ns=sum(other for _, other in times),
                                    median_error=median(errors) if errors else 0.0,
                                    worst_error=max(errors, key=abs) if errors else 0.0))
    return tuple(result)


def _steps(first: Iterable[Span], second: Iterable[Span]) -> tuple[StepError, ...]:
    left, right = _lengths(first), _lengths(second)
    return tuple(StepError(step=step, first_ns=left[step], second_ns=right[step]) for step in sorted(left) if step in right)


def _lengths(spans: Iterable[Span]) -> dict[int, int]:
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for span in spans:
        starts[span.step] = min(starts.get(span.step, span.start_ns), span.start_ns)
        ends[span.step] = max(ends.get(span.step, span.end_ns), span.end_ns)
    return {step: ends[step] - (ends[step - 1] if step - 1 in ends else starts[step]) for step in sorted(ends)}


def _place(key: SpanKey) -> str:
    return f"instruction {key[2]} of {key[0]} in step {key[1]}"
