"""How true the lab is: measured over declared, for rate, latency, sharing, byte counters and CPU share. Needs root."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise

from contract import finish, quick
from matplotlib.figure import Figure

from atoll.cluster.cluster import Cluster
from atoll.lab.lab import Lab
from atoll.records import parse

CLUSTER = """
name: lab-benchmark
islands:
  {slow: {bandwidth: 10 Gbit/s}, middle: {bandwidth: 10 Gbit/s}, fast: {bandwidth: 10 Gbit/s}, near: {bandwidth: 1 Gbit/s}}
machines:
  - {name: s1, island: slow, devices: [{kind: cpu-core, speed: 1.0}]}
  - {name: s2, island: slow, devices: [{kind: cpu-core, speed: 0.5}]}
  - {name: m1, island: middle, devices: [{kind: cpu-core}]}
  - {name: f1, island: fast, devices: [{kind: cpu-core}]}
  - {name: n1, island: near, devices: [{kind: cpu-core}]}
  - {name: n2, island: near, devices: [{kind: cpu-core}]}
links:
  - {between: [slow, middle], bandwidth: 50 Mbit/s, latency: 25 ms}
  - {between: [fast, middle], bandwidth: 1 Gbit/s, latency: 5 ms}
emulation: {cpu_share: 0.5}
"""
GOALS = {
    **{f"rate_{name}": (">=", 0.95) for name in ("50mbit_25ms", "1gbit_5ms", "1gbit_island")},
    "rate_most": ("<=", 1.02), "latency_25ms": ("<=", 1.04), "latency_25ms_busy": ("<=", 1.10), "latency_5ms": ("<=", 1.10),
    "latency_least": (">=", 1.0),
    "shared_sum": (">=", 0.95), "shared_least": (">=", 0.30), "counter_error": ("<=", 0.02), "cpu_share_most": ("<=", 1.05),
}
RECEIVER = """
import json, socket, sys, time
server = socket.create_server(("0.0.0.0", 5000))
print("up", flush=True)
peer, _ = server.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(int(sys.argv[1])):
    peer.sendall(peer.recv(1))
samples, total, buffer = [], 0, bytearray(1 << 20)
while size := peer.recv_into(buffer):
    total += size
    if not samples or time.monotonic() - samples[-1][0] > 0.05:
        samples.append((time.monotonic(), total))
print(json.dumps({"samples": samples, "total": total}))
"""
SENDER = """
import json, socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(int(sys.argv[2])):
    start = time.perf_counter(); peer.sendall(b"x"); peer.recv(1); trips.append(time.perf_counter() - start)
block, end = bytes(1 << 16), time.monotonic() + float(sys.argv[3])
while time.monotonic() < end:
    peer.sendall(block)
print(json.dumps(trips))
"""
SPIN = """
import sys, time
start, before = time.monotonic(), time.process_time()
while time.monotonic() - start < float(sys.argv[1]): pass
print((time.process_time() - before) / (time.monotonic() - start))
"""
TRIPS = 30
Samples = list[tuple[float, int]]


def flows(lab: Lab, pairs: Sequence[tuple[str, str]], seconds: float) -> tuple[list[Samples], list[float], list[int]]:
    """Streams between ``pairs`` (source, target) at the same time: samples and totals of arrivals, one-way latencies (s)."""
    receivers = []
    for _, target in pairs:
        receiver = lab.run(target, [sys.executable, "-S", "-c", RECEIVER, str(TRIPS)], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None and receiver.stdout.readline() == "up\n"
        receivers.append(receiver)
    senders = [lab.run(source, [sys.executable, "-S", "-c", SENDER, lab.address(target), str(TRIPS), str(seconds)],
                       stdout=subprocess.PIPE, text=True) for source, target in pairs]
    trips = [trip / 2 for sender in senders for trip in json.loads(sender.communicate()[0])]
    reports = [json.loads(receiver.communicate()[0]) for receiver in receivers]
    return [report["samples"] for report in reports], trips, [report["total"] for report in reports]


def rate(samples: Samples, start: float, end: float) -> float:
    """Bytes/s that arrived between two moments."""
    inside = [sample for sample in samples if start <= sample[0] <= end]
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def steady(samples: Samples, seconds: float) -> float:
    """Rate without the first third (slow start) and without the queue that drains after the sender stopped."""
    return rate(samples, samples[0][0] + seconds / 3, samples[0][0] + seconds)


def network(seconds: float) -> tuple[dict[str, float], dict[str, Samples]]:
    figures: dict[str, float] = {}
    curves: dict[str, Samples] = {}
    errors: list[float] = []
    cases = {"50mbit_25ms": ("s1", "m1", 50e6 / 8, 25e-3, "slow>middle"),
             "1gbit_5ms": ("f1", "m1", 1e9 / 8, 5e-3, "fast>middle"),
             "1gbit_island": ("n1", "n2", 1e9 / 8, None, "near>n2")}
    least = []
    for name, (source, target, declared, latency, segment) in cases.items():
        with Lab(parse(CLUSTER, Cluster), limits=False) as lab:
            (samples,), trips, (total,) = flows(lab, [(source, target)], seconds)
            errors.append(abs(lab.bytes(segment) / total - 1))
        curves[name] = samples
        figures[f"rate_{name}"] = steady(samples, seconds) / declared
        if latency is not None:
            figures[f"latency_{name.rpartition('_')[2]}"] = statistics.median(trips) / latency
            least.append(min(trips) / latency)
    figures["latency_least"] = min(least)
    with Lab(parse(CLUSTER, Cluster), limits=False) as lab:
        print("; ".join(lab.notes))
        pair, _, _ = flows(lab, [("s1", "m1"), ("s2", "f1")], 2 * seconds)
    curves["two flows: first"], curves["two flows: second"] = pair
    start, end = max(one[0][0] for one in pair) + seconds, min(one[-1][0] for one in pair)
    shares = [rate(one, start, end) / (50e6 / 8) for one in pair]
    figures |= {"shared_sum": sum(shares), "shared_least": min(shares) / sum(shares), "counter_error": max(errors)}
    figures["rate_most"] = max(value for name, value in figures.items() if name.startswith("rate_") or name == "shared_sum")
    return figures, curves


def shares() -> tuple[float, float]:
    """(smallest, largest) CPU share over declared of two machines that compute as hard as they can. The smallest is below
    one also when something else keeps this computer busy; a machine never gets more than its share."""
    with Lab(parse(CLUSTER, Cluster)) as lab:
        both = {machine: lab.run(machine, [sys.executable, "-S", "-c", SPIN, "2"], stdout=subprocess.PIPE, text=True)
                for machine in ("s1", "s2")}
        found = {machine: float(process.communicate()[0]) for machine, process in both.items()}
    kept = found["s1"] / 0.5, found["s2"] / 0.25
    return min(kept), max(kept)


def busy() -> float:
    """Median latency over declared of the 25 ms link while the other machines compute (1.75 cores of this computer)."""
    with Lab(parse(CLUSTER, Cluster)) as lab:
        for machine in ("s2", "f1", "n1", "n2"):
            lab.run(machine, [sys.executable, "-S", "-c", SPIN, "30"], stdout=subprocess.DEVNULL)
        _, trips, _ = flows(lab, [("s1", "m1")], 0.1)
    return statistics.median(trips) / 25e-3


def draw(figure: Figure, curves: dict[str, Samples]) -> None:
    panels = list(dict.fromkeys(name.partition(":")[0] for name in curves))
    axes = figure.subplots(1, len(panels))
    for name, samples in curves.items():
        axis, start = axes[panels.index(name.partition(":")[0])], samples[0][0]
        axis.plot([later[0] - start for later in samples[1:]],
                  [(later[1] - before[1]) * 8e-6 / (later[0] - before[0])
                   for before, later in pairwise(samples)], linewidth=1)
        axis.set_title(name.partition(":")[0], fontsize=8)
        axis.set_xlabel("s")
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
    axes[0].set_ylabel("arriving, Mbit/s")


def main() -> int:
    seconds = 3.0 if quick(__doc__ or "") else 12.0
    figures, curves = network(seconds)
    figures["cpu_share_least"], figures["cpu_share_most"] = shares()
    figures["latency_25ms_busy"] = busy()
    with Lab(parse(CLUSTER, Cluster), limits=False, relay="python") as lab:
        (samples,), _, _ = flows(lab, [("f1", "m1")], seconds)
        figures["python_relay_1gbit"] = steady(samples, seconds) / (1e9 / 8)
    return finish("lab", figures, GOALS, lambda figure: draw(figure, curves))


if __name__ == "__main__":
    sys.exit(main())
