"""A program: for every worker the instructions of one step, and what their buckets and stages stand for."""

from __future__ import annotations

import hashlib

import msgspec

from atoll.program.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Commit,
    Forward,
    Load,
    Native,
    Receive,
    Recompute,
    Reduce,
    Save,
    Send,
    Update,
    Vote,
)
from atoll.records import Record

__all__ = ["AnyInstruction", "Bucket", "Program", "Stage", "WorkerProgram"]

AnyInstruction = (Forward | Recompute | Backward | BackwardInput | BackwardWeight | Update | Send | Receive | Native
                  | Reduce | Load | Save | Vote | Commit)


class Stage(Record):
    """A range of operators, from cut ``low`` to cut ``high`` of the graph, by the names of its first and last operator."""

    index: int
    first: str
    last: str


class Bucket(Record):
    """Gradients of ``parameters`` (logical names) as one flat float vector of ``elements``, in ``chunks`` parts.

    Chunk i holds elements [i*elements//chunks, (i+1)*elements//chunks). ``holders``: the workers that sum it.
    """

    index: int
    parameters: tuple[str, ...]
    elements: int
    chunks: int
    holders: tuple[str, ...]

    def chunk(self, i: int) -> tuple[int, int]:
        return i * self.elements // self.chunks, (i + 1) * self.elements // self.chunks


class WorkerProgram(Record):
    """``stages``: those this worker runs, in model order; ``buckets``: indices of those it holds."""

    worker: str
    replica: int
    stages: tuple[Stage, ...]
    buckets: tuple[int, ...]
    instructions: tuple[AnyInstruction, ...]


class Program(Record):
    """One step of all workers. ``kind``: "train", "evaluate" or "save"."""

    kind: str
    microbatch_samples: int
    workers: tuple[WorkerProgram, ...]
    buckets: tuple[Bucket, ...] = ()

    def part(self, worker: str) -> WorkerProgram:
        return next(part for part in self.workers if part.worker == worker)

    @property
    def digest(self) -> str:
        """Equal programs have equal digests; workers compare theirs with the head's before the first step."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
