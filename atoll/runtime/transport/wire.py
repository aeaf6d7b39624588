"""Between islands: gRPC over mutual TLS, one ordered stream for each directed pair, raw tensor bytes in frames.

The sender dials the receiver ("push"). A worker that nobody can dial (no address) dials for both directions: it pulls
what is sent to it. Frames are taken by HTTP/2 flow control, so a slow receiver slows the sender, not its memory.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import torch

from atoll.errors import ProgramError, WorkerLostError
from atoll.runtime.keys import Bundle
from atoll.runtime.transport import rpc
from atoll.runtime.transport.frames import FRAME_BYTES, Message, RefusedError, frames_of, header_of, messages_in
from atoll.runtime.world import Stop
from atoll.units import format_duration

__all__ = ["Inlet", "Wire", "who"]

_SERVICE = "atoll.wire"
_SLICE_S = 0.05  # how often a wait looks at the stop flag


def who(worker: str, machine: str) -> str:
    return f"machine {machine}" if worker == machine else f"worker {worker} on machine {machine}"


class Inlet:
    """Messages of one peer in order of arrival, until the stream ends; filled by one thread, emptied by another."""

    def __init__(self, me: str, peer: str, stop: Stop) -> None:
        self._me, self._peer, self._stop = me, peer, stop
        self._messages: deque[Message] = deque()
        self._changed = threading.Condition()
        self._ended = ""
        stop.wake(self._wake)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def put(self, message: Message) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def end(self, reason: str) -> None:
        """Nothing more will come, and why; what has come can still be taken."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify()

    def take(self, label: str) -> list[torch.Tensor]:
        with self._changed:
            while not self._messages:
                self._stop.check()
                if self._ended:
                    raise WorkerLostError(f"{self._peer} is gone: {self._ended}, while {self._me} waited for {label}")
                self._changed.wait()
            message = self._messages.popleft()
        if message.header.label != label:
            raise ProgramError(f"{self._me} expected {label} from {self._peer} and got {message.header.label}: "
                               "the two run different programs")
        return message.tensors


class _Outlet:
    """What this worker sends to one peer: whole messages in, frames out (on the thread that gRPC takes them with)."""

    def __init__(self, me: str, peer: str) -> None:
        self._me, self._peer = me, peer
        self.call: Any = None
        self._waiting: queue.SimpleQueue[tuple[Iterator[bytes], threading.Event] | None] = queue.SimpleQueue()
        self._sequence = 0
        self._broken = ""
        self.pulled = threading.Event()

    def send(self, label: str, tensors: Sequence[torch.Tensor], stop: Stop) -> int:
        header = header_of(label, self._sequence, tensors)
        taken = threading.Event()
        self._sequence += 1
        self._waiting.put((frames_of(header, tensors), taken))
        while not taken.wait(_SLICE_S):
            stop.check()
            self._check(label)
        self._check(label)
        return header.payload_bytes

    def _check(self, label: str) -> None:
        if self._broken:
            raise WorkerLostError(f"{self._peer} is gone: {self._broken}, while {self._me} sent {label}")

    def frames(self) -> Iterator[bytes]:
        while (item := self._waiting.get()) is not None:
            frames, taken = item
            yield from frames
            taken.set()

    def end(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._waiting.put(None)

    def finish(self) -> None:
        self._waiting.put(None)


class Wire:
    """The ``Channel`` between islands (without ``all_reduce``: no library crosses a slow edge).

    ``machines``: worker -> machine, for all workers of the run. ``bind``: "host:port" to listen on, or None when nobody
    can dial this worker. A message above ``max_message_bytes`` is refused, and the peer is named. ``keepalive_ns``:
    a connection whose other end does not answer is given up after twice that. ``connect_ns``: how long dialling may take.
    """

    def __init__(self, name: str, bundle: Bundle, machines: Mapping[str, str], stop: Stop, *, bind: str | None,
                 max_message_bytes: int, keepalive_ns: int, connect_ns: int) -> None:
        self.name, self.port = name, 0
        self._bundle, self._machines, self._stop = bundle, dict(machines), stop
        self._limit, self._keepalive_ns, self._connect_ns = max_message_bytes, keepalive_ns, connect_ns
        peers = [peer for peer in machines if peer != name]
        self._inlets = {peer: Inlet(self._who(name), self._who(peer), stop) for peer in peers}
        self._outlets = {peer: _Outlet(self._who(name), self._who(peer)) for peer in peers}
        self._claimed: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._pulls: list[Any] = []
        self._server: rpc.Server | None = None
        if bind is not None:
            methods = {"push": grpc.stream_unary_rpc_method_handler(self._push),
                       "pull": grpc.unary_stream_rpc_method_handler(self._pull)}
            self._server, self.port = rpc.serve(bundle, bind, _SERVICE, methods, threads=2 * len(peers) + 4,
                                                max_message_bytes=2 * FRAME_BYTES, keepalive_ns=keepalive_ns)

    def _who(self, worker: str) -> str:
        return who(worker, self._machines[worker])

    # -- the two calls, on the receiving and on the sending side -------------------------------------------------------

    def _push(self, frames: Iterable[bytes], context: grpc.ServicerContext) -> bytes:
        peer = self._admit("push", context)
        inlet = self._inlets[peer]
        try:
            self._feed(inlet, frames)
        except RefusedError as error:
            sentence = f"{self._who(self.name)} refused a message of {self._who(peer)}: {error}"
            inlet.end(sentence)
            rpc.refuse(context, grpc.StatusCode.INVALID_ARGUMENT, sentence)
        except Exception:  # gRPC ends the iterator with a bare exception when the caller is gone
            inlet.end("its connection broke")
        return b""

    def _pull(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        peer = self._admit("pull", context)
        outlet = self._outlets[peer]
        context.add_callback(lambda: outlet.end("its connection ended"))
        outlet.pulled.set()
        return outlet.frames()

    def _admit(self, method: str, context: grpc.ServicerContext) -> str:
        peer = rpc.claimed_worker(context, {peer: self._machines[peer] for peer in self._inlets})
        with self._lock:
            fresh = (method, peer) not in self._claimed
            self._claimed.add((method, peer))
        if not fresh:
            rpc.refuse(context, grpc.StatusCode.ALREADY_EXISTS,
                       f"worker {peer} has a stream to {self.name} already: two workers claim one name")
        return peer

    def _feed(self, inlet: Inlet, frames: Iterable[bytes]) -> None:
        for message in messages_in(frames, self._limit):
            inlet.put(message)
        inlet.end("it finished and sends no more")

    # -- connecting ----------------------------------------------------------------------------------------------------

    def connect(self, addresses: Mapping[str, str | None], *, sends_to: Iterable[str], receives_from: Iterable[str]) -> None:
        """Open the streams of this worker. ``addresses``: worker -> "host:port", None for one that cannot be dialled.

        Raises ``WorkerLostError`` when a peer does not answer in time or turns out to be someone else.
        """
        pushes = [peer for peer in sends_to if addresses[peer] is not None]
        pulls = [] if self._server is not None else list(receives_from)
        for peer in dict.fromkeys((*pushes, *pulls)):
            self._dial(peer, addresses[peer])
        for peer in pushes:
            self._open_push(peer)
        for peer in pulls:
            self._open_pull(peer)
        waiting = [peer for peer in sends_to if addresses[peer] is None]
        for peer in waiting:
            self._wait_for_pull(peer)

    def _dial(self, peer: str, address: str | None) -> None:
        if address is None:
            raise WorkerLostError(f"{self._who(peer)} and {self._who(self.name)} have no address between them; "
                                  "give one of the two an address in the cluster")
        channel = rpc.dial(self._bundle, address, self._machines[peer], max_message_bytes=2 * FRAME_BYTES,
                           keepalive_ns=self._keepalive_ns)
        self._channels[peer] = channel
        if not rpc.wait_ready(channel, self._connect_ns, self._stop.check):
            raise WorkerLostError(
                f"{self._who(self.name)} cannot reach {self._who(peer)} at {address} within "
                f"{format_duration(self._connect_ns)}: nobody answers there, or not with this run's keys; check the "
                "machine's address in the cluster and the firewall between the two")

    def _open_push(self, peer: str) -> None:
        outlet = self._outlets[peer]
        method = self._channels[peer].stream_unary(f"/{_SERVICE}/push")
        outlet.call = method.future(outlet.frames(), metadata=tuple(rpc.metadata(self.name)))
        outlet.call.add_done_callback(lambda call: outlet.end(
            "it ended the stream" if call.code() is grpc.StatusCode.OK else rpc.reason_of(call)))

    def _open_pull(self, peer: str) -> None:
        call = self._channels[peer].unary_stream(f"/{_SERVICE}/pull")(b"", metadata=tuple(rpc.metadata(self.name)))
        self._pulls.append(call)
        inlet = self._inlets[peer]

        def pump() -> None:
            try:
                self._feed(inlet, call)
            except RefusedError as error:
                inlet.end(f"its message was refused: {error}")
                call.cancel()
            except grpc.RpcError as error:
                inlet.end(rpc.reason_of(error))

        threading.Thread(target=pump, name=f"pull:{peer}", daemon=True).start()

    def _wait_for_pull(self, peer: str) -> None:
        outlet = self._outlets[peer]
        for _ in range(max(1, round(self._connect_ns / 1e9 / _SLICE_S))):
            if outlet.pulled.wait(_SLICE_S):
                return
            self._stop.check()
        raise WorkerLostError(f"{self._who(peer)} has no address and did not dial {self._who(self.name)} within "
                              f"{format_duration(self._connect_ns)}")

    # -- Channel -------------------------------------------------------------------------------------------------------

    def prompt(self, peer: str, messages: int) -> bool:
        return False  # a send takes as long as the link

    def send(self, peer: str, label: str, tensors: Sequence[torch.Tensor]) -> int:
        self._stop.check()
        return self._outlets[peer].send(label, tensors, self._stop)

    def receive(self, peer: str, label: str) -> list[torch.Tensor]:
        return self._inlets[peer].take(label)

    def all_reduce(self, group: Sequence[str], tensor: torch.Tensor) -> None:
        raise ProgramError(f"{self.name}: a native collective over {', '.join(group)} would cross islands; "
                           "plan it as sends and receives")

    def close(self) -> None:
        """End the streams: in order when all is well (what was sent arrives), at once when the run was stopped."""
        calls = [outlet.call for outlet in self._outlets.values() if outlet.call is not None]
        stopped = self._stop.event.is_set()
        if stopped:
            for call in calls:
                call.cancel()  # before the outlets end, which the peers would take for a goodbye
        for outlet in self._outlets.values():
            outlet.finish()
        if not stopped:
            for call in calls:
                self._await_end(call)
        for call in self._pulls:
            call.cancel()
        for channel in self._channels.values():
            channel.close()
        if self._server is not None:
            self._server.stop(None if stopped else self._connect_ns / 1e9).wait(self._connect_ns / 1e9)

    def _await_end(self, call: Any) -> None:
        """Closing goes on whatever became of the peer."""
        try:
            call.result(timeout=self._connect_ns / 1e9)
        except (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
            return
