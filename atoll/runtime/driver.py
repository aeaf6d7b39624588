"""The head of a run: hands out the documents, listens to the workers, keeps the books, and ends for a known reason.

Between steps the head does not speak to the workers at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.errors import ProgramError
from atoll.records import Record, digest
from atoll.runtime.control import Done, Ready, Report, Start
from atoll.runtime.events import Began, Evaluated, RunEvent, Saved, StepEnded
from atoll.runtime.rendezvous import COMMAND, LINKS_FILE, Rendezvous
from atoll.runtime.worker import Documents, agenda
from atoll.trace.files import TraceWriter
from atoll.trace.span import TraceHeader

__all__ = ["RunResult", "drive"]


class RunResult(Record):
    """``losses``: of each training step done; ``step_ns``: how long each took; ``passed_bytes``: over each directed segment
    of an emulated cluster; ``saved``: steps done in the last checkpoint (-1: none was made)."""

    first_step: int
    losses: tuple[float, ...]
    step_ns: tuple[int, ...]
    evaluations: tuple[tuple[int, float], ...]
    tokens: int
    duration_ns: int
    saved: int
    trace: str
    passed_bytes: dict[str, int]


Commit = Callable[[int, Sequence[Any]], str]
"""(steps done, what each worker reported of its shard) -> path; makes the checkpoint exist."""


def drive(documents: Documents, folder: Path, *, on_event: Callable[[RunEvent], None], commit: Commit | None = None,
          command: Sequence[str] = COMMAND, rendezvous: Rendezvous | None = None) -> RunResult:
    """Run the job to its end. ``folder``: of the run; keys, logs, traces go there.

    ``rendezvous``: where the workers have come together already (it stays open); None: they are called now, those that do
    not run here are awaited (``Waiting``), and all that was started here is gone when this returns. ``commit`` is called
    after each save.
    Raises ``WorkerLostError`` naming the machine and what it was doing, ``WorkplaceError`` (a port in use, nobody came),
    or the error by which a worker failed.
    """
    if rendezvous is not None:
        return _Run(documents, folder, rendezvous, on_event, commit).whole()
    offered = [Path(documents.resume)] if documents.resume else []
    with Rendezvous(documents.cluster, documents.plan.workers, documents.head, folder, int(documents.job.max_pause),
                    on_event, offered) as own:
        own.open(command)
        return _Run(documents, folder, own, on_event, commit).whole()


class _Run:
    def __init__(self, documents: Documents, folder: Path, rendezvous: Rendezvous, on_event: Callable[[RunEvent], None],
                 commit: Commit | None) -> None:
        self.documents, self.folder, self.on_event = documents, folder, on_event
        self.commit = commit
        self.job = documents.job
        self.rendezvous = rendezvous
        self.workers = documents.plan.workers
        self.ready: dict[str, Ready] = {}
        self.done: set[str] = set()
        self.reports: dict[tuple[str, int], dict[str, Report]] = {}
        self.traces: dict[str, TraceWriter] = {}
        self.losses: list[float] = []
        self.step_ns: list[int] = []
        self.evaluations: list[tuple[int, float]] = []
        self.tokens, self.saved = 0, -1
        self.began_ns = self.last_step_ns = time.monotonic_ns()

    def whole(self) -> RunResult:
        try:
            self.rendezvous.assign(self.workers, self.documents)
            self.gather()
            while len(self.done) < len(self.workers):
                self.turn(None)
            return self.finish()
        finally:
            for writer in self.traces.values():
                writer.close()

    # -- beginning -----------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Wait until every worker has built its part, then let them begin."""
        deadline_ns = time.monotonic_ns() + self.rendezvous.times.gather_ns
        while len(self.ready) < len(self.workers):
            self.turn(deadline_ns)
            self.rendezvous.give_up(deadline_ns, [worker for worker in self.workers if worker not in self.ready])
        self._same_program()
        stores = {}
        for worker, ready in self.ready.items():
            if ready.store_port and ready.address is not None:
                island = self.rendezvous.network.island(worker)
                stores[island] = f"{ready.address.rpartition(':')[0]}:{ready.store_port}"
        self.began_ns = self.last_step_ns = time.monotonic_ns()
        for kind, name in (("train", "trace.jsonl"), ("evaluate", "trace.evaluate.jsonl"), ("save", "trace.save.jsonl")):
            header = TraceHeader(program=self.documents.program if kind == "train" else kind, clock="measured",
                                 workers=self.workers, plan=digest(self.documents.plan))
            self.traces[kind] = TraceWriter(self.folder / name, header)
        self.rendezvous.broadcast(Start(
            addresses={worker: ready.address for worker, ready in self.ready.items()}, stores=stores,
            cards={worker: ready.card for worker, ready in self.ready.items()}, origin_ns=self.began_ns))
        self.on_event(Began(times=self.rendezvous.times))

    def _same_program(self) -> None:
        for worker, ready in self.ready.items():
            if ready.program != self.documents.program:
                raise ProgramError(f"machine {self.rendezvous.machines[worker]}: worker {worker} made program {ready.program} "
                                   f"of the plan, the head {self.documents.program}; install the same version of Atoll on both")

    def turn(self, deadline_ns: int | None) -> None:
        for worker, message, at_ns in self.rendezvous.turn(deadline_ns):
            if isinstance(message, Ready):
                self.ready[worker] = message
            elif isinstance(message, Report):
                self._report(worker, message, at_ns)
            elif isinstance(message, Done):
                self.done.add(worker)

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report(self, worker: str, report: Report, at_ns: int) -> None:
        self.traces[report.kind].write(report.spans)
        together = self.reports.setdefault((report.kind, report.step), {})
        together[worker] = report
        if len(together) < len(self.workers):
            return
        del self.reports[report.kind, report.step]
        self._agree(report.kind, report.step, together)
        if report.kind == "train":
            self._trained(report, at_ns)
        elif report.kind == "evaluate":
            loss = _number(report, "loss")
            self.evaluations.append((report.step, loss))
            self.on_event(Evaluated(step=report.step, loss=loss))
        elif self.commit is not None:
            path = self.commit(report.step, [together[name].extra for name in self.workers])
            self.saved = report.step
            self.on_event(Saved(step=report.step, path=path))

    def _agree(self, kind: str, step: int, together: dict[str, Report]) -> None:
        """All workers must have committed the same sums, to the bit."""
        first_name, first = next(iter(together.items()))
        for worker, report in together.items():
            for name, value in report.figures.items():
                other = first.figures.get(name)
                if value != other:
                    raise ProgramError(f"after {kind} {step}, worker {worker} has {name} {value!r} and {first_name} {other!r}: "
                                       "they no longer train one model; report this with the run's folder")

    def _trained(self, report: Report, at_ns: int) -> None:
        duration_ns = at_ns - self.last_step_ns
        self.last_step_ns = at_ns
        ended = StepEnded(
            step=report.step, total=self.job.total_steps, loss=_number(report, "loss"), tokens=int(_number(report, "tokens")),
            gradient_norm=_number(report, "gradient_norm"), learning_rate=_number(report, "learning_rate"),
            committed=bool(report.figures["committed"]), duration_ns=duration_ns)
        self.losses.append(ended.loss)
        self.step_ns.append(duration_ns)
        self.tokens += ended.tokens
        self.on_event(ended)

    # -- ending --------------------------------------------------------------------------------------------------------

    def finish(self) -> RunResult:
        duration_ns = time.monotonic_ns() - self.began_ns
        self.rendezvous.dismiss()
        wanted = [(turn.kind, turn.step) for turn in agenda(self.job, self.documents.first_step) if turn.kind == "train"]
        if len(self.losses) != len(wanted):
            raise ProgramError(f"{len(wanted)} steps were to be done, {len(self.losses)} were reported by all workers")
        return RunResult(
            first_step=self.documents.first_step, losses=tuple(self.losses), step_ns=tuple(self.step_ns),
            evaluations=tuple(self.evaluations), tokens=self.tokens, duration_ns=duration_ns, saved=self.saved,
            trace=str(self.folder / "trace.jsonl"), passed_bytes=self._passed())

    def _passed(self) -> dict[str, int]:
        path = self.folder / LINKS_FILE
        if self.documents.cluster.emulation is None or not path.exists():
            return {}
        from atoll.runtime.transport.shaped import Buckets

        buckets = Buckets(path, self.rendezvous.network.capacity)
        passed = buckets.passed_bytes()
        buckets.close()
        return passed


def _number(report: Report, name: str) -> float:
    value = report.figures[name]
    return math.nan if value is None else value
