"""Schedule orders alone as a runnable program: messages of no bytes, no gradients, no votes.

What a schedule comes to by itself: the simulator evaluates it against published figures, the checker looks for
deadlocks in it, the grid draws it. Lowering a plan adds sizes, data, gradients and the end of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from atoll.errors import ProgramError
from atoll.program.instructions import Backward, BackwardInput, BackwardWeight, Buffer, Forward, Instruction, Receive, Send
from atoll.program.program import AnyInstruction, Program, Stage, WorkerProgram

__all__ = ["bare_program"]


def bare_program(placement: Sequence[int], orders: Sequence[Sequence[Instruction]]) -> Program:
    """Return the program of a chain of stages: ``placement[s]`` is the rank of stage s, ``orders[r]`` the compute of rank r.

    Workers are named "0", "1", ... Consecutive stages hand on activations and deltas; between two workers each goes in a
    Send and a Receive of size 0, sent as soon as it exists and received in the order of sending. Cost: O(instructions).

    Raises ``ProgramError`` for an instruction of a stage that lives on another rank or that is no bare compute.
    """
    computes = [[_edges(placement, rank, item) for item in order] for rank, order in enumerate(orders)]
    outgoing: dict[tuple[int, int], list[Buffer]] = defaultdict(list)
    for rank, order in enumerate(computes):
        for instruction in order:
            for buffer in _handed_on(instruction):
                peer = placement[_target(buffer)]
                if peer != rank:
                    outgoing[rank, peer].append(buffer)
    workers = []
    for rank, order in enumerate(computes):
        stages = tuple(Stage(index=s, first=f"stage{s}", last=f"stage{s}") for s, r in enumerate(placement) if r == rank)
        workers.append(WorkerProgram(worker=str(rank), replica=0, stages=stages, buckets=(),
                                     instructions=_with_messages(placement, rank, order, outgoing)))
    return Program(kind="train", microbatch_samples=1, workers=tuple(workers))


def _edges(placement: Sequence[int], rank: int, instruction: Instruction) -> Instruction:
    """The instruction with the stages before and after its own."""
    if not isinstance(instruction, Forward | Backward | BackwardInput | BackwardWeight):
        raise ProgramError(f"rank {rank}: found {type(instruction).__name__} in a schedule's order, expected only Forward, "
                           "Backward, BackwardInput and BackwardWeight")
    stage = instruction.stage
    if not 0 <= stage < len(placement) or placement[stage] != rank:
        home = f"lives on rank {placement[stage]}" if 0 <= stage < len(placement) else "does not exist"
        raise ProgramError(f"rank {rank}: its order runs stage {stage}, which {home}; correct the order or the placement")
    return msgspec.structs.replace(instruction, sources=(stage - 1,) if stage else (),
                                   targets=(stage + 1,) if stage + 1 < len(placement) else ())


def _handed_on(instruction: Instruction) -> list[Buffer]:
    return [buffer for buffer in instruction.writes if buffer[0] in ("activation", "delta")]


def _target(buffer: Buffer) -> int:
    """The stage that reads an activation or delta: an activation (s, t) goes to t, its delta comes back to s."""
    return int(buffer[2] if buffer[0] == "activation" else buffer[1])


def _with_messages(placement: Sequence[int], rank: int, order: Sequence[Instruction],
                   outgoing: dict[tuple[int, int], list[Buffer]]) -> tuple[AnyInstruction, ...]:
    """Each Receive as late as its reader allows, yet in the order of sending; each Send right behind its writer."""
    incoming = {sender: buffers for (sender, receiver), buffers in outgoing.items() if receiver == rank}
    source = {buffer: sender for sender, buffers in incoming.items() for buffer in buffers}
    received = dict.fromkeys(incoming, 0)
    seen: set[Buffer] = set()
    result: list[Instruction] = []

    def receive(sender: int, last: Buffer | None) -> None:
        buffers = incoming[sender]
        while received[sender] < len(buffers) and (last is None or last not in seen):
            buffer = buffers[received[sender]]
            received[sender] += 1
            seen.add(buffer)
            result.append(Receive(buffer=buffer, peer=str(sender), size_bytes=0))

    for instruction in order:
        for buffer in instruction.reads:
            if buffer in source:
                receive(source[buffer], buffer)
        result.append(instruction)
        for buffer in _handed_on(instruction):
            peer = placement[_target(buffer)]
            if peer != rank:
                result.append(Send(buffer=buffer, peer=str(peer), size_bytes=0))
    for sender in incoming:
        receive(sender, None)
    return tuple(result)  # type: ignore[arg-type]
