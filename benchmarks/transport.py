"""How fast the links are: two processes on this machine, a wire (gRPC, mutual TLS) and a native channel between them.

Figures: ``*_mb_per_s`` one way, in messages of 8 MiB; ``*_message_us``: one way, a message of 40 bytes (half of a round
trip, median); ``shaped_error``: worst relative error of the time to receive, over sizes and emulated links, against
bytes / rate + latency; ``shaped_share``: of two equal flows on one link, how much the first had when it ended, of what was
fair (1.0). An emulated link holds bytes back and cannot hurry them: a link faster than the wire of this run is out of reach
of this computer. Its rows are printed, its error is ``faster_than_wire_error``, and ``shaped_links`` counts the others.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from contract import finish, quick

from atoll.cluster.network import Path as Road
from atoll.runtime.keys import make_run_keys, read_bundle
from atoll.runtime.transport.native import Native
from atoll.runtime.transport.shaped import Buckets, Shaped
from atoll.runtime.transport.wire import Wire
from atoll.runtime.world import Channel, Stop

LARGE = 8 << 20
LIMITS = {"max_message_bytes": 1 << 30, "connect_ns": 10 * 10**9}
ROADS = {"home": Road(segments=("home",), latency_ns=25_000_000, message_ns=0),
         "office": Road(segments=("office",), latency_ns=2_000_000, message_ns=0),
         "rack": Road(segments=("rack",), latency_ns=100_000, message_ns=0)}
RATES = {"home": 50_000_000 // 8, "office": 10**9 // 8, "rack": 10 * 10**9 // 8}


def open_pair(name: str, folder: Path, talk: Connection) -> dict[str, Channel]:
    """This process's ends; both processes call it."""
    machines = {"a": "a", "b": "b"}
    other = "b" if name == "a" else "a"
    wire = Wire(name, read_bundle(folder / f"{name}.pem"), machines, Stop(), bind="127.0.0.1:0", keepalive_ns=10**10, **LIMITS)
    native = Native(name, ["a", "b"], machines, Stop(), device=torch.device("cpu"), **LIMITS)
    store = native.open_store() if name == "a" else 0
    talk.send_bytes(f"{wire.port} {store}".encode())
    port, theirs = map(int, talk.recv_bytes().split())
    wire.connect({other: f"127.0.0.1:{port}"}, sends_to=[other], receives_from=[other])
    native.connect(f"127.0.0.1:{store or theirs}")
    channels: dict[str, Channel] = {"wire": wire, "native": native}
    for road in ROADS.values():
        buckets = Buckets(folder / "links.bin", RATES)
        channels[road.segments[0]] = Shaped(wire, name, buckets, lambda source, target, road=road: road, Stop())  # type: ignore[misc]
    return channels


def receive_many(channel: Channel, peer: str, count: int) -> list[int]:
    """Monotonic instants (one clock for the machine) at which messages were there."""
    return [(channel.receive(peer, "x"), time.monotonic_ns())[1] for _ in range(count)]


def peer(folder: str, talk: Connection, counts: dict[str, int], pings: int) -> None:
    torch.set_num_threads(1)
    channels = open_pair("b", Path(folder), talk)
    for kind in ("wire", "native"):
        receive_many(channels[kind], "a", counts[kind])
        channels[kind].send("a", "x", [torch.zeros(1)])
        for _ in range(pings):
            channels[kind].send("a", "x", channels[kind].receive("a", "x"))
    for road in ROADS:
        talk.send_bytes(" ".join(map(str, receive_many(channels[road], "a", counts[road]))).encode())
    for channel in (channels["native"], channels["wire"]):
        channel.close()


def throughput(channel: Channel, count: int) -> float:
    tensor = torch.zeros(LARGE, dtype=torch.uint8)
    begin = time.perf_counter()
    for _ in range(count):
        channel.send("b", "x", [tensor])
    channel.receive("b", "x")
    return count * LARGE / (time.perf_counter() - begin) / 1e6


def message_us(channel: Channel, pings: int) -> float:
    trips = []
    for _ in range(pings):
        begin = time.perf_counter()
        channel.send("b", "x", [torch.zeros(10)])
        channel.receive("b", "x")
        trips.append(time.perf_counter() - begin)
    return statistics.median(trips) / 2 * 1e6


def shares(folder: Path) -> float:
    """Two equal flows at once over one segment: when the first ends, how far it is from the fair end (both at the end)."""
    buckets = Buckets(folder / "shares.bin", {"road": 5_000_000})
    ends: list[int] = []
    begin = time.monotonic_ns()

    def flow() -> None:
        shaped = Shaped(_Sink(), "a", buckets, lambda s, t: Road(segments=("road",), latency_ns=0, message_ns=0), Stop())
        shaped.send("b", "x", [torch.zeros(1_000_000, dtype=torch.uint8)])
        ends.append(time.monotonic_ns() - begin)

    threads = [threading.Thread(target=flow) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return min(ends) / max(ends)


class _Sink:
    """A channel that swallows."""

    def send(self, peer: str, label: str, tensors: list[torch.Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors)

    def receive(self, peer: str, label: str) -> list[torch.Tensor]:
        raise NotImplementedError

    def all_reduce(self, group: list[str], tensor: torch.Tensor) -> None:
        raise NotImplementedError

    def close(self) -> None:
        return None


def main() -> int:
    short = quick("Throughput and latency of the links.")
    torch.set_num_threads(1)
    repeats, pings = (40, 300) if short else (200, 2000)
    sizes = (1_000, 100_000, 1_000_000) if short else (1_000, 10_000, 100_000, 1_000_000, 4_000_000)
    times = 3 if short else 8
    counts = {"wire": repeats, "native": repeats} | dict.fromkeys(ROADS, len(sizes) * times)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_run_keys(folder, ["a", "b"])
        here, there = context.Pipe()
        other = context.Process(target=peer, args=(name, there, counts, pings))
        other.start()
        channels = open_pair("a", folder, here)
        figures: dict[str, float] = {}
        for kind in ("wire", "native"):
            figures[f"{kind}_mb_per_s"] = throughput(channels[kind], repeats)
            figures[f"{kind}_message_us"] = message_us(channels[kind], pings)
        rows: list[tuple[str, int, float, float]] = []
        for road, path in ROADS.items():
            begun = []
            for size in sizes:
                for _ in range(times):
                    begun.append(time.monotonic_ns())
                    channels[road].send("b", "x", [torch.zeros(size, dtype=torch.uint8)])
            arrived = list(map(int, here.recv_bytes().split()))
            for at, size in enumerate(sizes):
                took = [arrived[number] - begun[number] for number in range(at * times, (at + 1) * times)]
                rows.append((road, size, statistics.median(took), size / RATES[road] * 1e9 + path.latency_ns))
        closing = threading.Thread(target=channels["native"].close)
        closing.start()
        channels["wire"].close()
        closing.join()
        other.join()
        figures["shaped_share"] = shares(folder)
    for road, size, took, expected in rows:
        print(f"{road:>7} {size:>9} B  {took / 1e6:9.3f} ms, expected {expected / 1e6:9.3f} ms")
    large = [(road, took / expected - 1) for road, _, took, expected in rows if expected >= 1_000_000]
    slower = {road for road in ROADS if RATES[road] < figures["wire_mb_per_s"] * 1e6}
    figures["shaped_links"] = len(slower)
    figures["shaped_error"] = max(abs(error) for road, error in large if road in slower)
    figures["faster_than_wire_error"] = max((abs(error) for road, error in large if road not in slower), default=0.0)
    figures["shaped_small_late_us"] = max((took - expected) / 1e3 for _, _, took, expected in rows if expected < 1_000_000)
    return finish("transport", figures, {"wire_mb_per_s": (">=", 600.0), "shaped_error": ("<=", 0.05),
                                         "shaped_share": (">=", 0.9), "shaped_links": (">=", 2)}, drawn(rows))


def drawn(rows: list[tuple[str, int, float, float]]) -> Callable[..., None]:
    def picture(figure) -> None:  # type: ignore[no-untyped-def]
        axes = figure.add_subplot()
        for road in ROADS:
            own = [row for row in rows if row[0] == road]
            axes.loglog([row[1] for row in own], [row[2] / 1e6 for row in own], "o", label=f"{road}, measured")
            axes.loglog([row[1] for row in own], [row[3] / 1e6 for row in own], "-", color="0.6")
        axes.set(xlabel="message (bytes)", ylabel="time to receive (ms)",
                 title="Emulated links: measured, and bytes / rate + latency (grey)")
        axes.legend()

    return picture


if __name__ == "__main__":
    sys.exit(main())
