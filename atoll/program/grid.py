"""A program as text: one row per worker, one column per time unit, the instructions in the notation of the house.

    0 | 0F0 0F1 0F2 .   .   0B0 --- 0B1 --- 0B2 ---
    1 | .   1F0 1F1 1F2 ...

A cell holds the name where an instruction starts, ``---`` while it runs and ``.`` while the worker waits. Messages take no
time. Equal programs give equal text, so a change of a schedule shows as a small diff.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.errors import ProgramError
from atoll.program.instructions import COMPUTE, Backward, Instruction
from atoll.program.linked import link
from atoll.program.notation import LETTERS, notation
from atoll.program.program import Program

__all__ = ["grid"]


def grid(program: Program, units: Mapping[type[Instruction], int] | None = None) -> str:
    """Return the compute of all workers as text, each line ended.

    ``units``: whole time units of an instruction's type (default: one, and two for a full Backward). Everything that is not
    compute of a stage takes no time and is not shown. Raises ``ProgramError`` when the program cannot run to its end.
    """
    if units is None:
        units = dict.fromkeys(LETTERS, 1) | {Backward: 2}
    linked = link(program)
    order = linked.in_order()
    if len(order) < len(linked.instructions):
        raise ProgramError("a program that deadlocks cannot be drawn; program.check names the culprit")
    ends = [0] * len(order)
    rows: dict[str, list[tuple[int, int, str]]] = {part.worker: [] for part in program.workers}
    for node in order:
        start = max((ends[earlier] for earlier in linked.before[node]), default=0)
        instruction = linked.instructions[node]
        shown = type(instruction) in LETTERS and instruction.lane == COMPUTE
        ends[node] = start + (units[type(instruction)] if shown else 0)
        if shown:
            rows[linked.owners[node]].append((start, ends[node], notation(instruction)))
    width = max((len(name) for row in rows.values() for _, _, name in row), default=1)
    margin = max((len(worker) for worker in rows), default=0)
    return "".join(f"{worker:<{margin}} | {_row(row, width)}\n" for worker, row in rows.items())


def _row(row: list[tuple[int, int, str]], width: int) -> str:
    cells: list[str] = []
    for start, end, name in sorted(row):
        cells.extend(["."] * (start - len(cells)))
        cells.extend([name, *["-" * width] * (end - start - 1)][:end - start])
    return " ".join(f"{cell:<{width}}" for cell in cells).rstrip()
