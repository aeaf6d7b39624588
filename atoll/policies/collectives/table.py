"""All collectives by name. A new one is a file beside this and a line here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from atoll.errors import PlanError
from atoll.policies.collectives.ring import Ring
from atoll.program.contracts import Collective

__all__ = ["COLLECTIVES", "find"]

COLLECTIVES: Mapping[str, Collective] = {
    "ring": Ring(),
}


def find(name: str) -> Collective:
    """Return the collective called ``name``; raises ``PlanError`` with the nearest names."""
    if name in COLLECTIVES:
        return COLLECTIVES[name]
    near = difflib.get_close_matches(name.lower(), COLLECTIVES, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise PlanError(f"collective {name!r} is unknown; {hint}known: {', '.join(COLLECTIVES)}")
