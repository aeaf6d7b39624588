"""Start and end of every node of one step, in ns from the beginning of the simulation."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Timeline"]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Indices are nodes (``compiled``). The lists are filled by the event loop and only read afterwards."""

    starts: list[int]
    ends: list[int]
