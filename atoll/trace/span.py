"""What happened: one span for every instruction, in one form for simulator and runtime."""

from __future__ import annotations

from atoll.records import Record

__all__ = ["Span", "Trace", "TraceHeader"]


class Span(Record):
    """``instruction``: index in the worker's program; ``name``: its notation ("2F0"). Times in ns from the run's origin.

    ``size_bytes``: bytes moved (0 for compute).
    """

    worker: str
    step: int
    instruction: int
    name: str
    lane: str
    start_ns: int
    end_ns: int
    size_bytes: int = 0


class TraceHeader(Record):
    """First line of ``trace.jsonl``. ``clock``: "simulated" or "measured"."""

    program: str
    clock: str
    workers: tuple[str, ...]
    plan: str = ""
    schema: int = 1


class Trace(Record):
    header: TraceHeader
    spans: tuple[Span, ...]
