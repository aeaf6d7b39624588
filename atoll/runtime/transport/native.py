"""Inside an island: ``torch.distributed`` (Gloo; NCCL for sums between CUDA devices), never across islands.

A process group is made only over the workers that meet in it, on the interface that routes to them; nothing is made
global. Every message is a fixed block (its header, and the payload if it fits) and then the raw tensors. A call of the
library cannot be interrupted, so each runs on a thread of its own and the lane waits beside it, looking at the stop flag;
a peer's messages are taken off the link as they come, as on the wire, so a Send never waits until the peer's program
reaches its Receive.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from atoll.errors import ProgramError, WorkerLostError, WorkplaceError
from atoll.runtime.transport.frames import (
    MAX_HEADER_BYTES,
    Header,
    Message,
    RefusedError,
    allocate,
    byte_view,
    decode_header,
    encode_header,
    header_of,
)
from atoll.runtime.transport.wire import Inlet, who
from atoll.runtime.world import Stop
from atoll.units import format_duration

__all__ = ["Native", "address_towards"]

_BLOCK_BYTES = 2048
_PREFIX_BYTES = 8  # length of the header; 0: goodbye
_UNUSED_TAG = 9
_SLICE_S = 0.05
_FOREVER = datetime.timedelta(days=30)  # the library must not judge who is dead: that is the head's task


def address_towards(host: str) -> str:
    """The address of this machine on the interface that routes to ``host`` (the operating system is asked)."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket sends nothing: only the route is looked up
            return str(probe.getsockname()[0])
    except OSError as error:
        raise WorkplaceError(f"there is no route from this machine to {host}: {error.strerror or error}") from None


class _Caller:
    """One thread for calls that cannot be interrupted; ``call`` gives up when the run stops, the thread may stay behind."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], object], list[Any], threading.Event] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            action, outcome, done = item
            try:
                action()
            except Exception as error:  # handed to the lane that waits
                outcome.append(error)
            done.set()

    def call(self, action: Callable[[], object], stop: Stop) -> None:
        outcome: list[Exception] = []
        done = threading.Event()
        self._work.put((action, outcome, done))
        while not done.wait(_SLICE_S):
            stop.check()
        if outcome:
            raise outcome[0]

    def finish(self) -> None:
        self._work.put(None)


class Native:
    """The ``Channel`` inside one island. ``members``: its workers, in the order all of them agree on; ``machines``:
    worker -> machine.

    ``device``: where NCCL runs, if it does. Messages above ``max_message_bytes`` are refused. Use: ``open_store`` on the first
    member, then ``connect`` on all. An island of one worker needs no ``Native``.
    """

    def __init__(self, name: str, members: Sequence[str], machines: Mapping[str, str], stop: Stop, *,
                 device: torch.device, max_message_bytes: int, connect_ns: int) -> None:
        self.name, self.members = name, tuple(members)
        self._names = {member: who(member, machines[member]) for member in members}
        self._stop, self._device, self._limit = stop, device, max_message_bytes
        self._timeout = datetime.timedelta(microseconds=connect_ns // 1000)
        self._rank = self.members.index(name)
        self._peers = [member for member in self.members if member != name]
        self._inlets = {peer: Inlet(self._names[name], self._names[peer]) for peer in self._peers}
        self._sequences = dict.fromkeys(self._peers, 0)
        self._callers: dict[str, _Caller] = {}
        self._pumps: list[threading.Thread] = []
        self._groups: dict[tuple[str, ...], Any] = {}
        self._store: Any = None
        self._host = ""
        self._nccl = False

    def _named(self, workers: Sequence[str]) -> str:
        return ", ".join(self._names[worker] for worker in workers)

    # -- coming together -----------------------------------------------------------------------------------------------

    def open_store(self) -> int:
        """Start the island's meeting place here (first member only); returns its port."""
        self._store = dist.TCPStore("localhost", 0, None, True, self._timeout, wait_for_workers=False)
        return int(self._store.port)

    def connect(self, store_address: str, *, nccl: bool = False) -> None:
        """Meet the others at ``store_address`` ("host:port"). ``nccl``: every member has a CUDA device of its own.

        Raises ``WorkerLostError`` when they do not come in time.
        """
        host, _, port = store_address.rpartition(":")
        self._host, self._nccl = address_towards(host.strip("[]")), nccl
        try:
            if self._store is None:
                self._store = dist.TCPStore(host.strip("[]"), int(port), None, False, self._timeout)
            self._all = self._gloo("island", self.members)
        except RuntimeError as error:
            raise WorkerLostError(f"{self._names[self.name]} did not meet {self._named(self._peers)} at {store_address} within "
                                  f"{format_duration(self._timeout.total_seconds() * 1e9)}: {_first_line(error)}") from None
        for peer in self._peers:
            self._callers[peer] = _Caller(f"native-out:{peer}")
            pump = threading.Thread(target=self._pump, args=(peer,), name=f"native-in:{peer}", daemon=True)
            self._pumps.append(pump)
            pump.start()
        self._callers[""] = _Caller("native-collective")

    def _gloo(self, name: str, group: Sequence[str]) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = _FOREVER
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        store = dist.PrefixStore(f"gloo/{name}", self._store)
        return dist.ProcessGroupGloo(store, list(group).index(self.name), len(group), options)

    def _nccl_group(self, name: str, group: Sequence[str]) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        store = dist.PrefixStore(f"nccl/{name}", self._store)
        return dist.ProcessGroupNCCL(store, list(group).index(self.name), len(group), options)

    # -- Channel -------------------------------------------------------------------------------------------------------

    def send(self, peer: str, label: str, tensors: Sequence[torch.Tensor]) -> int:
        self._stop.check()
        header = header_of(label, self._sequences[peer], tensors)
        self._sequences[peer] += 1
        try:
            self._callers[peer].call(lambda: self._put(peer, header, tensors), self._stop)
        except RuntimeError as error:
            raise WorkerLostError(f"{self._names[peer]} is gone: the connection broke ({_first_line(error)}), "
                                  f"while {self._names[self.name]} sent {label}") from None
        return header.payload_bytes

    def receive(self, peer: str, label: str) -> list[torch.Tensor]:
        return self._inlets[peer].take(label, self._stop)

    def all_reduce(self, group: Sequence[str], tensor: torch.Tensor) -> None:
        """Sum in place over ``group``; the same bits everywhere. Gloo: 2 (n-1)/n of the bytes each way, as a ring."""
        strangers = [worker for worker in group if worker not in self.members]
        if strangers or self.name not in group:
            raise ProgramError(f"{self.name}: a native collective over {', '.join(group)} is not inside the island of "
                               f"{', '.join(self.members)}")
        if len(group) == 1:
            return
        try:
            self._callers[""].call(lambda: self._sum(tuple(group), tensor), self._stop)
        except RuntimeError as error:
            raise WorkerLostError(f"a native all-reduce of {self._names[self.name]} with "
                                  f"{self._named([worker for worker in group if worker != self.name])} "
                                  f"broke: one of them is gone ({_first_line(error)})") from None

    def close(self) -> None:
        """Say goodbye to every peer and wait for theirs; after a stop the connections are cut instead."""
        if not self._pumps:
            return
        if self._stop.event.is_set():
            self._cut()
            return
        farewell = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
        for peer in self._peers:
            try:
                self._callers[peer].call(lambda peer=peer: self._post(peer, farewell), self._stop)  # type: ignore[misc]
            except RuntimeError:
                continue
        self._leave(self._timeout.total_seconds())

    def _cut(self) -> None:
        """Gloo gives up all connections of a group when one wait in it runs out of time: that frees whoever sits in it."""
        for group in (self._all, *(group for key, group in self._groups.items() if key[0] == "gloo")):
            other = (group.rank() + 1) % group.size()
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], other, _UNUSED_TAG).wait(datetime.timedelta(milliseconds=1))
        self._leave(1.0)

    def _leave(self, timeout_s: float) -> None:
        for caller in self._callers.values():
            caller.finish()
        for pump in self._pumps:
            pump.join(timeout_s)
        for caller in self._callers.values():
            caller.thread.join(timeout_s)
        self._pumps = []

    # -- on the library's threads --------------------------------------------------------------------------------------

    def _post(self, peer: str, tensor: torch.Tensor) -> None:
        self._all.send([tensor], self.members.index(peer), 0).wait()

    def _fetch(self, peer: str, tensor: torch.Tensor) -> None:
        self._all.recv([tensor], self.members.index(peer), 0).wait()

    def _put(self, peer: str, header: Header, tensors: Sequence[torch.Tensor]) -> None:
        encoded = encode_header(header)
        start = len(encoded).to_bytes(_PREFIX_BYTES, "little") + encoded
        flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
        if _fits(len(encoded), header):
            self._post(peer, _block(b"".join((start, *(memoryview(tensor.numpy()) for tensor in flat)))))
            return
        self._post(peer, _block(start[:_BLOCK_BYTES]))
        if len(start) > _BLOCK_BYTES:
            self._post(peer, torch.frombuffer(bytearray(start[_BLOCK_BYTES:]), dtype=torch.uint8))
        for tensor in flat:
            self._post(peer, tensor)

    def _pump(self, peer: str) -> None:
        inlet = self._inlets[peer]
        try:
            while (message := self._take(peer)) is not None:
                inlet.put(message)
            inlet.end("it finished and sends no more")
        except RefusedError as error:
            inlet.end(f"its message was refused: {error}")
        except RuntimeError as error:
            inlet.end(f"the connection broke ({_first_line(error)})")

    def _take(self, peer: str) -> Message | None:
        block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
        self._fetch(peer, block)
        data = block.numpy().tobytes()
        length = int.from_bytes(data[:_PREFIX_BYTES], "little")
        if length == 0:
            return None
        if length > MAX_HEADER_BYTES:
            raise RefusedError(f"a header of {length} bytes")
        if length > _BLOCK_BYTES - _PREFIX_BYTES:
            rest = torch.empty(length - (_BLOCK_BYTES - _PREFIX_BYTES), dtype=torch.uint8)
            self._fetch(peer, rest)
            data += rest.numpy().tobytes()
        header = decode_header(data[_PREFIX_BYTES:_PREFIX_BYTES + length], self._limit)
        tensors = allocate(header)
        at = _PREFIX_BYTES + length
        for tensor in tensors:
            if tensor.numel() and _fits(length, header):
                byte_view(tensor)[:] = data[at:at + tensor.nbytes]
                at += tensor.nbytes
            elif tensor.numel():
                self._fetch(peer, tensor.view(-1).view(torch.uint8))
        return Message(header=header, tensors=tensors)

    def _sum(self, group: tuple[str, ...], tensor: torch.Tensor) -> None:
        fast = self._nccl and tensor.is_cuda
        key = ("nccl" if fast else "gloo", *group)
        if key not in self._groups:
            self._groups[key] = (self._nccl_group if fast else self._gloo)("sum/" + ",".join(group), group)
        on_host = tensor if fast or not tensor.is_cuda else tensor.cpu()
        self._groups[key].allreduce([on_host]).wait()
        if fast:
            torch.cuda.current_stream(self._device).synchronize()
        elif on_host is not tensor:
            tensor.copy_(on_host)


def _fits(header_bytes: int, header: Header) -> bool:
    """Whether a whole message goes into one block: then it is one hand-over instead of one for each tensor besides."""
    return _PREFIX_BYTES + header_bytes + header.payload_bytes <= _BLOCK_BYTES


def _block(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(_BLOCK_BYTES, b"\0")), dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    """The library's text without its source lines and jokes."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if "closed by peer" in text or "pair closure" in text:
        return "closed by the other side"
    return re.sub(r"^\[[^\]]*\]\s*", "", text)[:200]
