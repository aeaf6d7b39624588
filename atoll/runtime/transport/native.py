"""Inside an island: ``torch.distributed`` (Gloo; NCCL for sums between CUDA devices), never across islands.

A process group is made only over the workers that meet in it, on the interface that routes to them; nothing is made
global. A message is one block: its header and, where they fit, the raw tensors. What fits is known on both ends, because
it grows alike with what has passed: the first message of a size sends header and tensors one by one, those after it are
one block each (a message of the library costs as much as copying some 500 KB).

A peer's messages are taken off the link as they come, as on the wire, so a Send never waits until the peer's program
reaches its Receive. Where all messages are small that is ``direct``: the library has the buffer of the next message
beforehand and fills it on a thread of its own, and what is sent is copied and left to it; no thread of ours takes part.
Else a thread of ours takes messages as they come, and a Send waits until they are taken.

A call of the library cannot be interrupted: a dead peer breaks it, and a frozen one holds it until the connections are
cut, which happens when the run stops (``direct``) or at ``close``.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from ctypes import memmove, string_at
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from atoll.errors import ProgramError, WorkerLostError, WorkplaceError
from atoll.runtime.transport.frames import (
    DTYPES,
    MAX_HEADER_BYTES,
    Header,
    Message,
    RefusedError,
    allocate,
    decode_header,
    encode_header,
    header_of,
)
from atoll.runtime.transport.wire import Inlet, who
from atoll.runtime.world import Stop
from atoll.units import format_duration

__all__ = ["DIRECT_BYTES", "Native", "address_towards"]

DIRECT_BYTES = 400_000
"""No message of a run larger than this: it goes without threads of ours."""

_BLOCK_BYTES = 2048  # of the first message
_PREFIX_BYTES = 8  # length of the header (0: goodbye), then 1 if the tensors are in the block
_INLINE_BYTES = 1 << 19  # larger messages are worth the library's call for each tensor
_ALIGN = 64
_PAGE = 4096
_UNUSED_TAG = 9
_SLICE_S = 0.05
_FLIGHTS = 32  # messages under way to a peer at least, before the first of them is waited for
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

    ``device``: where NCCL runs, if it does. Messages above ``max_message_bytes`` are refused. ``direct``: see above. Use:
    ``open_store`` on the first member, then ``connect`` on all. An island of one worker needs no ``Native``.
    """

    def __init__(self, name: str, members: Sequence[str], machines: Mapping[str, str], stop: Stop, *,
                 device: torch.device, max_message_bytes: int, connect_ns: int, direct: bool = False) -> None:
        self.name, self.members = name, tuple(members)
        self._names = {member: who(member, machines[member]) for member in members}
        self._stop, self._device, self._limit = stop, device, max_message_bytes
        self._timeout = datetime.timedelta(microseconds=connect_ns // 1000)
        self._rank = self.members.index(name)
        self._peers = [member for member in self.members if member != name]
        self._inlets = {peer: Inlet(self._names[name], self._names[peer], stop) for peer in self._peers}
        self._sequences = dict.fromkeys(self._peers, 0)
        self._outgoing = {peer: _Room() for peer in self._peers}
        self._incoming = {peer: _Room() for peer in self._peers}
        self._ranks = {member: rank for rank, member in enumerate(self.members)}
        self._direct, self._connected = direct, False
        self._posted: dict[str, tuple[torch.Tensor, Any]] = {}  # the buffer of the next message, and the library's promise
        self._flights: dict[str, deque[tuple[Any, torch.Tensor]]] = {peer: deque() for peer in self._peers}
        self._most_flights = dict.fromkeys(self._peers, _FLIGHTS)
        self._caller: _Caller | None = None
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
        self._connected = True
        if self._direct:
            for peer in self._peers:
                self._expect(peer)
            self._stop.wake(self._break)
        else:
            self._caller = _Caller("native")
            self._start_pumps()

    def _start_pumps(self) -> None:
        for peer in self._peers:
            pump = threading.Thread(target=self._pump, args=(peer,), name=f"native-in:{peer}", daemon=True)
            self._pumps.append(pump)
            pump.start()

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
            self._put(peer, header, tensors)
        except RuntimeError as error:
            self._stop.check()
            raise WorkerLostError(f"{self._names[peer]} is gone: the connection broke ({_first_line(error)}), "
                                  f"while {self._names[self.name]} sent {label}") from None
        return header.payload_bytes

    def receive(self, peer: str, label: str) -> list[torch.Tensor]:
        inlet = self._inlets[peer]
        if self._direct and peer in self._posted:
            message = self._next(peer)
            if message is not None:
                if message.header.label == label:
                    return message.tensors
                inlet.put(message)
        return inlet.take(label)

    def prompt(self, peer: str, messages: int) -> bool:
        """What was sent so long ago has been taken, because the peer has ended that step; its memory is used again."""
        self._most_flights[peer] = max(self._most_flights[peer], 2 * messages + _FLIGHTS)
        return self._direct

    def all_reduce(self, group: Sequence[str], tensor: torch.Tensor) -> None:
        """Sum in place over ``group``; the same bits everywhere. Gloo: 2 (n-1)/n of the bytes each way, as a ring."""
        strangers = [worker for worker in group if worker not in self.members]
        if strangers or self.name not in group:
            raise ProgramError(f"{self.name}: a native collective over {', '.join(group)} is not inside the island of "
                               f"{', '.join(self.members)}")
        if len(group) == 1:
            return
        try:
            if self._direct:
                self._sum(tuple(group), tensor)
            else:
                self._aside(lambda: self._sum(tuple(group), tensor))
        except RuntimeError as error:
            self._stop.check()
            raise WorkerLostError(f"a native all-reduce of {self._names[self.name]} with "
                                  f"{self._named([worker for worker in group if worker != self.name])} "
                                  f"broke: one of them is gone ({_first_line(error)})") from None

    def close(self) -> None:
        """Say goodbye to every peer and wait for theirs; after a stop the connections are cut instead."""
        if not self._connected:
            return
        self._connected = False
        if self._stop.event.is_set():
            self._break()
            self._leave(1.0)
            return
        farewell = torch.zeros(_PREFIX_BYTES, dtype=torch.uint8)
        for peer in self._peers:
            try:
                if self._direct:
                    self._post(peer, farewell)
                else:
                    self._aside(lambda peer=peer: self._post(peer, farewell))  # type: ignore[misc]
            except RuntimeError:
                continue
        if self._direct:
            self._start_pumps()  # what the peers have sent is kept, until their goodbyes
        self._leave(self._timeout.total_seconds())

    def _break(self) -> None:
        """Gloo gives up all connections of a group when one wait in it runs out of time: that frees whoever sits in it."""
        for group in (self._all, *(group for key, group in self._groups.items() if key[0] == "gloo")):
            other = (group.rank() + 1) % group.size()
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], other, _UNUSED_TAG).wait(datetime.timedelta(milliseconds=1))

    def _leave(self, timeout_s: float) -> None:
        for pump in self._pumps:
            pump.join(timeout_s)
        if self._caller is not None:
            self._caller.finish()
            self._caller.thread.join(timeout_s)
        self._pumps = []

    # -- on the library's threads --------------------------------------------------------------------------------------

    def _aside(self, action: Callable[[], object]) -> None:
        if self._caller is None:
            raise ProgramError(f"{self.name}: connect before anything is sent or summed")
        self._caller.call(action, self._stop)

    def _post(self, peer: str, tensor: torch.Tensor) -> None:
        """Send; ``direct``: the tensor, which must be ours, is left to the library."""
        work = self._all.send([tensor], self._ranks[peer], 0)
        if self._direct:
            self._flights[peer].append((work, tensor))
        else:
            work.wait()

    def _block(self, peer: str) -> torch.Tensor:
        """Where the next message to ``peer`` is put together."""
        room, flights = self._outgoing[peer], self._flights[peer]
        if not self._direct:
            return room.block
        while len(flights) >= self._most_flights[peer]:
            work, tensor = flights.popleft()
            work.wait()
            if tensor.untyped_storage().nbytes() == room.size:
                return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]
        return torch.empty(room.size, dtype=torch.uint8)

    def _expect(self, peer: str) -> tuple[torch.Tensor, Any]:
        """Give the library a buffer for the next message of ``peer``."""
        block = torch.empty(self._incoming[peer].size, dtype=torch.uint8)
        self._posted[peer] = block, self._all.recv([block], self._ranks[peer], 0)
        return self._posted[peer]

    def _fetch(self, peer: str, tensor: torch.Tensor) -> None:
        self._all.recv([tensor], self._ranks[peer], 0).wait()

    def _put(self, peer: str, header: Header, tensors: Sequence[torch.Tensor]) -> None:
        encoded = encode_header(header)
        room, (offsets, total) = self._outgoing[peer], _places(len(encoded), header)
        block = self._block(peer)
        inline = total <= room.size
        start = len(encoded).to_bytes(4, "little") + inline.to_bytes(4, "little") + encoded
        head = start[:room.size]
        start_of_block = block.data_ptr()
        memmove(start_of_block, head, len(head))  # views of tensors would cost five times as much as the copying itself
        if inline:
            for tensor, offset in zip(tensors, offsets, strict=True):
                own = tensor if tensor.is_contiguous() and not tensor.is_cuda else tensor.detach().cpu().contiguous()
                memmove(start_of_block + offset, own.data_ptr(), own.nbytes)
            self._post(peer, block[:total])
            return
        self._post(peer, block[:len(head)])
        if len(start) > room.size:
            self._post(peer, torch.frombuffer(bytearray(start[room.size:]), dtype=torch.uint8))
        for tensor in tensors:
            if tensor.numel():
                own = tensor.detach().cpu().contiguous()
                own = own.clone() if self._direct and own.data_ptr() == tensor.data_ptr() else own
                self._post(peer, own.reshape(-1).view(torch.uint8))
        room.grow(total)

    def _pump(self, peer: str) -> None:
        if not self._direct or peer in self._posted:
            while self._pull(peer):
                pass
        with contextlib.suppress(RuntimeError):  # the peer is gone, which the inlet says
            for work, _ in self._flights[peer]:
                work.wait()

    def _pull(self, peer: str) -> bool:
        """Put the next message of ``peer`` into its inlet; False: there will be none."""
        message = self._next(peer)
        if message is not None:
            self._inlets[peer].put(message)
        return message is not None

    def _next(self, peer: str) -> Message | None:
        """Take the next message of ``peer`` off the link; None: there will be none, and the inlet says why."""
        inlet = self._inlets[peer]
        try:
            message = self._take(peer)
            if message is not None:
                if self._direct:
                    self._expect(peer)
                return message
            inlet.end("it finished and sends no more")
        except RefusedError as error:
            inlet.end(f"its message was refused: {error}")
        except RuntimeError as error:
            inlet.end(f"the connection broke ({_first_line(error)})")
        return None

    def _take(self, peer: str) -> Message | None:
        room = self._incoming[peer]
        block, work = self._posted.get(peer) or self._expect(peer)
        del self._posted[peer]
        work.wait()
        room_bytes = block.numel()
        raw = string_at(block.data_ptr(), min(room_bytes, _BLOCK_BYTES))
        length, inline = int.from_bytes(raw[:4], "little"), raw[4] == 1
        if length == 0:
            return None
        if length > MAX_HEADER_BYTES:
            raise RefusedError(f"a header of {length} bytes")
        if _PREFIX_BYTES + length > len(raw):  # a long header
            raw = string_at(block.data_ptr(), min(room_bytes, _PREFIX_BYTES + length))
        encoded = raw[_PREFIX_BYTES:_PREFIX_BYTES + length]
        if len(encoded) < length:
            rest = torch.empty(length - len(encoded), dtype=torch.uint8)
            self._fetch(peer, rest)
            encoded += rest.numpy().tobytes()
        header = decode_header(encoded, self._limit)
        offsets, total = _places(length, header)
        if inline:
            if total > room_bytes:
                raise RefusedError(f"{header.label}: {total} bytes in a block of {room_bytes}")
            return Message(header=header, tensors=_cut_out(header, block, offsets))
        tensors = allocate(header)
        for tensor in tensors:
            if tensor.numel():
                self._fetch(peer, tensor.view(-1).view(torch.uint8))
        room.grow(total)
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


class _Room:
    """How large a block may be in one direction between two workers; both ends count alike. ``block``: where a sender that
    waits puts every message together."""

    def __init__(self) -> None:
        self.size = _BLOCK_BYTES
        self.block = torch.zeros(self.size, dtype=torch.uint8)

    def grow(self, total: int) -> None:
        """A message of ``total`` bytes has passed; one like it, with a somewhat longer label, shall fit."""
        if self.size < total <= _INLINE_BYTES:
            self.size = -(-(total + _BLOCK_BYTES) // _PAGE) * _PAGE
            self.block = torch.zeros(self.size, dtype=torch.uint8)


def _places(header_bytes: int, header: Header) -> tuple[list[int], int]:
    """Where the tensors of a message lie in its block, each on a boundary of 64 bytes, and the bytes of the whole."""
    offsets, end = [], _PREFIX_BYTES + header_bytes
    for dtype, shape in header.tensors:
        offsets.append(-(-end // _ALIGN) * _ALIGN)
        end = offsets[-1] + prod(shape) * DTYPES[dtype].itemsize
    return offsets, end


def _cut_out(header: Header, block: torch.Tensor, offsets: Sequence[int]) -> list[torch.Tensor]:
    """The tensors of a message as views of its block."""
    storage, tensors = block.untyped_storage(), []
    for (dtype, shape), offset in zip(header.tensors, offsets, strict=True):
        kind = DTYPES[dtype]
        tensors.append(torch.empty(0, dtype=kind).set_(storage, offset // kind.itemsize, shape))  # type: ignore[call-overload]
    return tensors


def _first_line(error: BaseException) -> str:
    """The library's text without its source lines and jokes."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if "closed by peer" in text or "pair closure" in text:
        return "closed by the other side"
    return re.sub(r"^\[[^\]]*\]\s*", "", text)[:200]
