"""What a run tells whoever shows it."""

from __future__ import annotations

from typing import Any

from atoll.records import Record
from atoll.runtime.liveness import Timeouts

__all__ = ["Began", "Came", "Evaluated", "RunEvent", "Saved", "StepEnded", "Waiting"]


class RunEvent(Record, tag=True):
    """Base of the events."""


class Waiting(RunEvent):
    """``worker`` must be started by hand on ``machine``; ``bundle``: the file it needs there."""

    worker: str
    machine: str
    bundle: str


class Came(RunEvent):
    worker: str
    machine: str
    facts: dict[str, Any]


class Began(RunEvent):
    """All are ready; the first step begins. ``times``: all time-outs of the run."""

    times: Timeouts


class StepEnded(RunEvent):
    """Every worker has ended training step ``step`` of ``total``. ``loss``: mean per token. ``duration_ns``: since the step
    before ended (the first: since the start)."""

    step: int
    total: int
    loss: float
    tokens: int
    gradient_norm: float
    learning_rate: float
    committed: bool
    duration_ns: int


class Evaluated(RunEvent):
    """``step``: steps done. ``loss``: mean per held-out token."""

    step: int
    loss: float


class Saved(RunEvent):
    """The checkpoint after ``step`` steps exists at ``path``."""

    step: int
    path: str
