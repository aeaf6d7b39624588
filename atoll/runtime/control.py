"""The head's control service and a worker's side of it: one stream a worker over mutual TLS, small JSON records.

    worker -> head   Hello, Measured, Ready, Beat, Report, Trouble, Done
    head -> worker   Welcome, Measure, Assign, Start, Pulse, Abort, Finish

The head answers every ``Beat`` with a ``Pulse``, so each side hears the other at the same rhythm and the worker learns the
offset between the two clocks (NTP, Mills 1991: the exchange with the shortest round trip counts). A stream that ends is
seen at once on both sides. The head never waits for workers between steps; it only listens.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
import msgspec

from atoll.cluster.calibration import Calibration
from atoll.errors import AtollError, CheckpointError, WorkerLostError, WorkplaceError
from atoll.runtime.handover import Files
from atoll.runtime.keys import Bundle
from atoll.runtime.liveness import Timeouts, head_silent, own_pause
from atoll.runtime.transport import rpc
from atoll.runtime.world import Stop
from atoll.trace.span import Span
from atoll.units import format_duration

__all__ = ["Abort", "Assign", "Beat", "Done", "Finish", "FromHead", "FromWorker", "Gone", "Head", "Hello", "Measure",
           "Measured", "Member", "Ready", "Report", "Start", "Trouble", "Welcome", "boot_mark"]

_SERVICE = "atoll.control"
_MESSAGE_BYTES = 256 << 20
_POLL_S = 0.05
_FIRST_BEATS = 8


class _Said(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of the messages."""


class Hello(_Said):
    """``incarnation``: made up afresh by every process. ``facts``: what the head may want to show or compare."""

    incarnation: str
    facts: dict[str, str | int | float | bool]


class Ready(_Said):
    """``address``: where peers dial this worker (None: nowhere). ``store_port``: of the island's meeting place, 0 if it is not
    here. ``program``: digest of the program as this worker lowered it. ``card``: mark of a CUDA device of its own, else ""."""

    address: str | None
    store_port: int
    program: str
    card: str


class Measured(_Said):
    """What the worker's device needs for each of the sizes asked for."""

    found: tuple[Calibration, ...]


class Beat(_Said):
    """``sent_ns``: the worker's clock. ``doing``: current instructions, for people."""

    sent_ns: int
    doing: str


class Report(_Said):
    """One step is done. ``kind``: "train", "evaluate" or "save". ``figures``: loss, tokens, ... by name
    (None: not a finite number, which JSON cannot say). ``spans``: times from
    the origin of the run. ``extra``: what else belongs to the kind (a shard's entry)."""

    kind: str
    step: int
    figures: dict[str, float | None]
    spans: tuple[Span, ...] = ()
    extra: Any = None


class Trouble(_Said):
    """``accuses``: a peer was lost (else: an error of this worker's own). ``kind``: name of the error's class. ``doing``: as
    in a ``Beat``."""

    text: str
    doing: str
    kind: str
    accuses: bool


class Done(_Said):
    """All steps are done."""


class Welcome(_Said):
    """``boot``: mark of the head's running system."""

    times: Timeouts
    boot: str


class Measure(_Said):
    """Measure your device. ``job`` and ``cluster``: documents; ``sizes``: samples of the microbatches to time; ``vocabulary``:
    of the tokens to time them with."""

    job: Any
    cluster: Any
    sizes: tuple[int, ...]
    vocabulary: int
    seconds: float


class Assign(_Said):
    """``documents``: what the worker builds its part from."""

    documents: Any


class Start(_Said):
    """Everybody is ready. ``addresses``: worker -> "host:port"; ``stores``: island -> "host:port"; ``facts``: worker -> facts.
    ``origin_ns``: the instant, on the head's clock, from which spans count."""

    addresses: dict[str, str | None]
    stores: dict[str, str]
    cards: dict[str, str]
    origin_ns: int


class Pulse(_Said):
    echo_ns: int
    head_ns: int


class Abort(_Said):
    reason: str


class Finish(_Said):
    """Everybody is done, or the plan does without this worker: close."""


class Gone(_Said):
    """Not sent: the head's own note that a worker's stream ended."""


FromWorker = Hello | Measured | Ready | Beat | Report | Trouble | Done | Gone
FromHead = Welcome | Measure | Assign | Start | Pulse | Abort | Finish
_FROM_WORKER = msgspec.json.Decoder(Hello | Measured | Ready | Beat | Report | Trouble | Done)
_FROM_HEAD: msgspec.json.Decoder[FromHead] = msgspec.json.Decoder(FromHead)
T = TypeVar("T")


def _bytes(message: _Said) -> bytes:
    return msgspec.json.encode(message, enc_hook=int)


def boot_mark() -> str:
    """A text that is equal for processes of one running system (they share its monotonic clock and files), else ""."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Head:
    """The service. ``events`` receives (worker, message, time of arrival); ``machines``: worker -> machine; ``files``: what
    machines without a common disk may hand over and fetch."""

    def __init__(self, bundle: Bundle, bind: str, machines: Mapping[str, str], times: Timeouts,
                 events: queue.SimpleQueue[tuple[str, FromWorker, int]], files: Files) -> None:
        self._machines, self._events, self._files = dict(machines), events, files
        self._outboxes: dict[str, queue.SimpleQueue[_Said | None]] = {}
        self._peers: dict[str, str] = {}
        self._lock = threading.Lock()
        methods = {"join": grpc.stream_stream_rpc_method_handler(self._join),
                   "upload": grpc.stream_unary_rpc_method_handler(self._upload),
                   "download": grpc.unary_stream_rpc_method_handler(self._download)}
        self._server, self.port = rpc.serve(bundle, bind, _SERVICE, methods, threads=2 * len(machines) + 4,
                                            max_message_bytes=_MESSAGE_BYTES, keepalive_ns=times.silence_ns)

    def send(self, worker: str, message: _Said) -> None:
        """Queue a message; it is dropped when the worker is gone."""
        with self._lock:
            outbox = self._outboxes.get(worker)
        if outbox is not None:
            outbox.put(message)

    def broadcast(self, message: _Said) -> None:
        for worker in self._machines:
            self.send(worker, message)

    def close(self, timeout_s: float) -> None:
        """End all streams (what was queued is sent first) and free the port."""
        with self._lock:
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            outbox.put(None)
        self._server.stop(timeout_s).wait(timeout_s)

    def _join(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        worker = rpc.claimed_worker(context, self._machines)
        outbox: queue.SimpleQueue[_Said | None] = queue.SimpleQueue()
        with self._lock:
            holder = self._peers.get(worker) if worker in self._outboxes else None
            if holder is None:
                self._outboxes[worker], self._peers[worker] = outbox, context.peer()
        if holder is not None:
            rpc.refuse(context, grpc.StatusCode.ALREADY_EXISTS,
                       f"worker {worker} already takes part in this run (from {_plain(holder)}), and a second process (from "
                       f"{_plain(context.peer())}) claims its name: two workers claim one name; end one of them or give it "
                       "another name in the cluster")
        context.add_callback(lambda: self._leave(worker, outbox))
        threading.Thread(target=self._listen, args=(worker, requests, outbox), name=f"control:{worker}", daemon=True).start()
        while (message := outbox.get()) is not None:
            yield _bytes(message)

    def _upload(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        worker = rpc.claimed_worker(context, self._machines)
        try:
            self._files.take(worker, chunks)
        except AtollError as error:
            rpc.refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return b""

    def _download(self, path: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        rpc.claimed_worker(context, self._machines)
        try:
            yield from self._files.give(path.decode(errors="replace"))
        except AtollError as error:
            rpc.refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def _listen(self, worker: str, requests: Iterator[bytes], outbox: queue.SimpleQueue[_Said | None]) -> None:
        try:
            for data in requests:
                message = _FROM_WORKER.decode(data)
                now_ns = time.monotonic_ns()
                if isinstance(message, Beat):
                    outbox.put(Pulse(echo_ns=message.sent_ns, head_ns=now_ns))
                self._events.put((worker, message, now_ns))
            outbox.put(None)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            outbox.put(Abort(reason=f"the head did not understand worker {worker}: {error}; install the same version of "
                                    "Atoll on all machines"))
            outbox.put(None)
        except Exception:  # gRPC ends the iterator with a bare exception when the caller is gone
            outbox.put(None)

    def _leave(self, worker: str, outbox: queue.SimpleQueue[_Said | None]) -> None:
        with self._lock:
            if self._outboxes.get(worker) is outbox:
                del self._outboxes[worker]
        outbox.put(None)
        self._events.put((worker, Gone(), time.monotonic_ns()))


def _plain(peer: str) -> str:
    """ "ipv4:10.0.0.3:5123" as people write it."""
    return peer.partition(":")[2].replace("%5B", "[").replace("%5D", "]")


class Member:
    """A worker's side. Everything it hears that ends the run goes into ``stop`` (and into ``ending``, the sentence as the
    head said it), and so does the head's silence. ``offset_ns``: the head's clock minus this one's."""

    def __init__(self, name: str, bundle: Bundle, head_address: str, stop: Stop) -> None:
        self.name, self.offset_ns = name, 0
        self._bundle, self._address, self._stop = bundle, head_address, stop
        self._outbox: queue.SimpleQueue[_Said | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[FromHead] = queue.SimpleQueue()
        self._last_heard_ns = time.monotonic_ns()
        self._shortest_ns = 1 << 62
        self._same_clock = False
        self._refusal = ""
        self._times: Timeouts | None = None
        self._doing: Callable[[], str] = str
        self.ending = ""
        self.ended = threading.Event()
        self.finished = threading.Event()
        self._channel: grpc.Channel | None = None

    def join(self, hello: Hello, patience_ns: int) -> Welcome:
        """Register with the head, waiting for it up to ``patience_ns``. Raises ``WorkplaceError`` when refused or alone."""
        self._channel = rpc.dial(self._bundle, self._address, self._bundle.head or self._bundle.machine,
                                 max_message_bytes=_MESSAGE_BYTES, keepalive_ns=60 * 10**9)
        if not rpc.wait_ready(self._channel, patience_ns, self._stop.check):
            raise WorkplaceError(f"worker {self.name} cannot reach the head at {self._address} within "
                                 f"{format_duration(patience_ns)}: nobody answers there, or not with the keys of this "
                                 "bundle; start the run on the head, and use the bundle that it made")
        self._outbox.put(hello)
        call = self._channel.stream_stream(f"/{_SERVICE}/join")(self._outgoing(), metadata=tuple(rpc.metadata(self.name)))
        threading.Thread(target=self._listen, args=(call,), name="control", daemon=True).start()
        welcome = self._await(Welcome, patience_ns, "a word of welcome")
        self._times = welcome.times
        self._same_clock = bool(welcome.boot) and welcome.boot == boot_mark()
        return welcome

    def beat(self, doing: Callable[[], str]) -> None:
        """From now on say that this worker is alive, and look whether the head is (on a thread of its own)."""
        assert self._times is not None, "join first"
        self._doing = doing
        threading.Thread(target=self._beat, args=(doing, self._times), name="heartbeat", daemon=True).start()

    def order(self) -> Measure | Assign | None:
        """What the head wants next, however long it plans (its silence is seen by the heartbeat); None: it does without this
        worker. Raises ``StoppedError``."""
        while not self.finished.is_set():
            self._stop.check()
            with contextlib.suppress(queue.Empty):
                message = self._heard.get(timeout=_POLL_S)
                if isinstance(message, Measure | Assign):
                    return message
        return None

    def measured(self, found: tuple[Calibration, ...]) -> None:
        self._outbox.put(Measured(found=found))

    def start(self, ready: Ready) -> Start:
        """Say that all is built and wait until it is for everybody. Raises ``StoppedError``."""
        assert self._times is not None, "join first"
        self._outbox.put(ready)
        return self._await(Start, self._times.gather_ns, "the start of the run")

    def report(self, report: Report) -> None:
        """Hand a step's report on; never waits for the head."""
        self._outbox.put(report)

    def upload(self, chunks: Iterator[bytes]) -> None:
        """Hand a file to the head (see ``handover``). Raises ``CheckpointError`` when it does not take it."""
        assert self._channel is not None, "join first"
        try:
            self._channel.stream_unary(f"/{_SERVICE}/upload")(chunks, metadata=tuple(rpc.metadata(self.name)))
        except grpc.RpcError as error:
            raise CheckpointError(f"worker {self.name} could not hand its shard to the head: {rpc.reason_of(error)}") from None

    def download(self, path: str) -> Iterator[bytes]:
        """A file of the head, in pieces. Raises ``CheckpointError`` when it does not come."""
        assert self._channel is not None, "join first"
        try:
            yield from self._channel.unary_stream(f"/{_SERVICE}/download")(
                path.encode(), metadata=tuple(rpc.metadata(self.name)))
        except grpc.RpcError as error:
            raise CheckpointError(f"worker {self.name} could not fetch {path} from the head: {rpc.reason_of(error)}") from None

    def trouble(self, error: BaseException) -> None:
        """Tell the head, which decides what it means; then wait for its decision (it comes as a stop)."""
        accuses = isinstance(error, WorkerLostError)
        self._outbox.put(Trouble(text=str(error), doing=self._doing(), kind=type(error).__name__, accuses=accuses))
        limit_ns = self._times.max_pause_ns if self._times else 0
        self.ended.wait(limit_ns / 1e9)

    def finish(self) -> None:
        """Say that this worker is done and wait until everybody is. Raises ``StoppedError``."""
        assert self._times is not None, "join first"
        self._outbox.put(Done())
        while not self.finished.wait(_POLL_S):
            self._stop.check()

    def close(self) -> None:
        self.finished.set()
        self._outbox.put(None)
        if self._channel is not None:
            self.ended.wait(1.0)
            self._channel.close()

    def _await(self, kind: type[T], patience_ns: int, what: str) -> T:
        deadline_ns = time.monotonic_ns() + patience_ns
        while time.monotonic_ns() < deadline_ns:
            if self._refusal:
                raise WorkplaceError(self._refusal)
            self._stop.check()
            try:
                message = self._heard.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(message, kind):
                return message
        raise WorkplaceError(f"worker {self.name} waited {format_duration(patience_ns)} for {what} in vain; see the head")

    def _outgoing(self) -> Iterator[bytes]:
        while (message := self._outbox.get()) is not None:
            yield _bytes(message)

    def _listen(self, call: Any) -> None:
        reason = "the head ended the run"
        try:
            for data in call:
                self._take(_FROM_HEAD.decode(data), time.monotonic_ns())
        except grpc.RpcError:
            reason = rpc.reason_of(call)
            if call.code() in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.PERMISSION_DENIED):
                self._refusal = reason
            else:
                reason = f"the head is gone: {reason}"
        if not self.finished.is_set():
            self._end(reason)
        self.ended.set()

    def _end(self, reason: str) -> None:
        self.ending = self.ending or reason
        self._stop.set(reason)
        self.ended.set()

    def _take(self, message: FromHead, now_ns: int) -> None:
        self._last_heard_ns = now_ns
        if isinstance(message, Pulse):
            round_trip_ns = now_ns - message.echo_ns
            if round_trip_ns < self._shortest_ns and not self._same_clock:
                self._shortest_ns = round_trip_ns
                self.offset_ns = message.head_ns - (message.echo_ns + now_ns) // 2
        elif isinstance(message, Abort):
            self._end(message.reason)
        elif isinstance(message, Finish):
            self.finished.set()
        else:
            self._heard.put(message)

    def _beat(self, doing: Callable[[], str], times: Timeouts) -> None:
        count = 0
        self._last_heard_ns = looked_ns = time.monotonic_ns()
        while not self.ended.is_set() and not self.finished.is_set():
            now_ns = time.monotonic_ns()
            self._last_heard_ns += own_pause(looked_ns, now_ns, times)
            looked_ns = now_ns
            self._outbox.put(Beat(sent_ns=now_ns, doing=doing()))
            silent = head_silent(self._last_heard_ns, now_ns, times)
            if silent is not None:
                self._end(silent)
            count += 1
            self.ended.wait(times.heartbeat_ns / 1e9 / (10 if count < _FIRST_BEATS else 1))
