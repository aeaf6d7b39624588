"""One worker: a process that joins the head, builds its part of the program, runs it step after step, and reports.

Between steps nobody is asked: the program's own vote and commit keep the workers together, and every worker computes from
the job at which steps there is an evaluation or a save. Reports go out on the side.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from atoll.cluster.calibration import Calibration
from atoll.cluster.cluster import Cluster
from atoll.errors import AtollError, ProgramError, WorkerLostError
from atoll.plan.job import Job
from atoll.plan.plan import Plan
from atoll.records import Record, from_plain
from atoll.runtime.clock import Clock
from atoll.runtime.control import Assign, Hello, Measure, Member, Ready, Report, Start, boot_mark
from atoll.runtime.keys import Bundle, read_bundle
from atoll.runtime.liveness import Timeouts
from atoll.runtime.world import Channel, Stop, StoppedError

__all__ = ["Assemble", "Connected", "Crew", "Documents", "Place", "Turn", "agenda", "leave", "main", "run_worker"]

PATIENCE_NS = 3600 * 10**9
"""How long a worker waits for its head to appear, where nobody says otherwise (people start machines by hand)."""


class Documents(Record):
    """What the head hands out: enough to build any worker's part.

    ``program``: digest of the training program as the head lowered it. ``head``: the head's machine. ``run``: the run's
    folder on the head. ``base``: folder there that relative paths of the job count from. ``first_step``: steps done
    before (then ``resume`` is the checkpoint's folder).
    """

    job: Job
    cluster: Cluster
    plan: Plan
    program: str
    head: str
    run: str
    base: str
    first_step: int = 0
    resume: str = ""
    data: Any = None


class Turn(Record):
    """``kind``: "train", "evaluate" or "save". ``step``: of a train turn its number (from 0), else the steps done."""

    kind: str
    step: int


def agenda(job: Job, first_step: int) -> Iterator[Turn]:
    """All turns of the run from ``first_step`` on; the same on every worker and on the head."""
    total = job.total_steps
    for step in range(first_step, total):
        yield Turn(kind="train", step=step)
        done = step + 1
        for kind, every in (("evaluate", job.evaluation.every), ("save", job.checkpoint.every)):
            wanted = job.data.validation > 0 if kind == "evaluate" else True
            if wanted and (done == total or (every and done % every == 0)):
                yield Turn(kind=kind, step=done)


class Connected(Protocol):
    """The links of a worker (``transport.links.Links``)."""

    channel: Channel
    address: str | None
    store_port: int

    def connect(self, addresses: dict[str, str | None], stores: dict[str, str], cards: dict[str, str], *,
                sends_to: Collection[str], receives_from: Collection[str]) -> None: ...

    def close(self) -> None: ...


class Crew(Protocol):
    """A worker's part, ready to run (``assembly.assemble``; tests have lighter ones).

    ``program``: digest of the training program. ``card``: mark of the CUDA device it has to itself, else "".
    """

    @property
    def program(self) -> str: ...

    @property
    def card(self) -> str: ...

    @property
    def links(self) -> Connected: ...

    @property
    def sends_to(self) -> Collection[str]: ...

    @property
    def receives_from(self) -> Collection[str]: ...

    def run(self, turn: Turn) -> Report:
        """Execute one turn. Raises ``StoppedError``, ``WorkerLostError`` or another ``AtollError``."""
        ...

    def doing(self) -> str:
        """What is being executed right now ("2B3 on compute"), from any thread."""
        ...

    def close(self) -> None: ...


class Place(Record):
    """Where a worker finds itself. ``name``: the worker. ``home``: folder for what it writes. ``shared``: it runs on the
    same system as the head, so ``run`` and ``base`` of the documents are folders here too."""

    name: str
    home: str
    shared: bool


Assemble = Callable[[Documents, Place, Bundle, Timeouts, Clock, Stop, Member], Crew]
MeasureDevice = Callable[[Measure, str, Stop], tuple[Calibration, ...]]
"""(what the head wants to know, the worker's name, what ends it) -> what its device needs."""


def run_worker(name: str, head_address: str, bundle_path: str | os.PathLike[str], assemble: Assemble,
               measure: MeasureDevice, *, home: str | os.PathLike[str] = ".", patience_ns: int = PATIENCE_NS,
               say: Callable[[str], None] = print) -> int:
    """Take part in a run as worker ``name``; returns the exit code. What went wrong is said in one sentence.

    ``head_address``: "host:port" (empty: as the bundle says). Does not return when a library call cannot be ended: the
    process then ends itself after the grace of the run's time-outs.
    """
    stop = Stop()
    member: Member | None = None

    def report(error: Exception) -> None:
        """In the head's words where it has spoken: it knows the cause."""
        ending = member.ending if member is not None else ""
        verb = " stopped" if isinstance(error, StoppedError) else ""
        say(f"worker {name}{verb}: {ending or error}")

    try:
        try:
            bundle = read_bundle(bundle_path)
            member = Member(name, bundle, head_address or bundle.head_address, stop)
        except AtollError as error:
            report(error)
            return error.exit_code
        return _take_part(member, bundle, assemble, measure, stop, home, patience_ns, report)
    finally:
        if member is not None:
            member.close()


def _take_part(member: Member, bundle: Bundle, assemble: Assemble, measure: MeasureDevice, stop: Stop,
               home: str | os.PathLike[str], patience_ns: int, report: Callable[[Exception], None]) -> int:
    """Returns the exit code. What went wrong is told to the head and reported before anything is closed: closing may be
    cut short."""
    current = _Current()
    times: Timeouts | None = None
    try:
        boot = boot_mark()
        welcome = member.join(Hello(incarnation=uuid.uuid4().hex, facts=_facts(boot)), patience_ns)
        times = welcome.times
        member.beat(current.doing)
        assigned = _obey(member, measure, current, stop)
        if assigned is None:
            return 0
        documents = from_plain(assigned.documents, Documents, source="documents of the head")
        shared = bool(boot) and welcome.boot == boot
        place = Place(name=member.name, home=documents.run if shared else str(Path(home).absolute()), shared=shared)
        clock = Clock()
        current.crew = assemble(documents, place, bundle, times, clock, stop, member)
        _run(current, documents, member, clock, stop)
        return 0
    except StoppedError as error:
        report(error)
        return WorkerLostError.exit_code
    except Exception as error:
        if not isinstance(error, AtollError):
            traceback.print_exc()
        known = error if isinstance(error, AtollError) else ProgramError(f"{type(error).__name__}: {error}")
        if times is not None:
            member.trouble(known)
        stop.set(str(known))
        report(known)
        return known.exit_code
    finally:
        if current.crew is not None and times is not None:
            _close(current.crew, times, stop)


def _obey(member: Member, measure: MeasureDevice, current: _Current, stop: Stop) -> Assign | None:
    """Do what the head asks for until it assigns a part of the run (None: it does without this worker)."""
    while isinstance(order := member.order(), Measure):
        current.before = "the measuring of its device"
        member.measured(measure(order, member.name, stop))
        current.before = "nothing until the plan is made"
    current.before = "the building of its part"
    return order


def _run(current: _Current, documents: Documents, member: Member, clock: Clock, stop: Stop) -> None:
    """All turns, from the moment everybody is ready until everybody is done."""
    crew = current.crew
    assert crew is not None, "assemble first"
    start = member.start(Ready(address=crew.links.address, store_port=crew.links.store_port, program=crew.program,
                               card=crew.card))
    clock.origin_ns = start.origin_ns - member.offset_ns
    _connect(crew, start)
    for turn in agenda(documents.job, documents.first_step):
        stop.check()
        current.turn = turn
        member.report(crew.run(turn))
    member.finish()


def _connect(crew: Crew, start: Start) -> None:
    crew.links.connect(start.addresses, start.stores, start.cards, sends_to=crew.sends_to, receives_from=crew.receives_from)


class _Current:
    """What the heartbeat says; written by the main thread, read by the heartbeat's."""

    def __init__(self) -> None:
        self.before = "nothing yet"
        self.turn: Turn | None = None
        self.crew: Crew | None = None

    def doing(self) -> str:
        if self.crew is None:
            return self.before
        if self.turn is None:
            return "the meeting of its peers"
        place = f"step {self.turn.step}" if self.turn.kind == "train" else f"{self.turn.kind} after {self.turn.step} steps"
        doing = self.crew.doing()
        return f"{place}, {doing}" if doing else place


def _close(crew: Crew, times: Timeouts, stop: Stop) -> None:
    """Close in order; if that takes longer than the grace, the process ends itself."""
    ending = _Guillotine(times.grace_ns if stop.event.is_set() else times.connect_ns)
    try:
        with contextlib.suppress(StoppedError, WorkerLostError):
            crew.close()
            crew.links.close()
    finally:
        ending.cancel()


class _Guillotine:
    """Ends the process if it is not cancelled in time: some library calls cannot be interrupted."""

    def __init__(self, after_ns: int) -> None:
        self._timer = threading.Timer(after_ns / 1e9, self._fall)
        self._timer.daemon = True
        self._timer.start()

    def _fall(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(WorkerLostError.exit_code)

    def cancel(self) -> None:
        self._timer.cancel()


def _facts(boot: str) -> dict[str, str | int | float | bool]:
    import platform

    import torch

    facts: dict[str, str | int | float | bool] = {
        "pid": os.getpid(), "host": platform.node(), "python": platform.python_version(), "torch": str(torch.__version__),
        "boot": boot, "time": time.time()}
    return facts


def main(assemble: Assemble, measure: MeasureDevice, arguments: Sequence[str] | None = None) -> int:
    """``python -m atoll.runtime NAME --head HOST:PORT --keys BUNDLE``: what the driver starts."""
    parser = argparse.ArgumentParser(description="One worker of a run; started by the driver or by `atoll worker`.")
    parser.add_argument("name", help="the worker's name in the cluster")
    parser.add_argument("--head", default="", help="host:port of the head (default: as the bundle says)")
    parser.add_argument("--keys", required=True, help="the machine's key bundle (keys/MACHINE.pem of the run)")
    parser.add_argument("--home", default=".", help="folder for what this worker writes, if it shares none with the head")
    parser.add_argument("--patience", type=float, default=PATIENCE_NS / 1e9, help="seconds to wait for the head to appear")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the head as well, which ends the run in order
    return run_worker(options.name, options.head, options.keys, assemble, measure, home=options.home,
                      patience_ns=round(options.patience * 1e9))


def leave(code: int) -> None:
    """End the process without waiting for threads that sit in library calls."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

