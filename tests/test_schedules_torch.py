"""PyTorch's own pipeline schedules as an oracle: what it writes is read, what is written it reads, orders agree."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from atoll.policies.schedules.table import SCHEDULES
from atoll.program.bare import bare_program
from atoll.program.check import check
from atoll.program.notation import notation
from atoll.program.pytorch_csv import read_orders, write_orders

pytest.importorskip("torch.distributed.pipelining")

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import FORWARD, _Action, _validate_schedule

CASES = [(name, ranks, microbatches, chunks)
         for name, several in [("1F1B", (1,)), ("GPipe", (1,)), ("Interleaved1F1B", (2, 3)), ("LoopedBFS", (2, 3)),
                               ("InterleavedZeroBubble", (2,)), ("ZBVZeroBubble", (2,)), ("DualPipeV", (2,))]
         for chunks in several for ranks, microbatches in [(2, 4), (4, 8), (4, 10), (3, 9)]
         if not (name == "DualPipeV" and microbatches < 2 * ranks)]
SAME = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved-1f1b", "LoopedBFS": "breadth-first"}


def _theirs(name: str, ranks: int, microbatches: int, chunks: int, **options: bool) -> list[list[_Action | None]]:
    rows = get_schedule_ops(name, ranks, microbatches, num_stages_per_rank=chunks, **options)
    if name == "1F1B":  # what it runs is right, what it prints counts the last rank's forwards from 1 (torch 2.13)
        number = itertools.count()
        rows[-1] = [action._replace(microbatch_index=next(number)) if action.computation_type is FORWARD else action
                    for action in rows[-1] if action is not None]
    return rows


def _csv(rows: list[list[_Action | None]]) -> str:
    return "".join(",".join("" if action is None else str(action) for action in row) + "\n" for row in rows)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), CASES)
def test_reads_what_pytorch_writes(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    rows = _theirs(name, ranks, microbatches, chunks)
    placement, orders = read_orders(_csv(rows), source=name)
    assert len(placement) == ranks * chunks and len(orders) == ranks
    flat = [[part for action in row if action is not None for part in (action.sub_actions or (action,))] for row in rows]
    assert [[notation(one) for one in order] for order in orders] == [
        [str(one) for one in row if one.is_compute_op] for row in flat]
    check(bare_program(placement, orders))


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"),
                         [case for case in CASES if case[0] in SAME])
def test_orders_agree_with_pytorch(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    schedule = SCHEDULES[SAME[name]]
    assert schedule.refuse(ranks, microbatches, chunks) is None
    placement, orders = read_orders(_csv(_theirs(name, ranks, microbatches, chunks)))
    assert (placement, orders) == (schedule.placement(ranks, chunks), schedule.order(ranks, microbatches, chunks))


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"),
                         [case for case in CASES if case[3] > 1 and case[0] in ("Interleaved1F1B", "ZBVZeroBubble")])
def test_reads_what_pytorch_writes_with_communication(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    bare = read_orders(_csv(_theirs(name, ranks, microbatches, chunks)))
    text = _csv(_theirs(name, ranks, microbatches, chunks, with_comms=True))
    assert "RECV_F" in text and read_orders(text) == bare


@pytest.mark.parametrize("name", SCHEDULES)
def test_pytorch_reads_what_is_written(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES[name]
    chunks = 1 if schedule.refuse(4, 8, 1) is None else 2
    placement, orders = schedule.placement(4, chunks), schedule.order(4, 8, chunks)
    file = tmp_path / "schedule.csv"
    file.write_text(write_orders(orders))
    actions = {rank: [_Action.from_str(cell) for cell in line.split(",")]
               for rank, line in enumerate(file.read_text().splitlines())}
    assert _csv(list(actions.values())) == file.read_text()
    assert _validate_schedule(actions, 4, 4 * chunks, 8) == dict(enumerate(placement))
    for line in write_orders([part.instructions for part in bare_program(placement, orders).workers]).splitlines():
        assert [str(_Action.from_str(cell)) for cell in line.split(",")] == line.split(",")
