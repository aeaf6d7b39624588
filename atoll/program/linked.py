"""All instructions of a program in one numbering, with what each waits for, across workers too.

Inside a worker THE dependency rule holds (``program.dependencies``); between workers the k-th Receive of a pair waits for
the k-th Send, and the members of a Native start together: each of them waits for what any of them waits for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import chain

from atoll.program.dependencies import dependencies
from atoll.program.instructions import Instruction, Native, Receive, Send
from atoll.program.program import Program
from atoll.records import Record

__all__ = ["Linked", "link"]


class Linked(Record):
    """``before[n]``: the nodes that must have ended before node n starts. ``offsets[w]``: first node of the w-th worker."""

    instructions: tuple[Instruction, ...]
    owners: tuple[str, ...]
    offsets: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]

    def in_order(self) -> list[int]:
        """The nodes in an order in which they can run; shorter than the program when some can never run. O(nodes + edges)."""
        after: list[list[int]] = [[] for _ in self.before]
        waits = [len(earlier) for earlier in self.before]
        for node, earlier in enumerate(self.before):
            for one in earlier:
                after[one].append(node)
        ready = deque(node for node, count in enumerate(waits) if not count)
        order: list[int] = []
        while ready:
            node = ready.popleft()
            order.append(node)
            for later in after[node]:
                waits[later] -= 1
                if not waits[later]:
                    ready.append(later)
        return order


def link(program: Program) -> Linked:
    """Number the instructions worker by worker. What has no counterpart is left unlinked (``program.check`` names it)."""
    instructions: list[Instruction] = []
    owners: list[str] = []
    offsets: list[int] = []
    before: list[tuple[int, ...]] = []
    sends: dict[tuple[str, str], list[int]] = defaultdict(list)
    receives: dict[tuple[str, str], list[int]] = defaultdict(list)
    natives: dict[tuple[str, ...], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for part in program.workers:
        offset = len(instructions)
        offsets.append(offset)
        before.extend(tuple(offset + index for index in waits) for waits in dependencies(part.instructions))
        for index, instruction in enumerate(part.instructions):
            if isinstance(instruction, Send):
                sends[part.worker, instruction.peer].append(offset + index)
            elif isinstance(instruction, Receive):
                receives[instruction.peer, part.worker].append(offset + index)
            elif isinstance(instruction, Native):
                natives[instruction.group][part.worker].append(offset + index)
        instructions.extend(part.instructions)
        owners.extend([part.worker] * len(part.instructions))
    for pair, nodes in receives.items():
        for receive, send in zip(nodes, sends[pair], strict=False):
            before[receive] += (send,)
    for meetings in natives.values():
        for meeting in zip(*meetings.values(), strict=False):
            _meet(meeting, before)
    return Linked(instructions=tuple(instructions), owners=tuple(owners), offsets=tuple(offsets), before=tuple(before))


def _meet(members: Sequence[int], before: list[tuple[int, ...]]) -> None:
    everything = tuple(dict.fromkeys(chain.from_iterable(before[member] for member in members)))
    for member in members:
        before[member] = everything
