"""What the engine works out once per program: order per lane, what waits for what, when a buffer is done with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from atoll.program.dependencies import dependencies
from atoll.program.instructions import COMPUTE, Buffer, Instruction, Native, Reduce, Send
from atoll.program.notation import notation
from atoll.program.program import Program
from atoll.runtime.kernels.table import KERNELS, Kernel
from atoll.runtime.worker_state import first_sample

__all__ = ["Prepared", "prepare"]

_KEPT = frozenset({"parameters", "gradient", "loss"})
"""Buffer kinds that outlive a step or are kept outside the step's table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One worker's part of a program, ready to run.

    ``order``: instruction indices of each lane. ``needs``: the instructions of other lanes each one waits for; ``waits``: how
    many.
    ``releases``: which instructions of other lanes wait for it. ``reads``: the buffers whose reader count each one lowers.
    ``alone``: nothing else can run at the same time, so one thread executes all lanes in program order.
    """

    instructions: tuple[Instruction, ...]
    kernels: tuple[Kernel, ...]
    names: tuple[str, ...]
    lanes: tuple[str, ...]
    order: dict[str, tuple[int, ...]]
    needs: tuple[tuple[int, ...], ...]
    waits: tuple[int, ...]
    releases: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[Buffer, ...], ...]
    readers: Counter[Buffer]
    in_place: frozenset[Buffer]
    samples: int
    first: int
    alone: bool


def prepare(program: Program, worker: str) -> Prepared:
    """Cost: O(instructions + reads + writes), once."""
    instructions = program.part(worker).instructions
    lanes = tuple(instruction.lane for instruction in instructions)
    order: dict[str, list[int]] = {COMPUTE: []}
    releases: list[list[int]] = [[] for _ in instructions]
    needs: list[tuple[int, ...]] = []
    for index, needed in enumerate(dependencies(instructions)):
        order.setdefault(lanes[index], []).append(index)
        others = tuple(earlier for earlier in needed if lanes[earlier] != lanes[index])
        needs.append(others)
        for earlier in others:
            releases[earlier].append(index)
    reads = tuple(tuple(buffer for buffer in instruction.reads if buffer[0] not in _KEPT or buffer[0] == "gradient")
                  for instruction in instructions)
    return Prepared(
        instructions=instructions, kernels=tuple(KERNELS[type(instruction)] for instruction in instructions),
        names=tuple(notation(instruction) for instruction in instructions), lanes=lanes,
        order={lane: tuple(indices) for lane, indices in order.items()}, needs=tuple(needs),
        waits=tuple(map(len, needs)),
        releases=tuple(tuple(later) for later in releases), reads=reads,
        readers=Counter(buffer for several in reads for buffer in several), in_place=_in_place(instructions),
        samples=program.microbatch_samples, first=first_sample(program, worker),
        alone=len(program.workers) == 1 or len(order) == 1)


def _in_place(instructions: tuple[Instruction, ...]) -> frozenset[Buffer]:
    """Sums that may be written over the gradient chunk they are of: those of whose chunk nothing unfinished is sent."""
    sent = {instruction.buffer[1:3] for instruction in instructions
            if isinstance(instruction, Send) and instruction.buffer[0] in ("gradient", "partial")}
    result: set[Buffer] = set()
    for instruction in instructions:
        if isinstance(instruction, Reduce | Native) and instruction.target[0] in ("partial", "reduced"):
            source_is_chunk = (not isinstance(instruction, Native) or instruction.source[0] == "gradient"
                               or instruction.source in result)
            if instruction.target[1:3] not in sent and source_is_chunk:
                result.add(instruction.target)
    return frozenset(result)


