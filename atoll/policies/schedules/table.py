"""All schedules by name. A new one is a file beside this and a line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from atoll.errors import PlanError
from atoll.policies.schedules.breadth_first import BreadthFirst
from atoll.policies.schedules.gpipe import GPipe
from atoll.policies.schedules.interleaved import Interleaved
from atoll.policies.schedules.one_f_one_b import OneFOneB
from atoll.policies.schedules.zb_h1 import ZbH1
from atoll.policies.schedules.zb_v import ZbV
from atoll.program.contracts import Schedule

__all__ = ["SCHEDULES", "find"]

SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": GPipe(),
    "1f1b": OneFOneB(),
    "interleaved-1f1b": Interleaved(),
    "breadth-first": BreadthFirst(),
    "zb-h1": ZbH1(),
    "zb-v": ZbV(),
}


def find(name: str) -> Schedule:
    """Return the schedule called ``name``; raises ``PlanError`` with the nearest names."""
    if name in SCHEDULES:
        return SCHEDULES[name]
    near = difflib.get_close_matches(name.lower(), SCHEDULES, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise PlanError(f"schedule {name!r} is unknown; {hint}known: {', '.join(SCHEDULES)}")
