"""Where a run's workers come together: keys, the control service, the processes started here, and who is alive.

All that a run needs before it has a plan. Nothing here waits without a deadline.
"""

from __future__ import annotations

import queue
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import atoll.errors
from atoll.cluster.calibration import Calibration
from atoll.cluster.cluster import Cluster
from atoll.cluster.network import Network
from atoll.errors import AtollError, WorkerLostError, WorkplaceError
from atoll.records import to_plain
from atoll.runtime.checkpoint.trained import CHECKPOINTS
from atoll.runtime.control import (
    Abort,
    Assign,
    Beat,
    Done,
    Finish,
    FromHead,
    FromWorker,
    Gone,
    Head,
    Hello,
    Measure,
    Measured,
    Trouble,
    Welcome,
    boot_mark,
)
from atoll.runtime.events import Came, RunEvent, Waiting
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
    Verdict,
    own_pause,
    timeouts,
)
from atoll.runtime.processes import Processes
from atoll.units import format_duration

__all__ = ["COMMAND", "LINKS_FILE", "Rendezvous"]

COMMAND = (sys.executable, "-m", "atoll.runtime")
LINKS_FILE = "links.bin"


class Rendezvous:
    """The workers of a run, from the moment they are called until the run is over. Use as a context manager.

    ``workers``: those that are called. Where the cluster is emulated all are started here; else those of machine ``head``,
    and the others are awaited (``Waiting``). ``offered``: folders on the head of which machines may fetch files.
    """

    def __init__(self, cluster: Cluster, workers: Sequence[str], head: str, folder: Path, max_pause_ns: int,
                 on_event: Callable[[RunEvent], None], offered: Sequence[Path] = ()) -> None:
        self.cluster, self.head_machine, self.folder, self.on_event = cluster, head, folder, on_event
        self.times = timeouts(max_pause_ns)
        self.network = Network(cluster)
        self.workers = tuple(workers)
        self.machines = {worker: self.network.worker(worker).machine for worker in self.workers}
        self.processes = Processes(folder / "logs")
        self.joined: set[str] = set()
        self._offered = tuple(offered)
        self._documents: Any = None
        self._liveness = Liveness(times=self.times)
        self._events: queue.SimpleQueue[tuple[str, FromWorker, int]] = queue.SimpleQueue()
        self._head: Head | None = None
        self._failures: dict[str, str] = {}
        self._looked_ns = time.monotonic_ns()

    def open(self, command: Sequence[str] = COMMAND) -> None:
        """Make the keys, open the control service, start the workers that run here. Raises ``WorkplaceError``."""
        emulated = self.cluster.emulation is not None
        here = [worker for worker in self.workers if emulated or self.machines[worker] == self.head_machine]
        bind, address = self._place(len(here) == len(self.workers))
        (self.folder / LINKS_FILE).unlink(missing_ok=True)
        machines = dict.fromkeys((self.head_machine, *self.machines.values()))
        paths = make_run_keys(self.folder / "keys", machines, head=self.head_machine, head_address=address)
        self._head = Head(read_bundle(paths[self.head_machine]), bind, self.machines, self.times, self._events,
                          Files(self.folder / CHECKPOINTS, list(self._offered)))
        address = f"{address.rpartition(':')[0]}:{self._head.port}"
        for worker in self.workers:
            bundle = paths[self.machines[worker]]
            if worker in here:
                patience = str(6 * self.times.max_pause_ns / 1e9)  # if this head dies meanwhile, they must not stay for long
                self.processes.start(worker, [*command, worker, "--head", address, "--keys", str(bundle), "--patience",
                                              patience], one_thread=emulated)
            else:
                self.on_event(Waiting(worker=worker, machine=self.machines[worker], bundle=str(bundle)))

    def _place(self, all_here: bool) -> tuple[str, str]:
        """Where the control service listens, and the address that workers dial."""
        if all_here:
            return "127.0.0.1:0", "127.0.0.1:0"
        address = self.network.machines[self.head_machine].address
        if address is None:
            raise WorkplaceError(f"machine {self.head_machine} keeps the run and needs an address that the others can dial; "
                                 "write machines: address: HOST:PORT in the cluster")
        return f"0.0.0.0:{address.rpartition(':')[2]}", address

    def measure(self, request: Measure) -> tuple[Calibration, ...]:
        """Let every worker measure its own device as ``request`` says, all at the same time, and return what they found.

        Raises what a worker failed by, ``WorkerLostError``, and ``WorkplaceError`` when not all came in time.
        """
        found: dict[str, tuple[Calibration, ...]] = {}
        deadline_ns = time.monotonic_ns() + self.times.gather_ns
        asked = False
        while len(found) < len(self.workers):
            if not asked and len(self.joined) == len(self.workers):
                self.broadcast(request)
                asked = True
            for worker, message, _ in self.turn(deadline_ns):
                if isinstance(message, Measured):
                    found[worker] = message.found
            self.give_up(deadline_ns, [worker for worker in self.workers if worker not in found])
        return tuple(one for worker in self.workers for one in found[worker])

    def give_up(self, deadline_ns: int, missing: Collection[str]) -> None:
        """Raise ``WorkplaceError`` when the deadline has passed and somebody is missing."""
        if missing and time.monotonic_ns() >= deadline_ns:
            raise WorkplaceError(f"waited {format_duration(self.times.gather_ns)} for {', '.join(missing)} in vain; start "
                                 "them on their machines, or raise job.max_pause, from which the wait follows")

    def assign(self, workers: Sequence[str], documents: Any) -> None:
        """``workers`` do the run that ``documents`` describe (also those that come later); the others are let go."""
        for worker in self.workers:
            if worker not in workers:
                self.send(worker, Finish())
                self._note(Finished(worker=worker, at_ns=time.monotonic_ns()))
        self.workers = tuple(workers)
        self._documents = to_plain(documents)
        for worker in self.workers:
            if worker in self.joined:
                self.send(worker, Assign(documents=self._documents))

    def send(self, worker: str, message: FromHead) -> None:
        assert self._head is not None, "open first"
        self._head.send(worker, message)

    def broadcast(self, message: FromHead) -> None:
        for worker in self.workers:
            self.send(worker, message)

    def turn(self, deadline_ns: int | None) -> Iterator[tuple[str, FromWorker, int]]:
        """One turn of the head's loop: an event or a short wait, then a look at who is alive. Yields (worker, message, time of
        arrival) when it is one of the run's."""
        wait_ns = self.times.heartbeat_ns // 4
        if deadline_ns is not None:
            wait_ns = max(0, min(wait_ns, deadline_ns - time.monotonic_ns()))
        try:
            worker, message, at_ns = self._events.get(timeout=wait_ns / 1e9)
        except queue.Empty:
            pass
        else:
            self._take(worker, message, at_ns)
            if worker in self.workers:
                yield worker, message, at_ns
        now_ns = time.monotonic_ns()
        self._liveness = self._liveness.excused(own_pause(self._looked_ns, now_ns, self.times))
        self._looked_ns = now_ns
        for worker, code in self.processes.ended():
            self._note(Exited(worker=worker, at_ns=now_ns, code=code))
        if self._events.empty():  # judge only with everything heard
            verdict = self._liveness.verdict(now_ns)
            if verdict is not None:
                raise self._error(verdict)

    def _note(self, event: LivenessEvent) -> None:
        self._liveness = self._liveness.after(event)

    def _take(self, worker: str, message: FromWorker, at_ns: int) -> None:
        """What a message says about who is here and well."""
        machine = self.machines[worker]
        if isinstance(message, Hello):
            self._note(Joined(worker=worker, at_ns=at_ns, machine=machine))
            self.joined.add(worker)
            self.send(worker, Welcome(times=self.times, boot=boot_mark()))
            if worker not in self.workers:
                self.send(worker, Finish())
            elif self._documents is not None:
                self.send(worker, Assign(documents=self._documents))
            self.on_event(Came(worker=worker, machine=machine, facts=dict(message.facts)))
        elif isinstance(message, Beat):
            self._note(Seen(worker=worker, at_ns=at_ns, doing=message.doing))
        elif isinstance(message, Trouble):
            self._failures[worker] = message.kind
            self._note(Seen(worker=worker, at_ns=at_ns, doing=message.doing))
            kind = Accused if message.accuses else Failed
            self._note(kind(worker=worker, at_ns=at_ns, text=message.text))
        elif isinstance(message, Done):
            self._note(Finished(worker=worker, at_ns=at_ns))
        elif isinstance(message, Gone):
            self._note(Broken(worker=worker, at_ns=at_ns))

    def _error(self, verdict: Verdict) -> AtollError:
        """The exception for a verdict: a worker's own error keeps its class, everything else is a lost worker."""
        kind: Any = WorkerLostError
        if verdict.kind == "failed":
            kind = getattr(atoll.errors, self._failures.get(verdict.worker, ""), AtollError)
        sentence = verdict.sentence
        if verdict.kind == "ended":
            last = self.processes.last_line(verdict.worker)
            sentence += f"; it said: {last}" if last else ""
        error = kind(sentence)
        return error if isinstance(error, AtollError) else AtollError(sentence)

    def dismiss(self) -> None:
        """Tell everybody that all is done, and wait a little for those that run here."""
        self.broadcast(Finish())
        self.processes.wait((self.times.connect_ns + self.times.grace_ns) / 1e9)

    def abort(self, error: BaseException) -> None:
        """Tell everybody why; give them the grace to unwind."""
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = "the run was interrupted on the head" if interrupted else str(error) or type(error).__name__
        if self._head is not None:
            self.broadcast(Abort(reason=reason))
            self.processes.wait(self.times.grace_ns / 1e9, frozen=True)

    def close(self) -> None:
        """End what runs here, free the port, remove the keys. May be called twice."""
        self.processes.end()
        if self._head is not None:
            self._head.close(min(1.0, self.times.grace_ns / 1e9))
        shutil.rmtree(self.folder / "keys", ignore_errors=True)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(error)
        self.close()
