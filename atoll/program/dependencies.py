"""THE dependency rule: what an instruction waits for follows from reads, writes and lanes; nothing is listed by hand.

Within one worker an instruction waits for
  - the instruction before it on the same lane,
  - the last writer of each buffer it reads (read after write),
  - the last writer and all later readers of each buffer it writes (write after write, write after read).
Between workers a Receive waits for its Send (k-th with k-th of the pair), and the members of a Native meet.
A step ends, for each worker by itself, when all of its instructions have ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.program.instructions import Buffer, Instruction

__all__ = ["dependencies"]


def dependencies(instructions: Sequence[Instruction]) -> list[tuple[int, ...]]:
    """Return, for each instruction of ONE worker, the indices of the earlier ones it waits for (sorted, each once).

    Cost: O(reads + writes).
    """
    last_on_lane: dict[str, int] = {}
    writer: dict[Buffer, int] = {}
    readers: dict[Buffer, list[int]] = {}
    result: list[tuple[int, ...]] = []
    for index, instruction in enumerate(instructions):
        waits: set[int] = set()
        lane = instruction.lane
        if lane in last_on_lane:
            waits.add(last_on_lane[lane])
        last_on_lane[lane] = index
        for buffer in instruction.reads:
            if buffer in writer:
                waits.add(writer[buffer])
            readers.setdefault(buffer, []).append(index)
        for buffer in instruction.writes:
            if buffer in writer:
                waits.add(writer[buffer])
            waits.update(readers.get(buffer, ()))
            writer[buffer] = index
            readers[buffer] = []
        waits.discard(index)
        result.append(tuple(sorted(waits)))
    return result
