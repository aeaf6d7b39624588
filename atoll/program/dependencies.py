"""THE dependency rule: what an instruction waits for follows from reads, writes and lanes; nothing is listed by hand.

Within one worker an instruction waits for
  - the instruction before it on the same lane,
  - the last writer of each buffer it reads (read after write),
  - the last writer and all later readers of each buffer it writes (write after write, write after read).
Between workers a Receive waits for its Send (k-th with k-th of the pair), and the members of a Native meet.
A step ends, for each worker by itself, when all of its instructions have ended.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

__all__ = ["Access", "dependencies"]


class Access(Protocol):
    """All that the rule looks at: an instruction, or its lane, reads and writes written down once."""

    @property
    def lane(self) -> str: ...

    @property
    def reads(self) -> Iterable[Hashable]: ...

    @property
    def writes(self) -> Iterable[Hashable]: ...


def dependencies(instructions: Sequence[Access]) -> list[tuple[int, ...]]:
    """Return, for each instruction of ONE worker, the indices of the earlier ones it waits for (sorted, each once).

    Cost: O(reads + writes).
    """
    last_on_lane: dict[str, int] = {}
    users: dict[Hashable, list[int]] = {}  # of each buffer: its last writer (or -1), then those who read it since
    result: list[tuple[int, ...]] = []
    for index, instruction in enumerate(instructions):
        lane = instruction.lane
        waits = {last_on_lane.get(lane, -1)}
        last_on_lane[lane] = index
        for buffer in instruction.reads:
            since = users.get(buffer)
            if since is None:
                users[buffer] = [-1, index]
            else:
                waits.add(since[0])
                since.append(index)
        for buffer in instruction.writes:
            since = users.get(buffer)
            if since is not None:
                waits.update(since)
            users[buffer] = [index]
        waits.discard(-1)
        waits.discard(index)
        result.append(tuple(sorted(waits)))
    return result
