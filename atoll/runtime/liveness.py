"""Who is alive: a state machine without clocks, sockets or threads. Events go in, at most one verdict comes out.

What is told apart: a worker whose process ended (killed, or failed by its own error), one that is silent although its
connection stands (frozen), one whose connection broke, and two workers that lost each other although the head hears
both. The first cause is what counts: when b1 dies, a1 reports a broken stream too; a1's report waits until b1 had time
to be found dead, and becomes the verdict only if b1 is found well.
"""

from __future__ import annotations

import signal
from typing import TypeAlias

import msgspec

from atoll.errors import DocumentError
from atoll.records import Record
from atoll.units import format_duration

__all__ = ["Accused", "Broken", "Exited", "Failed", "Finished", "Joined", "Liveness", "LivenessEvent", "Seen", "Timeouts",
           "Verdict", "head_silent", "own_pause", "timeouts", "where"]

_SECOND = 10**9
_SHORTEST_NS = 50_000_000


class Timeouts(Record):
    """All time-outs of a run; every one follows from ``max_pause``.

    ``heartbeat_ns``: how often each side says it is alive. ``silence_ns``: a worker (or the head) that was not heard for
    this long is given up. ``settle_ns``: how long a broken connection waits for a better explanation. ``grace_ns``: how
    long a stopped worker may take to unwind before it is ended. ``connect_ns``: dialling a peer. ``gather_ns``: how long
    the head waits until all workers have come and are ready. ``silence + heartbeat + settle + grace`` <= ``max_pause``.
    """

    max_pause_ns: int
    heartbeat_ns: int
    silence_ns: int
    settle_ns: int
    grace_ns: int
    connect_ns: int
    gather_ns: int

    def sentence(self) -> str:
        return (f"a machine may be silent for {format_duration(self.max_pause_ns)}: heartbeats every "
                f"{format_duration(self.heartbeat_ns)}, given up after {format_duration(self.silence_ns)} of silence, "
                f"{format_duration(self.grace_ns)} to stop, {format_duration(self.gather_ns)} to come together")


def timeouts(max_pause_ns: int) -> Timeouts:
    """The one place where ``max_pause`` becomes time-outs. Raises ``DocumentError`` when it is too short to mean anything."""
    if max_pause_ns < _SHORTEST_NS:
        raise DocumentError(f"job.max_pause: found {format_duration(max_pause_ns)}, expected at least "
                            f"{format_duration(_SHORTEST_NS)}, such as '30 s'")
    return Timeouts(
        max_pause_ns=max_pause_ns, heartbeat_ns=min(_SECOND // 4, max_pause_ns // 10), silence_ns=max_pause_ns * 6 // 10,
        settle_ns=min(_SECOND, max_pause_ns // 10), grace_ns=min(3 * _SECOND, max_pause_ns // 5), connect_ns=max_pause_ns,
        gather_ns=60 * max_pause_ns)


class _Event(Record, tag=True):
    """Something that was noticed about ``worker`` at ``at_ns`` of the head's clock."""

    worker: str
    at_ns: int


class Joined(_Event):
    """It registered. ``machine``: where it runs."""

    machine: str


class Seen(_Event):
    """It was heard. ``doing``: what it said it was doing."""

    doing: str


class Broken(_Event):
    """Its connection to the head ended."""


class Exited(_Event):
    """Its process ended; ``code`` as ``subprocess`` gives it (negative: the signal)."""

    code: int


class Failed(_Event):
    """It said that it cannot go on, through its own error."""

    text: str


class Accused(_Event):
    """It said that it lost a peer."""

    text: str


class Finished(_Event):
    """It said that it has done everything; its end is no loss."""


LivenessEvent: TypeAlias = Joined | Seen | Broken | Exited | Failed | Accused | Finished


class _Watch(Record):
    """What is known of one worker."""

    machine: str
    seen_ns: int
    doing: str = ""
    broken_ns: int | None = None
    code: int | None = None
    failed: str = ""
    accused_ns: int | None = None
    accusation: str = ""
    finished: bool = False


class Verdict(Record):
    """``kind``: "killed", "ended", "failed", "frozen", "gone" (connection broke) or "parted" (two lost each other).

    ``worker``: who is lost; for "parted" the one that reported it. ``sentence``: for people.
    """

    worker: str
    machine: str
    kind: str
    sentence: str


def where(worker: str, machine: str) -> str:
    return f"machine {machine}" if worker == machine else f"worker {worker} on machine {machine}"


class Liveness(Record):
    """The state: immutable, ``after`` gives the next one."""

    times: Timeouts
    watches: dict[str, _Watch] = {}

    def after(self, event: LivenessEvent) -> Liveness:
        watch = self.watches.get(event.worker)
        if isinstance(event, Joined):
            watch = _Watch(machine=event.machine, seen_ns=event.at_ns)
        elif watch is None:
            if not isinstance(event, Exited):
                return self
            watch = _Watch(machine=event.worker, seen_ns=event.at_ns, code=event.code)  # ended before it came
        else:
            watch = msgspec.structs.replace(watch, **_change(watch, event))
        return msgspec.structs.replace(self, watches={**self.watches, event.worker: watch})

    def excused(self, pause_ns: int) -> Liveness:
        """The head itself stood still for ``pause_ns`` (a suspended laptop, a migrated virtual machine): what nobody could
        say or hear meanwhile counts against nobody."""
        return msgspec.structs.replace(self, watches={
            name: msgspec.structs.replace(
                watch, seen_ns=watch.seen_ns + pause_ns,
                broken_ns=None if watch.broken_ns is None else watch.broken_ns + pause_ns,
                accused_ns=None if watch.accused_ns is None else watch.accused_ns + pause_ns)
            for name, watch in self.watches.items()})

    def verdict(self, now_ns: int) -> Verdict | None:
        """The first cause known at ``now_ns``, or None while all is well or not yet clear."""
        running = {name: watch for name, watch in self.watches.items() if not watch.finished}
        for judge in (_failed, _ended, _frozen, _gone):
            for name, watch in running.items():
                found = judge(name, watch, now_ns, self.times)
                if found is not None:
                    return found
        return self._parted(running, now_ns)

    def _parted(self, running: dict[str, _Watch], now_ns: int) -> Verdict | None:
        """An accusation holds once everybody was heard well after it (or time would have shown who is frozen)."""
        for name, watch in running.items():
            if watch.accused_ns is None:
                continue
            since_ns = watch.accused_ns + self.times.settle_ns
            others = [other for other in running.values() if not other.accusation]
            well = all(other.broken_ns is None and other.seen_ns >= since_ns for other in others)
            if now_ns >= since_ns and (well or now_ns - watch.accused_ns >= self.times.silence_ns):
                return Verdict(worker=name, machine=watch.machine, kind="parted", sentence=watch.accusation)
        return None


def _change(watch: _Watch, event: LivenessEvent) -> dict[str, object]:
    if isinstance(event, Seen):
        return {"seen_ns": max(watch.seen_ns, event.at_ns), "doing": event.doing}
    if isinstance(event, Broken):
        return {"broken_ns": event.at_ns if watch.broken_ns is None else watch.broken_ns}
    if isinstance(event, Exited):
        return {"code": event.code}
    if isinstance(event, Failed):
        return {"failed": event.text}
    if isinstance(event, Accused):
        return {} if watch.accusation else {"accused_ns": event.at_ns, "accusation": event.text}
    return {"finished": True}


def _doing(watch: _Watch) -> str:
    return f" while doing {watch.doing}" if watch.doing else " before its first step"


def _failed(name: str, watch: _Watch, now_ns: int, times: Timeouts) -> Verdict | None:
    if not watch.failed:
        return None
    return Verdict(worker=name, machine=watch.machine, kind="failed",
                   sentence=f"{where(name, watch.machine)} failed{_doing(watch)}: {watch.failed}")


def _ended(name: str, watch: _Watch, now_ns: int, times: Timeouts) -> Verdict | None:
    if watch.code is None or watch.accusation:  # one that lost a peer ends too; the peer is the cause
        return None
    if watch.code < 0:
        kind, how = "killed", f"was killed ({_signal_name(-watch.code)})"
    else:
        kind, how = "ended", f"ended unasked with exit code {watch.code}"
    return Verdict(worker=name, machine=watch.machine, kind=kind, sentence=f"{where(name, watch.machine)} {how}{_doing(watch)}")


def _frozen(name: str, watch: _Watch, now_ns: int, times: Timeouts) -> Verdict | None:
    silent_ns = now_ns - watch.seen_ns
    if watch.broken_ns is not None or silent_ns < times.silence_ns:
        return None
    return Verdict(worker=name, machine=watch.machine, kind="frozen",
                   sentence=f"{where(name, watch.machine)} is frozen or cut off: silent for {format_duration(silent_ns)}"
                            f"{_doing(watch)}")


def _gone(name: str, watch: _Watch, now_ns: int, times: Timeouts) -> Verdict | None:
    if watch.broken_ns is None or now_ns - watch.broken_ns < times.settle_ns or watch.accusation:
        return None
    return Verdict(worker=name, machine=watch.machine, kind="gone",
                   sentence=f"{where(name, watch.machine)} is gone: its process ended or its network broke{_doing(watch)}")


def _signal_name(number: int) -> str:
    try:
        return f"signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"


def own_pause(looked_ns: int, now_ns: int, times: Timeouts) -> int:
    """How long a watcher that looks at least every heartbeat must have stood still itself, seeing that it looked last at
    ``looked_ns``; 0 when it did not."""
    gap_ns = now_ns - looked_ns
    return gap_ns if gap_ns > 2 * times.heartbeat_ns else 0


def head_silent(heard_ns: int, now_ns: int, times: Timeouts) -> str | None:
    """What a worker says when it has not heard the head for too long, or None."""
    if now_ns - heard_ns < times.silence_ns:
        return None
    return f"the head is frozen or cut off: silent for {format_duration(now_ns - heard_ns)}"
