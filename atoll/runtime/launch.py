"""From a job, a cluster and a plan to a finished run: documents for the workers, checkpoints, ledger, metrics.

What it leaves in the run's folder: ``metrics.jsonl`` (a line a step), ``ledger.jsonl``, ``checkpoints/``, ``tokenizer/``,
``trace*.jsonl``, ``logs/``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atoll.cluster.cluster import Cluster
from atoll.cluster.network import Network
from atoll.graph.graph import Graph
from atoll.plan.job import Job
from atoll.plan.plan import Plan
from atoll.records import to_plain
from atoll.runtime.assembly import DataNote, programs_of
from atoll.runtime.checkpoint.shards import ShardEntry
from atoll.runtime.checkpoint.store import Checkpoint, Facts, clean, finish, job_facts, open_latest
from atoll.runtime.checkpoint.trained import CHECKPOINTS, TOKENIZER
from atoll.runtime.data.ledger import About, Ledger
from atoll.runtime.data.packed import Packed, PackedBatches
from atoll.runtime.driver import RunResult, drive
from atoll.runtime.events import Evaluated, RunEvent, StepEnded
from atoll.runtime.rendezvous import COMMAND, Rendezvous
from atoll.runtime.worker import Documents

__all__ = ["LEDGER", "METRICS", "find_checkpoint", "launch"]

METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"


def find_checkpoint(folder: Path, job: Job, packed: Packed) -> Checkpoint:
    """The newest sound checkpoint of the run in ``folder`` that belongs to ``job``; its ``notes`` say what was skipped.

    Raises ``CheckpointError`` when there is none.
    """
    return open_latest(folder / CHECKPOINTS, job_facts(job, packed.facts.digest))


def launch(job: Job, cluster: Cluster, plan: Plan, graph: Graph, packed: Packed, folder: Path, *, head: str,
           on_event: Callable[[RunEvent], None], resume: Checkpoint | None = None, base: Path = Path(),
           command: Sequence[str] = COMMAND, rendezvous: Rendezvous | None = None) -> RunResult:
    """Run ``job`` on ``cluster`` as ``plan`` says, from the start or from ``resume``, and return what came of it.

    ``head``: the machine this is (any machine of an emulated cluster). ``rendezvous``: see ``drive``, which also says what is
    raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.absolute()
    packed.tokenizer.save(folder / TOKENIZER)
    clean(folder / CHECKPOINTS)
    books = _Books(job, graph, packed, folder, resume)
    tokenizer = {file.name: file.read_text() for file in (folder / TOKENIZER).glob("*.json")}
    documents = Documents(
        job=job, cluster=cluster, plan=plan, program=programs_of(job, plan, graph, Network(cluster))["train"].digest, head=head,
        run=str(folder), base=str(base.absolute()), first_step=books.first_step,
        resume="" if resume is None else str(resume.folder.absolute()),
        data=to_plain(DataNote(facts=packed.facts, folder=str(packed.folder.absolute()), tokenizer=tokenizer)))

    def heard(event: RunEvent) -> None:
        books.note(event)
        on_event(event)

    try:
        return drive(documents, folder, on_event=heard, commit=books.commit, command=command, rendezvous=rendezvous)
    finally:
        books.close()


class _Books:
    """What the head writes down while the run goes on."""

    def __init__(self, job: Job, graph: Graph, packed: Packed, folder: Path, resume: Checkpoint | None) -> None:
        self._job, self._folder = job, folder
        self._facts = job_facts(job, packed.facts.digest)
        self._batches = PackedBatches(packed, seed=job.seed, global_batch=job.global_batch,
                                      sequence_length=job.sequence_length)
        self._names = [parameter.name for parameter in graph.parameters]
        self.first_step = 0 if resume is None else resume.facts.step
        self._updates = 0 if resume is None else resume.facts.updates
        self._tokens = 0 if resume is None else resume.facts.tokens
        about = About(seed=job.seed, global_batch=job.global_batch, sequences=self._batches.sequences("train"))
        self._ledger = Ledger(folder / LEDGER, about, next_step=self.first_step)
        self._time_ns = 0
        if resume is None:
            (folder / METRICS).unlink(missing_ok=True)
        self._metrics = open(folder / METRICS, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def note(self, event: RunEvent) -> None:
        if isinstance(event, StepEnded):
            self._updates += event.committed
            self._tokens += event.tokens
            self._time_ns += event.duration_ns
            first = event.step * self._job.global_batch
            self._ledger.record(event.step, first, self._batches.ids("train", event.step, 0, self._job.global_batch))
            self._line(step=event.step, loss=event.loss, tokens=event.tokens, gradient_norm=event.gradient_norm,
                       learning_rate=event.learning_rate, committed=event.committed, step_ns=event.duration_ns,
                       time_ns=self._time_ns)
        elif isinstance(event, Evaluated):
            self._line(step=event.step - 1, validation_loss=event.loss)

    def _line(self, **values: Any) -> None:
        finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value
                  for name, value in values.items()}
        self._metrics.write(json.dumps(finite) + "\n")
        self._metrics.flush()

    def commit(self, step: int, entries: Sequence[Any]) -> str:
        """All shards of ``step`` are on disk: make the checkpoint exist."""
        shards = [msgspec.convert(entry, ShardEntry) for entry in entries]
        self._ledger.sync()
        facts = Facts(job=self._facts, step=step, updates=self._updates, tokens=self._tokens,
                      position=step * self._job.global_batch)
        folder = self._folder / CHECKPOINTS
        finish(folder, step, shards, facts, keep=self._job.checkpoint.keep,
               expected=[f"parameter/{name}" for name in self._names])
        return str(folder / f"step-{step:08d}")

    def close(self) -> None:
        self._metrics.close()
        self._ledger.close()
