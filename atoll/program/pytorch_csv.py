"""PyTorch's pipeline CSV, read and written: one row per rank, one action per cell, "2F0" and the like; blank cells wait.

PyTorch writes it with communication ("2SEND_F0", "0UNSHARD", "1REDUCE_GRAD") or without. Atoll derives communication from
what instructions read and write, so reading skips those cells. Two more forms are understood:

- "(2F3;5B1)OVERLAP_F_B", a pair run as one: it becomes its parts in the order given (the overlap itself is not kept);
- older files, in which B is the gradient of the inputs alone and BW the full backward: known by a W whose B comes without I.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence

from atoll.errors import DocumentError
from atoll.program.instructions import Backward, BackwardInput, BackwardWeight, Forward, Instruction, Receive, Send
from atoll.program.notation import LETTERS, notation

__all__ = ["read_orders", "write_orders"]

_ACTION = re.compile(r"(\d+)(F|I|BW|B|W|UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)(\d*)")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
_SKIPPED = frozenset({"UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B"})
_KINDS: dict[str, type[Forward | Backward | BackwardInput | BackwardWeight]] = {
    "F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}
_Action = tuple[int, int, str, int]


def read_orders(text: str, *, source: str = "schedule.csv") -> tuple[tuple[int, ...], tuple[tuple[Instruction, ...], ...]]:
    """Return (rank of each stage, bare compute instructions of each rank).

    Raises ``DocumentError`` naming ``source``, line and cell: an unknown action, a stage on two ranks or on none, an
    action that a rank lists twice.
    """
    rows = [[action for column, cell in enumerate(row, start=1) for action in _actions(cell, f"{source}: line {line}, "
             f"cell {column}", line)] for line, row in enumerate(csv.reader(io.StringIO(text)), start=1)]
    letters = [(stage, letter, microbatch) for row in rows for _, stage, letter, microbatch in row]
    halves = {(stage, microbatch) for stage, letter, microbatch in letters if letter == "I"}
    older = any(letter == "BW" for _, letter, _ in letters) or any(
        letter == "W" and (stage, microbatch) not in halves for stage, letter, microbatch in letters)
    meaning = {**_KINDS, "BW": Backward, "B": BackwardInput if older else Backward}
    homes: dict[int, int] = {}
    seen: set[tuple[int, str, int]] = set()
    for rank, row in enumerate(rows):
        for line, stage, letter, microbatch in row:
            if homes.setdefault(stage, rank) != rank:
                raise DocumentError(f"{source}: line {line}: stage {stage} is also in the row of rank {homes[stage]}; "
                                    "a stage lives on one rank")
            if (stage, letter, microbatch) in seen:
                raise DocumentError(f"{source}: line {line}: {stage}{letter}{microbatch} is listed twice")
            seen.add((stage, letter, microbatch))
    missing = sorted(set(range(max(homes, default=-1) + 1)) - homes.keys())
    if missing or not homes:
        raise DocumentError(f"{source}: no row runs stage {missing[0] if missing else 0}; stages are numbered from 0 on")
    orders = tuple(tuple(meaning[letter](stage=stage, microbatch=microbatch) for _, stage, letter, microbatch in row)
                   for row in rows)
    return tuple(homes[stage] for stage in range(len(homes))), orders


def _actions(cell: str, place: str, line: int) -> Iterator[_Action]:
    """The compute actions of one cell as (line, stage, letter, microbatch)."""
    cell = cell.strip()
    if not cell:
        return
    pair = _PAIR.fullmatch(cell)
    if pair:
        for part in pair.group(1).split(";"):
            yield from _actions(part, place, line)
        return
    match = _ACTION.fullmatch(cell)
    if match is None:
        raise DocumentError(f'{place}: found {cell!r}, expected [stage][F, I, B, W, SEND_F, ...][microbatch] such as "2F0"')
    stage, letter, microbatch = match.groups()
    if letter in _SKIPPED:
        return
    if not microbatch:
        raise DocumentError(f"{place}: found {cell!r}, which names no microbatch")
    yield line, int(stage), letter, int(microbatch)


def write_orders(rows: Sequence[Iterable[Instruction]]) -> str:
    """Return the CSV of each rank's instructions in the order given; what PyTorch has no name for is left out.

    Bare orders give PyTorch's "compute_only" form; the instructions of a program's workers, Sends and Receives included,
    its "compute_comms" form.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        writer.writerow([notation(instruction) for instruction in row if _has_name(instruction)])
    return out.getvalue()


def _has_name(instruction: Instruction) -> bool:
    if isinstance(instruction, Send | Receive):
        return instruction.buffer[0] in ("activation", "delta")
    return type(instruction) in LETTERS and LETTERS[type(instruction)] in _KINDS
