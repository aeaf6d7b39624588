"""Put every Receive where it is needed, in the order in which the sender sends.

A pair of workers shares one ordered channel each way, so the receives of a pair must follow the sends of the peer. Before an
instruction that reads what a peer sends, the receives from that peer are woven in up to the one it needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from atoll.errors import ProgramError
from atoll.program.instructions import Buffer, Instruction, Receive, Send

__all__ = ["weave_receives"]


def weave_receives(programs: Mapping[str, Sequence[Instruction]]) -> dict[str, tuple[Instruction, ...]]:
    """``programs``: per worker its instructions without any Receive, each in an order it can execute."""
    pending: dict[str, dict[str, deque[Send]]] = {worker: {} for worker in programs}
    sender: dict[str, dict[Buffer, str]] = {worker: {} for worker in programs}
    for worker, instructions in programs.items():
        for instruction in instructions:
            if isinstance(instruction, Send):
                if instruction.peer not in programs:
                    raise ProgramError(f"{worker} sends {instruction.buffer} to {instruction.peer}, which has no program")
                if instruction.buffer in sender[instruction.peer]:
                    raise ProgramError(f"{instruction.peer} would receive {instruction.buffer} twice")
                pending[instruction.peer].setdefault(worker, deque()).append(instruction)
                sender[instruction.peer][instruction.buffer] = worker
    return {worker: tuple(_woven(instructions, pending[worker], sender[worker]))
            for worker, instructions in programs.items()}


def _woven(instructions: Sequence[Instruction], pending: dict[str, deque[Send]],
           sender: dict[Buffer, str]) -> list[Instruction]:
    result: list[Instruction] = []
    arrived: set[Buffer] = set()
    for instruction in instructions:
        for buffer in instruction.reads:
            while buffer in sender and buffer not in arrived:
                peer = sender[buffer]
                message = pending[peer].popleft()
                arrived.add(message.buffer)
                result.append(Receive(buffer=message.buffer, peer=peer, size_bytes=message.size_bytes))
        result.append(instruction)
    for peer, rest in pending.items():
        result.extend(Receive(buffer=message.buffer, peer=peer, size_bytes=message.size_bytes) for message in rest)
    return result
