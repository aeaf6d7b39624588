"""The head of a run: makes the keys, starts or awaits the workers, listens to them, and ends the run for a known reason.

Nothing here waits without a deadline. Between steps the head does not speak to the workers at all.
"""

from __future__ import annotations

import math
import queue
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import atoll.errors
from atoll.cluster.network import Network
from atoll.errors import AtollError, ProgramError, WorkerLostError, WorkplaceError
from atoll.records import Record, digest, to_plain
from atoll.runtime.checkpoint.trained import CHECKPOINTS
from atoll.runtime.control import (
    Abort,
    Beat,
    Done,
    Finish,
    FromWorker,
    Gone,
    Head,
    Hello,
    Ready,
    Report,
    Start,
    Trouble,
    Welcome,
    boot_mark,
)
from atoll.runtime.handover import Files
from atoll.runtime.keys import make_run_keys, read_bundle
from atoll.runtime.liveness import (
    Accused,
    Broken,
    Exited,
    Failed,
    Finished,
    Joined,
    Liveness,
    LivenessEvent,
    Seen,
    Timeouts,
    Verdict,
    own_pause,
    timeouts,
)
from atoll.runtime.processes import Processes
from atoll.runtime.worker import Documents, agenda
from atoll.trace.files import TraceWriter
from atoll.trace.span import TraceHeader
from atoll.units import format_duration

__all__ = ["Began", "Came", "Evaluated", "RunEvent", "RunResult", "Saved", "StepEnded", "Waiting", "drive", "plan_workers"]

COMMAND = (sys.executable, "-m", "atoll.runtime")
LINKS_FILE = "links.bin"


class RunEvent(Record, tag=True):
    """What ``drive`` tells whoever shows the run."""


class Waiting(RunEvent):
    """``worker`` must be started by hand on ``machine``; ``bundle``: the file it needs there."""

    worker: str
    machine: str
    bundle: str


class Came(RunEvent):
    worker: str
    machine: str
    facts: dict[str, Any]


class Began(RunEvent):
    """All are ready; the first step begins. ``times``: all time-outs of the run."""

    times: Timeouts


class StepEnded(RunEvent):
    """Every worker has ended training step ``step`` of ``total``. ``loss``: mean per token. ``duration_ns``: since the step
    before ended (the first: since the start)."""

    step: int
    total: int
    loss: float
    tokens: int
    gradient_norm: float
    learning_rate: float
    committed: bool
    duration_ns: int


class Evaluated(RunEvent):
    """``step``: steps done. ``loss``: mean per held-out token."""

    step: int
    loss: float


class Saved(RunEvent):
    """The checkpoint after ``step`` steps exists at ``path``."""

    step: int
    path: str


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


def plan_workers(documents: Documents) -> tuple[str, ...]:
    """The workers of the run, in the order of the plan."""
    return tuple(dict.fromkeys(stage.worker for replica in documents.plan.replicas for stage in replica.stages))


def drive(documents: Documents, folder: Path, *, on_event: Callable[[RunEvent], None], commit: Commit | None = None,
          command: Sequence[str] = COMMAND) -> RunResult:
    """Run the job to its end. ``folder``: of the run; keys, logs, traces go there.

    An emulated cluster: all workers are started here. Else those of machine ``documents.head``, and the others are
    awaited (``Waiting``). ``commit`` is called after each save.
    Raises ``WorkerLostError`` naming the machine and what it was doing, ``WorkplaceError`` (a port in use, nobody came),
    or the error by which a worker failed. All processes it started are gone when it returns.
    """
    run = _Run(documents, folder, on_event, commit)
    try:
        run.open(command)
        run.gather()
        run.listen()
        return run.finish()
    except BaseException as error:
        run.abort(_reason(error))
        raise
    finally:
        run.close()


def _reason(error: BaseException) -> str:
    """What the workers are told."""
    return "the run was interrupted on the head" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__


class _Run:
    def __init__(self, documents: Documents, folder: Path, on_event: Callable[[RunEvent], None], commit: Commit | None) -> None:
        self.documents, self.folder, self.on_event = documents, folder, on_event
        self.commit = commit
        self.job = documents.job
        self.times = timeouts(int(self.job.max_pause))
        self.network = Network(documents.cluster)
        self.workers = plan_workers(documents)
        self.machines = {worker: self.network.worker(worker).machine for worker in self.workers}
        self.liveness = Liveness(times=self.times)
        self.events: queue.SimpleQueue[tuple[str, FromWorker, int]] = queue.SimpleQueue()
        self.processes = Processes(folder / "logs")
        self.head: Head | None = None
        self.ready: dict[str, Ready] = {}
        self.done: set[str] = set()
        self.reports: dict[tuple[str, int], dict[str, Report]] = {}
        self.traces: dict[str, TraceWriter] = {}
        self.failures: dict[str, str] = {}
        self.losses: list[float] = []
        self.step_ns: list[int] = []
        self.evaluations: list[tuple[int, float]] = []
        self.tokens, self.saved = 0, -1
        self.began_ns = self.last_step_ns = self.looked_ns = time.monotonic_ns()

    # -- beginning -----------------------------------------------------------------------------------------------------

    def open(self, command: Sequence[str]) -> None:
        """Keys, control service, local workers."""
        emulated = self.documents.cluster.emulation is not None
        here = self.workers if emulated else [worker for worker in self.workers if self.machines[worker] == self.documents.head]
        bind, address = self._place(emulated or len(here) == len(self.workers))
        keys = self.folder / "keys"
        (self.folder / LINKS_FILE).unlink(missing_ok=True)
        machines = dict.fromkeys((self.documents.head, *self.machines.values()))
        paths = make_run_keys(keys, machines, head=self.documents.head, head_address=address)
        self.head = Head(read_bundle(paths[self.documents.head]), bind, self.machines, self.times, self.events,
                         Files(self.folder / CHECKPOINTS, self._offered()))
        address = f"{address.rpartition(':')[0]}:{self.head.port}"
        for worker in self.workers:
            bundle = paths[self.machines[worker]]
            if worker in here:
                patience = str(6 * self.times.max_pause_ns / 1e9)  # if this head dies meanwhile, they must not stay for long
                self.processes.start(worker, [*command, worker, "--head", address, "--keys", str(bundle), "--patience",
                                              patience], one_thread=emulated)
            else:
                self.on_event(Waiting(worker=worker, machine=self.machines[worker], bundle=str(bundle)))

    def _offered(self) -> list[Path]:
        return [Path(self.documents.resume)] if self.documents.resume else []

    def _place(self, all_here: bool) -> tuple[str, str]:
        """Where the control service listens, and the address that workers dial."""
        if all_here:
            return "127.0.0.1:0", "127.0.0.1:0"
        address = self.network.machines[self.documents.head].address
        if address is None:
            raise WorkplaceError(f"machine {self.documents.head} keeps the run and needs an address that the others can dial; "
                                 "write machines: address: HOST:PORT in the cluster")
        return f"0.0.0.0:{address.rpartition(':')[2]}", address

    def gather(self) -> None:
        """Wait until every worker has built its part, then let them begin."""
        deadline_ns = time.monotonic_ns() + self.times.gather_ns
        while len(self.ready) < len(self.workers):
            self.step(deadline_ns)
            if time.monotonic_ns() >= deadline_ns:
                missing = [worker for worker in self.workers if worker not in self.ready]
                raise WorkplaceError(f"waited {format_duration(self.times.gather_ns)} for {', '.join(missing)} in vain; start "
                                     "them on their machines, or raise job.max_pause, from which the wait follows")
        self._same_program()
        stores = {}
        for worker, ready in self.ready.items():
            if ready.store_port and ready.address is not None:
                stores[self.network.island(worker)] = f"{ready.address.rpartition(':')[0]}:{ready.store_port}"
        self.began_ns = self.last_step_ns = time.monotonic_ns()
        for kind, name in (("train", "trace.jsonl"), ("evaluate", "trace.evaluate.jsonl"), ("save", "trace.save.jsonl")):
            header = TraceHeader(program=self.documents.program if kind == "train" else kind, clock="measured",
                                 workers=self.workers, plan=digest(self.documents.plan))
            self.traces[kind] = TraceWriter(self.folder / name, header)
        self._head().broadcast(Start(
            addresses={worker: ready.address for worker, ready in self.ready.items()}, stores=stores,
            cards={worker: ready.card for worker, ready in self.ready.items()}, origin_ns=self.began_ns))
        self.on_event(Began(times=self.times))

    def _same_program(self) -> None:
        for worker, ready in self.ready.items():
            if ready.program != self.documents.program:
                raise ProgramError(f"machine {self.machines[worker]}: worker {worker} made program {ready.program} of the "
                                   f"plan, the head {self.documents.program}; install the same version of Atoll on both")

    # -- listening -----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Take in what the workers report until all are done."""
        while len(self.done) < len(self.workers):
            self.step(None)

    def step(self, deadline_ns: int | None) -> None:
        """One turn of the head's loop: an event or a short wait, then a look at who is alive."""
        wait_ns = self.times.heartbeat_ns // 4
        if deadline_ns is not None:
            wait_ns = max(0, min(wait_ns, deadline_ns - time.monotonic_ns()))
        try:
            worker, message, at_ns = self.events.get(timeout=wait_ns / 1e9)
        except queue.Empty:
            pass
        else:
            self.take(worker, message, at_ns)
        now_ns = time.monotonic_ns()
        self.liveness = self.liveness.excused(own_pause(self.looked_ns, now_ns, self.times))
        self.looked_ns = now_ns
        for worker, code in self.processes.ended():
            self._note(Exited(worker=worker, at_ns=now_ns, code=code))
        if self.events.empty():  # judge only with everything heard
            verdict = self.liveness.verdict(now_ns)
            if verdict is not None:
                raise self._error(verdict)

    def _note(self, event: LivenessEvent) -> None:
        self.liveness = self.liveness.after(event)

    def take(self, worker: str, message: FromWorker, at_ns: int) -> None:
        machine = self.machines[worker]
        if isinstance(message, Hello):
            self._note(Joined(worker=worker, at_ns=at_ns, machine=machine))
            self._head().send(worker, Welcome(documents=to_plain(self.documents), times=self.times, boot=boot_mark()))
            self.on_event(Came(worker=worker, machine=machine, facts=dict(message.facts)))
        elif isinstance(message, Ready):
            self.ready[worker] = message
        elif isinstance(message, Beat):
            self._note(Seen(worker=worker, at_ns=at_ns, doing=message.doing))
        elif isinstance(message, Report):
            self._report(worker, message, at_ns)
        elif isinstance(message, Trouble):
            self.failures[worker] = message.kind
            self._note(Seen(worker=worker, at_ns=at_ns, doing=message.doing))
            kind = Accused if message.accuses else Failed
            self._note(kind(worker=worker, at_ns=at_ns, text=message.text))
        elif isinstance(message, Done):
            self.done.add(worker)
            self._note(Finished(worker=worker, at_ns=at_ns))
        elif isinstance(message, Gone):
            self._note(Broken(worker=worker, at_ns=at_ns))

    def _error(self, verdict: Verdict) -> AtollError:
        """The exception for a verdict: a worker's own error keeps its class, everything else is a lost worker."""
        kind: Any = WorkerLostError
        if verdict.kind == "failed":
            kind = getattr(atoll.errors, self.failures.get(verdict.worker, ""), AtollError)
        sentence = verdict.sentence
        if verdict.kind == "ended":
            last = self.processes.last_line(verdict.worker)
            sentence += f"; it said: {last}" if last else ""
        error = kind(sentence)
        return error if isinstance(error, AtollError) else AtollError(sentence)

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
        self._head().broadcast(Finish())
        self.processes.wait((self.times.connect_ns + self.times.grace_ns) / 1e9)
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

        buckets = Buckets(path, self.network.capacity)
        passed = buckets.passed_bytes()
        buckets.close()
        return passed

    def abort(self, reason: str) -> None:
        """Tell everybody why; give them the grace to unwind."""
        if self.head is not None:
            self.head.broadcast(Abort(reason=reason))
            self.processes.wait(self.times.grace_ns / 1e9, frozen=True)

    def close(self) -> None:
        self.processes.end()
        if self.head is not None:
            self.head.close(min(1.0, self.times.grace_ns / 1e9))
        for writer in self.traces.values():
            writer.close()
        shutil.rmtree(self.folder / "keys", ignore_errors=True)

    def _head(self) -> Head:
        assert self.head is not None, "open first"
        return self.head


def _number(report: Report, name: str) -> float:
    value = report.figures[name]
    return math.nan if value is None else value
