"""Measuring links: one machine serves, another asks; latency and rate of one TCP stream, both ways.

``atoll probe --serve`` on one side, ``atoll probe --peer host:port`` on the other, with the token that the server
prints. Both sides prove that they know it (HMAC-SHA256 over fresh nonces) before anything is measured; nothing but
figures and zeros crosses the wire. A client with several peers also has them measure each other.

Latency is half the median round trip of one byte. Rate is what arrives in the last six tenths of a stream of ``seconds``,
so that the slow start of TCP is not in it.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from atoll.errors import AtollError, WorkplaceError
from atoll.records import Record
from atoll.runtime.probe import MachineFacts, decode_facts, encode_facts, names_differ

__all__ = ["PORT", "LinkFacts", "Server", "probe_links"]

PORT = 7701
"""Where ``atoll probe --serve`` listens unless told otherwise."""

_PATIENCE_S = 20.0
_BLOCK = bytes(256 << 10)
_TRIPS = 21


class LinkFacts(Record):
    """Between machines ``first`` and ``second``, one stream at a time. ``forward``: first to second."""

    first: str
    second: str
    latency_ns: int
    forward_bytes_per_s: int
    backward_bytes_per_s: int


class _Wire:
    """A socket with messages: four bytes of length, then JSON or raw bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(_PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, value: bytes | dict[str, Any]) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.socket.sendall(struct.pack("!I", len(data)) + data)

    def receive(self, largest: int = 1 << 20) -> bytes:
        (size,) = struct.unpack("!I", self.exactly(4))
        if size > largest:
            raise ConnectionError("not a probe of Atoll on the other side")
        return self.exactly(size)

    def receive_object(self) -> dict[str, Any]:
        value = json.loads(self.receive())
        if not isinstance(value, dict):
            raise ConnectionError("not a probe of Atoll on the other side")
        return value

    def exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self.socket.recv(size - len(data))
            if not piece:
                raise ConnectionError("the other side hung up")
            data += piece
        return bytes(data)


def _proof(token: str, side: str, nonces: bytes) -> bytes:
    return hmac.new(token.encode(), side.encode() + nonces, "sha256").digest()


def _greet_as_server(wire: _Wire, token: str) -> bool:
    mine = secrets.token_bytes(16)
    wire.send(b"atoll-probe-1" + mine)
    answer = wire.receive(64)
    theirs, proof = answer[:16], answer[16:]
    if not hmac.compare_digest(proof, _proof(token, "client", mine + theirs)):
        wire.send(b"no")
        return False
    wire.send(_proof(token, "server", mine + theirs))
    return True


def _greet_as_client(wire: _Wire, token: str, peer: str) -> None:
    hello = wire.receive(64)
    if not hello.startswith(b"atoll-probe-1") or len(hello) != 13 + 16:
        raise ConnectionError("not a probe of Atoll on the other side")
    mine = secrets.token_bytes(16)
    wire.send(mine + _proof(token, "client", hello[13:] + mine))
    answer = wire.receive(64)
    if answer == b"no":
        raise WorkplaceError(f"the peer {peer} refused the token; give the one that atoll probe --serve printed (--token)")
    if not hmac.compare_digest(answer, _proof(token, "server", hello[13:] + mine)):
        raise WorkplaceError(f"the peer {peer} does not know the token; is it the machine that you mean?")


class Server:
    """Answers probes on ``port`` (0: a free one) until closed. ``facts``: of this machine, handed to whoever asks.

    Raises ``WorkplaceError`` when the port is taken.
    """

    def __init__(self, facts: MachineFacts, *, port: int = PORT, token: str | None = None, host: str = "") -> None:
        self.facts = facts
        self.token = token or secrets.token_urlsafe(12)
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise WorkplaceError(f"port {port} cannot be listened on: {error.strerror}; give another with --port, or end the "
                                 "program that uses it") from None
        self._listener.settimeout(0.2)
        self.port = int(self._listener.getsockname()[1])
        self._closed = threading.Event()
        self._measuring = threading.Lock()
        self._thread = threading.Thread(target=self._accept, name="probe-server", daemon=True)
        self._thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Until closed, or Ctrl-C."""
        while not self._closed.wait(0.5):
            pass

    def close(self) -> None:
        self._closed.set()
        self._listener.close()
        self._thread.join(timeout=5)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                wire = _Wire(connection)
                if not _greet_as_server(wire, self.token):
                    return
                while True:
                    self._serve(wire, wire.receive_object())
            except (OSError, ValueError, struct.error):
                return  # a stranger, or a client that is done

    def _serve(self, wire: _Wire, wish: dict[str, Any]) -> None:
        if wish["do"] == "facts":
            wire.send(encode_facts(self.facts))
        elif wish["do"] == "trips":
            for _ in range(int(wish["count"])):
                wire.socket.sendall(wire.exactly(1))
        elif wish["do"] == "take":
            wire.send({"rate": _take(wire)})
        elif wish["do"] == "give":
            _give(wire, float(wish["seconds"]))
        elif wish["do"] == "measure":
            wire.send(self._measure_other(str(wish["peer"]), float(wish["seconds"])))

    def _measure_other(self, peer: str, seconds: float) -> dict[str, Any]:
        try:
            with self._measuring, _dial(peer, self.token) as wire:
                latency, forward, backward = _measure(wire, seconds)
        except (AtollError, OSError) as error:
            return {"error": str(error)}
        return {"latency_ns": latency, "forward": forward, "backward": backward}


def _give(wire: _Wire, seconds: float) -> None:
    """Blocks of zeros, each announced by a one; a zero byte at the end."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        wire.socket.sendall(b"\1" + _BLOCK)
    wire.socket.sendall(b"\0")


def _take(wire: _Wire) -> int:
    """Bytes/s over the last six tenths of what is given, in time."""
    arrivals: list[tuple[float, int]] = []
    buffer = bytearray(1 << 18)
    total, left, ended = 0, 0, False
    while not ended:
        size = wire.socket.recv_into(buffer, min(len(buffer), left or 1))
        if size == 0:
            raise ConnectionError("the other side hung up")
        if left:
            left -= size
            total += size
            arrivals.append((time.perf_counter(), total))
        elif buffer[0] == 1:
            left = len(_BLOCK)
        else:
            ended = True
    start, end = arrivals[0][0], arrivals[-1][0]
    begin = next(index for index, (when, _) in enumerate(arrivals) if when >= start + 0.4 * (end - start))
    (when, before), (last, after) = arrivals[begin], arrivals[-1]
    if after == before:
        return round(total / max(last - start, 1e-9))
    return round((after - before) / max(last - when, 1e-9))


@contextmanager
def _dial(peer: str, token: str) -> Iterator[_Wire]:
    host, _, port = peer.rpartition(":")
    if not host or not port.isdigit():
        raise WorkplaceError(f"found peer {peer!r}, expected host:port such as lab.example.org:{PORT}")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S)
    except OSError as error:
        raise WorkplaceError(f"the peer {peer} cannot be reached: {error.strerror or error}; run atoll probe --serve there, "
                             "and let the port through its firewall") from None
    with connection:
        wire = _Wire(connection)
        try:
            _greet_as_client(wire, token, peer)
            yield wire
        except (OSError, ValueError, struct.error) as error:
            raise WorkplaceError(f"measuring with the peer {peer} broke off: {error}; try again, and see that nothing else "
                                 "listens on that port") from None


def _measure(wire: _Wire, seconds: float) -> tuple[int, int, int]:
    """(latency ns, bytes/s to the other side, bytes/s from it)."""
    wire.send({"do": "trips", "count": _TRIPS})
    trips: list[int] = []
    for _ in range(_TRIPS):
        start = time.perf_counter_ns()
        wire.socket.sendall(b"x")
        wire.exactly(1)
        trips.append(time.perf_counter_ns() - start)
    wire.send({"do": "take"})
    _give(wire, seconds)
    forward = int(wire.receive_object()["rate"])
    wire.send({"do": "give", "seconds": seconds})
    backward = _take(wire)
    return int(statistics.median(trips)) // 2, forward, backward


def probe_links(here: MachineFacts, peers: Sequence[str], token: str, *,
                seconds: float = 2.0) -> tuple[list[MachineFacts], list[LinkFacts], list[str]]:
    """Measure every pair of this machine and ``peers`` ("host:port"), one after the other: (facts of the peers, links,
    sentences about pairs that could not be measured). Raises ``WorkplaceError`` when a peer cannot be reached from here.

    Time: about 2 x ``seconds`` a pair.
    """
    facts: list[MachineFacts] = []
    links: list[LinkFacts] = []
    failed: list[str] = []
    for peer in peers:
        with _dial(peer, token) as wire:
            wire.send({"do": "facts"})
            facts.append(decode_facts(wire.receive()))
            names_differ([here, *facts])
            latency, forward, backward = _measure(wire, seconds)
        links.append(LinkFacts(first=here.name, second=facts[-1].name, latency_ns=latency, forward_bytes_per_s=forward,
                               backward_bytes_per_s=backward))
    for i, first in enumerate(peers):
        for j in range(i + 1, len(peers)):
            with _dial(first, token) as wire:
                wire.socket.settimeout(_PATIENCE_S + 4 * seconds)
                wire.send({"do": "measure", "peer": peers[j], "seconds": seconds})
                answer = wire.receive_object()
            if "error" in answer:
                failed.append(f"{facts[i].name} could not measure {facts[j].name}: {answer['error']}")
                continue
            links.append(LinkFacts(first=facts[i].name, second=facts[j].name, latency_ns=int(answer["latency_ns"]),
                                   forward_bytes_per_s=int(answer["forward"]), backward_bytes_per_s=int(answer["backward"])))
    return facts, links, failed
