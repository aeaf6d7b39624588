"""Laws of the collectives family, over its table: sum, bits, bytes, order of messages. The interpreter is this file's own."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from atoll.errors import PlanError, ProgramError
from atoll.policies.collectives.table import COLLECTIVES, find
from atoll.program.check import check
from atoll.program.instructions import Buffer, Instruction, Receive, Reduce, Send
from atoll.program.program import Bucket, Program, WorkerProgram

GROUPS = range(1, 10)
SIZES = (1, 2, 7, 8, 9, 100, 101, 1024)
ELEMENT_BYTES = 4


def _bucket(name: str, size: int, elements: int) -> Bucket:
    return Bucket(index=3, parameters=("weight",), elements=elements, chunks=COLLECTIVES[name].chunks(size),
                  holders=tuple(f"w{i}" for i in range(size)))


def _lists(name: str, bucket: Bucket) -> dict[str, tuple[Instruction, ...]]:
    return {worker: COLLECTIVES[name].instructions(bucket, ELEMENT_BYTES, worker) for worker in bucket.holders}


def _run(bucket: Bucket, lists: dict[str, tuple[Instruction, ...]], vectors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Interpret the instructions in float32, each worker strictly in its own order; the k-th receive meets the k-th send."""
    values: dict[str, dict[Buffer, np.ndarray]] = {}
    for worker, vector in vectors.items():
        values[worker] = {("gradient", bucket.index, i): vector[slice(*bucket.chunk(i))] for i in range(bucket.chunks)}
    wires: dict[tuple[str, str], deque[tuple[Buffer, np.ndarray]]] = {}
    positions = dict.fromkeys(lists, 0)
    moved = True
    while moved:
        moved = False
        for worker, instructions in lists.items():
            mine = values[worker]
            while positions[worker] < len(instructions):
                step = instructions[positions[worker]]
                if isinstance(step, Send):
                    wires.setdefault((worker, step.peer), deque()).append((step.buffer, mine[step.buffer]))
                    assert step.size_bytes == mine[step.buffer].nbytes
                elif isinstance(step, Receive):
                    if not wires.get((step.peer, worker)):
                        break
                    name, value = wires[step.peer, worker].popleft()
                    assert name == step.buffer and step.size_bytes == value.nbytes and name not in mine
                    mine[name] = value
                else:
                    assert isinstance(step, Reduce) and step.target not in mine
                    assert step.size_bytes == sum(mine[source].nbytes for source in step.sources)
                    mine[step.target] = np.sum([mine[source] for source in step.sources], axis=0, dtype=np.float32)
                positions[worker] += 1
                moved = True
    assert all(positions[worker] == len(lists[worker]) for worker in lists), "some never end"
    assert not any(wires.values()), "some messages are never received"
    return {worker: np.concatenate([mine["reduced", bucket.index, i] for i in range(bucket.chunks)])
            for worker, mine in values.items()}


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_sums_plainly_and_leaves_the_same_bits_everywhere(name: str, size: int) -> None:
    random = np.random.default_rng(size)
    for elements in SIZES:
        bucket = _bucket(name, size, elements)
        lists = _lists(name, bucket)
        if size == 1:
            assert lists == {"w0": ()}, "one holder has its sum already"
            continue
        whole = {worker: random.integers(-1000, 1000, elements).astype(np.float32) for worker in bucket.holders}
        for result in _run(bucket, lists, whole).values():
            assert np.array_equal(result, sum(whole.values())), "whole numbers add without rounding"
        rough = {worker: random.standard_normal(elements).astype(np.float32) for worker in bucket.holders}
        results = list(_run(bucket, lists, rough).values())
        assert len({result.tobytes() for result in results}) == 1
        exact = np.sum([vector.astype(np.float64) for vector in rough.values()], axis=0)
        magnitude = np.sum([np.abs(vector) for vector in rough.values()], axis=0)
        assert np.all(np.abs(results[0] - exact) <= (size - 1) * np.finfo(np.float32).eps * magnitude)


@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_bytes_equal_the_closed_form(name: str, size: int) -> None:
    for elements in SIZES:
        bucket = _bucket(name, size, elements)
        sent = {worker: sum(step.size_bytes for step in steps if isinstance(step, Send))
                for worker, steps in _lists(name, bucket).items()}
        assert sent == {worker: COLLECTIVES[name].bytes_sent(bucket, ELEMENT_BYTES, worker) for worker in bucket.holders}


@pytest.mark.parametrize("size", GROUPS)
def test_a_ring_sends_the_fewest_bytes(size: int) -> None:
    """2(n-1)/n of the bucket where n divides it, and 2(n-1) buckets among all members whatever the size."""
    ring = COLLECTIVES["ring"]
    for elements in SIZES:
        bucket = _bucket("ring", size, elements)
        each = [ring.bytes_sent(bucket, ELEMENT_BYTES, worker) for worker in bucket.holders]
        assert sum(each) == 2 * (size - 1) * elements * ELEMENT_BYTES
        if elements % size == 0:
            assert set(each) == {2 * (size - 1) * elements * ELEMENT_BYTES // size}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_is_a_sound_program(name: str) -> None:
    """One writer a buffer, sends and receives in one order, no deadlock; also when the holders stand in another order."""
    for size in GROUPS:
        holders = tuple(f"w{(5 * i + 2) % size}" for i in range(size)) if size % 5 else tuple(f"w{i}" for i in range(size))
        bucket = Bucket(index=0, parameters=(), elements=10, chunks=COLLECTIVES[name].chunks(size), holders=holders)
        workers = tuple(WorkerProgram(worker=worker, replica=i, stages=(), buckets=(0,),
                                      instructions=COLLECTIVES[name].instructions(bucket, 8, worker))  # type: ignore[arg-type]
                        for i, worker in enumerate(holders))
        checked = check(Program(kind="train", microbatch_samples=1, workers=workers, buckets=(bucket,)))
        assert checked.messages >= 2 * (size - 1), "everyone must hear of everyone"
        assert size > 1 or checked.instructions == 0


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_stranger_is_refused(name: str) -> None:
    with pytest.raises(ProgramError, match=r"bucket 3 .*\bx\b"):
        COLLECTIVES[name].instructions(_bucket(name, 3, 9), ELEMENT_BYTES, "x")


def test_an_unknown_collective_names_the_nearest() -> None:
    assert find("ring") is COLLECTIVES["ring"]
    with pytest.raises(PlanError, match="did you mean ring"):
        find("rings")
    assert all(collective.name == name and collective.source for name, collective in COLLECTIVES.items())
