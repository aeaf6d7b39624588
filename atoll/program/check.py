"""The checker: run a program in thought, in no time, and name the culprit if it cannot be run.

Four questions, each with its own message: do messages and collectives have their counterparts; is every buffer written
once and before it is read; does everything get its turn (deadlock); how many activations does each worker hold at most.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import zip_longest

from atoll.errors import ProgramError
from atoll.program.instructions import ACCUMULATED, Buffer, Instruction, Native, Receive, Send, Update
from atoll.program.linked import Linked, link
from atoll.program.notation import buffer_notation, notation
from atoll.program.program import Program, WorkerProgram
from atoll.records import Record

__all__ = ["Checked", "check", "live_peak"]

PERSISTENT = frozenset({"parameters"}) | ACCUMULATED
"""Buffer kinds that exist before the step: they may be read before they are written."""


class Checked(Record):
    """What was counted on the way. ``saved_peak``: per worker the most ("saved", s, m) buffers alive at once."""

    instructions: int
    messages: int
    saved_peak: dict[str, int]


def check(program: Program) -> Checked:
    """Return the counts of an executable program. Cost: O(instructions + reads + writes).

    Raises ``ProgramError`` naming worker, instruction and buffer: an unmatched or misaddressed Send or Receive, a Native
    whose members differ, a buffer read before it is written or written twice, an Update without a Commit, a deadlock.
    """
    names = [part.worker for part in program.workers]
    for name, count in Counter(names).items():
        if count > 1:
            raise ProgramError(f"worker {name} has {count} programs, expected one")
    _check_messages(program, frozenset(names))
    _check_natives(program, frozenset(names))
    for part in program.workers:
        _check_buffers(part)
    linked = link(program)
    order = linked.in_order()
    if len(order) < len(linked.instructions):
        raise ProgramError(_deadlock(linked, frozenset(order)))
    return Checked(instructions=len(order),
                   messages=sum(isinstance(instruction, Send) for instruction in linked.instructions),
                   saved_peak={part.worker: live_peak(part.instructions) for part in program.workers})


def live_peak(instructions: Sequence[Instruction], kinds: Collection[str] = ("saved",)) -> int:
    """The most buffers of ``kinds`` alive at once when one worker's instructions run in the order given.

    A buffer lives from the start of its writer to the end of its last reader: an activation is freed at the end of Backward or
    of BackwardWeight. What nobody reads lives to the end of the step.
    """
    last_read: dict[Buffer, int] = {}
    for index, instruction in enumerate(instructions):
        for buffer in instruction.reads:
            last_read[buffer] = index
    alive: set[Buffer] = set()
    peak = 0
    for index, instruction in enumerate(instructions):
        alive.update(buffer for buffer in instruction.writes if buffer[0] in kinds)
        peak = max(peak, len(alive))
        alive.difference_update(buffer for buffer in instruction.reads if last_read[buffer] == index)
    return peak


def _check_messages(program: Program, names: frozenset[str]) -> None:
    sends: dict[tuple[str, str], list[Send]] = defaultdict(list)
    receives: dict[tuple[str, str], list[Receive]] = defaultdict(list)
    for part in program.workers:
        for instruction in part.instructions:
            if not isinstance(instruction, Send | Receive):
                continue
            if instruction.peer == part.worker or instruction.peer not in names:
                who = "itself" if instruction.peer == part.worker else f"{instruction.peer}, which is not in the program"
                raise ProgramError(f"worker {part.worker}: {notation(instruction)} names {who} as its peer; "
                                   f"workers: {', '.join(sorted(names))}")
            if isinstance(instruction, Send):
                sends[part.worker, instruction.peer].append(instruction)
            else:
                receives[instruction.peer, part.worker].append(instruction)
    for sender, receiver in sorted(sends.keys() | receives.keys()):
        pairs = zip_longest(sends[sender, receiver], receives[sender, receiver])
        for number, (send, receive) in enumerate(pairs, start=1):
            if receive is None:
                raise ProgramError(f"worker {sender}: {notation(send)} to {receiver} is unmatched: it is message {number} of "
                                   f"this pair, and {receiver} lists {number - 1} receives from {sender}")
            if send is None:
                raise ProgramError(f"worker {receiver}: {notation(receive)} from {sender} is unmatched: it is message {number} "
                                   f"of this pair, and {sender} lists {number - 1} sends to {receiver}")
            if send.buffer != receive.buffer or send.size_bytes != receive.size_bytes:
                raise ProgramError(
                    f"message {number} from {sender} to {receiver}: sent is {buffer_notation(send.buffer)} of "
                    f"{send.size_bytes} bytes, expected at the receiver is {buffer_notation(receive.buffer)} of "
                    f"{receive.size_bytes} bytes; list the receives of a pair in the order of its sends")


def _check_natives(program: Program, names: frozenset[str]) -> None:
    meetings: dict[tuple[str, ...], dict[str, list[Native]]] = defaultdict(lambda: defaultdict(list))
    for part in program.workers:
        for instruction in part.instructions:
            if not isinstance(instruction, Native):
                continue
            group = instruction.group
            strangers = sorted(set(group) - names)
            if part.worker not in group or strangers or len(set(group)) != len(group):
                fault = (f"is not in its group {', '.join(group)}" if part.worker not in group
                         else f"names {strangers[0]}, which is not in the program" if strangers
                         else f"names a member twice in {', '.join(group)}")
                raise ProgramError(f"worker {part.worker}: {notation(instruction)} {fault}")
            meetings[group][part.worker].append(instruction)
    for group, members in meetings.items():
        first = group[0]
        for member in group[1:]:
            for number, (one, other) in enumerate(zip_longest(members[first], members[member]), start=1):
                if one is None or other is None:
                    has, lacks = (first, member) if other is None else (member, first)
                    raise ProgramError(f"worker {has}: {notation(one or other)} would wait for ever: {lacks} lists only "
                                       f"{number - 1} collectives of group {', '.join(group)}")
                if one != other:
                    raise ProgramError(
                        f"collective {number} of group {', '.join(group)}: {first} brings {notation(one)} of {one.size_bytes} "
                        f"bytes ({buffer_notation(one.source)}), {member} brings {notation(other)} of {other.size_bytes} bytes "
                        f"({buffer_notation(other.source)}); all members must bring the same")


def _check_buffers(part: WorkerProgram) -> None:
    written: dict[Buffer, Instruction] = {}
    for instruction in part.instructions:
        for buffer in instruction.reads:
            if buffer in written or buffer[0] in PERSISTENT:
                continue
            if isinstance(instruction, Update) and buffer == ("commit",):
                raise ProgramError(f"worker {part.worker}: {notation(instruction)} has no Commit before it; an update without "
                                   "everyone's agreement is not allowed")
            raise ProgramError(f"worker {part.worker}: {notation(instruction)} reads {buffer_notation(buffer)} before anything "
                               "has written it")
        for buffer in instruction.writes:
            if buffer in written and buffer[0] not in ACCUMULATED:
                raise ProgramError(f"worker {part.worker}: {notation(instruction)} writes {buffer_notation(buffer)} again, "
                                   f"which {notation(written[buffer])} has written; a buffer has one writer a step")
            written[buffer] = instruction


def _deadlock(linked: Linked, done: frozenset[int]) -> str:
    """Follow the waiting from the first stuck instruction until it comes round, and tell the circle."""

    def blocker(node: int) -> int:
        return next(earlier for earlier in linked.before[node] if earlier not in done)

    node = next(node for node in range(len(linked.instructions)) if node not in done)
    path: list[int] = []
    while node not in path:
        path.append(node)
        node = blocker(node)
    circle = path[path.index(node):]

    def place(one: int) -> str:
        instruction = linked.instructions[one]
        peer = f" (peer {instruction.peer})" if isinstance(instruction, Send | Receive) else ""
        return f"worker {linked.owners[one]}: {notation(instruction)}{peer}"

    return "deadlock: " + ", which waits for ".join(place(one) for one in [*circle, circle[0]])
