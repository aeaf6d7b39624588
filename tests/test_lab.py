"""The lab: what it builds (as data, anywhere), and what passes through it (as root).

No test here asks for a speed: a busy computer may be slower than the links. They ask for what no computer may do: bytes
faster than the rate, packets earlier than the latency, cycles beyond the share, memory beyond the cap.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import records
from atoll.cluster.cluster import Cluster
from atoll.cluster.network import Network, load_cluster
from atoll.errors import LabError
from atoll.lab import kernel, limits
from atoll.lab.command import run_everywhere
from atoll.lab.lab import Lab, obstacle, sweep
from atoll.lab.topology import CORE, Layout, lay_out

WHY_NOT = obstacle()
needs_lab = pytest.mark.skipif(WHY_NOT is not None, reason=f"no lab here: {WHY_NOT}")
ROOT = Path(__file__).parents[1] / "examples"
EXAMPLES = [*sorted((ROOT / "clusters").glob("*.yaml")), ROOT / "demo" / "cluster.yaml"]

TEXT = """
name: test
islands: {reef: {bandwidth: 200 Mbit/s, latency: 100 us}, lagoon: {bandwidth: 1 Gbit/s}}
machines:
  - {name: a1, island: reef, devices: [{kind: cpu-core, speed: 0.4, memory: 300 MiB}]}
  - {name: a2, island: reef, devices: [{kind: cpu-core, speed: 1.0, memory: 1 GiB}]}
  - {name: b1, island: lagoon, devices: [{kind: cpu-core, speed: 1.0, memory: 1 GiB}]}
links: [{between: [reef, lagoon], bandwidth: 40 Mbit/s, bandwidth_back: 20 Mbit/s, latency: 20 ms}]
segments: [{name: dsl, machines: [a1, a2], up: 30 Mbit/s, down: 100 Mbit/s}]
emulation: {cpu_share: 0.5}
"""
CABLES = """
  - {between: [a1, b1], bandwidth: 10 Mbit/s, latency: 3 ms}
  - {between: [a2, lagoon], bandwidth: 10 Mbit/s, latency: 4 ms}
  - {between: [a1, a2], bandwidth: 500 Mbit/s, latency: 1 ms}
  - {between: [b1, b1], bandwidth: 10 Gbit/s}
"""
SERVER = """
import socket, sys
server = socket.create_server(("0.0.0.0", 5000))
print("up", flush=True)
while True:
    peer, _ = server.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    total = 0
    while data := peer.recv(1 << 20):
        total += len(data)
        if total <= 5:
            peer.sendall(data)
    peer.sendall(b"%20d" % total)
    peer.close()
"""
CLIENT = """
import json, socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(5):
    start = time.perf_counter(); peer.sendall(b"x"); peer.recv(1); trips.append(time.perf_counter() - start)
start = time.perf_counter()
peer.sendall(bytes(int(sys.argv[2]))); peer.shutdown(1)
received = int(peer.recv(100))
print(json.dumps({"trip": min(trips), "seconds": time.perf_counter() - start, "received": received}))
"""


def parse(text: str = TEXT) -> Cluster:
    return records.parse(text, Cluster)


def with_cables() -> Cluster:
    return parse(TEXT.replace("links: [{", "links:\n  - {").replace("latency: 20 ms}]", "latency: 20 ms}" + CABLES))


def walk(layout: Layout, source: str, target: str) -> tuple[str, ...]:
    """The directed segments that a packet passes, by following devices and rules as the kernel would."""
    address = layout.addresses[target]
    leave = {(end.namespace, end.device): (name, other) for cable in layout.cables
             for end, name, other in ((cable.first, cable.forward, cable.second), (cable.second, cable.backward, cable.first))}
    device = next((device for machine, to, device in layout.routes if (machine, to) == (source, address)), "eth0")
    where, passed = source, list[str]()
    while True:
        name, end = leave[where, device]
        passed.append(name)
        where = end.namespace
        if where == target:
            return tuple(passed)
        assert where == CORE and len(passed) < 20
        rules = [rule for rule in layout.rules if rule.came_in == end.device and rule.target == address]
        own = [rule for rule in rules if rule.source == layout.addresses[source]]
        (rule,) = own or [rule for rule in rules if rule.source is None]
        device = rule.leaves


@pytest.mark.parametrize("cluster", [*map(load_cluster, EXAMPLES), parse(), with_cables()],
                         ids=[*(path.stem for path in EXAMPLES), "small", "cables"])
def test_packets_will_take_the_way_that_the_network_says(cluster: Cluster) -> None:
    network = Network(cluster)
    layout = lay_out(network)
    for source in network.machines:
        for target in network.machines:
            if source != target:
                assert walk(layout, source, target) == network.machine_path(source, target).segments
    for cable in layout.cables:
        assert cable.forward_bytes_per_s == network.capacity[cable.forward]
        assert cable.backward_ns == network.latency_ns[cable.backward]
    devices = [(end.namespace, end.device) for cable in layout.cables for end in (cable.first, cable.second)]
    assert len(set(devices)) == len(devices) and all(len(device) <= 15 for _, device in devices)
    assert len(set(layout.addresses.values())) == len(layout.machines)


def test_machines_without_a_way_between_are_named_and_not_joined() -> None:
    layout = lay_out(Network(parse(TEXT.replace("links: [{between: [reef", "links: [] # [{between: [reef"))))
    assert set(layout.apart) == {("a1", "b1"), ("a2", "b1"), ("b1", "a1"), ("b1", "a2")}


def test_the_queue_holds_a_round_trip_and_lets_two_frames_pass() -> None:
    burst, limit = kernel.queue(6_250_000, 25_000_000)
    assert burst == 2 * (kernel.MTU + 18) and limit == 625_000
    assert kernel.queue(1_250_000_000, 0)[0] == 1_250_000


def test_shares_and_caps_follow_the_document() -> None:
    cluster = parse()
    assert [limits.cores(cluster, machine) for machine in cluster.machines] == [0.2, 0.5, 0.5]
    assert [limits.memory_bytes(machine) for machine in cluster.machines] == [300 * 2**20, 2**30, 2**30]
    real = load_cluster(ROOT / "clusters" / "home-and-lab.yaml")
    assert limits.cores(real, real.machines[0]) is None and limits.memory_bytes(real.machines[0]) == 64 * 2**30


def test_without_root_it_is_refused_with_what_happens_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"needs root .* found user 1000; run it with sudo; .*shaped inside its processes"), \
            Lab(parse()):
        pass


def test_latency_that_cannot_be_built_is_refused() -> None:
    slow = TEXT.replace("links: [", "links: [{between: [a1, a1], bandwidth: 1 Gbit/s, latency: 2 ms}, ")
    with pytest.raises(LabError, match="the link of a1 with itself has a latency of 2 ms"):
        Lab(parse(slow))


@pytest.fixture(params=["c", "python"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    if request.param == "c" and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler here: the Python relay is tested alone")
    with Lab(with_cables() if request.param == "c" else parse(), relay=request.param) as made:
        yield made


def serve(lab: Lab, machine: str) -> None:
    server = lab.run(machine, [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None and server.stdout.readline() == "up\n"


def transfer(lab: Lab, source: str, target: str, size: int) -> dict[str, float]:
    import json

    client = lab.run(source, [sys.executable, "-c", CLIENT, lab.address(target), str(size)], stdout=subprocess.PIPE, text=True)
    return dict(json.loads(client.communicate(timeout=60)[0]))


@needs_lab
@pytest.mark.wire
def test_bytes_pass_no_faster_and_no_earlier_than_declared_and_every_segment_counts_them(lab: Lab) -> None:
    size = 600_000
    serve(lab, "a2")
    serve(lab, "b1")
    for source, target in (("a1", "a2"), ("a1", "b1"), ("a2", "b1"), ("b1", "a2")):
        path = lab.network.machine_path(source, target)
        back = lab.network.machine_path(target, source)
        before = {name: lab.bytes(name) for name in lab.network.capacity}
        result = transfer(lab, source, target, size)
        assert result["received"] == size + 5
        held = sum(ns for name in (*path.segments, *back.segments) if (ns := lab.network.latency_ns[name]) > 125_000)
        assert result["trip"] * 1e9 >= held, "a round trip is never faster than the latency both ways"
        rate = min(lab.network.capacity[name] for name in path.segments)
        burst = kernel.queue(rate, 0)[0]
        assert result["seconds"] >= (size - burst) / rate, "bytes are never faster than the narrowest segment"
        for name in path.segments:
            assert size <= lab.bytes(name) - before[name] <= 1.06 * size + 20_000, name
        for name in set(lab.network.capacity) - {*path.segments, *back.segments}:
            assert lab.bytes(name) == before[name], f"{name} is not on the way"


@needs_lab
@pytest.mark.wire
def test_two_machines_share_an_uplink() -> None:
    with Lab(parse(), limits=False) as lab:
        serve(lab, "b1")
        size = 1_000_000
        argv = [sys.executable, "-c", CLIENT, lab.address("b1"), str(size)]
        start = time.monotonic()
        both = [lab.run(machine, argv, stdout=subprocess.DEVNULL) for machine in ("a1", "a2")]
        assert [process.wait(60) for process in both] == [0, 0]
        lasted = time.monotonic() - start
        rate = lab.network.capacity["dsl:up"]
        assert lasted >= (2 * size - kernel.queue(rate, 0)[0]) / rate
        assert lab.bytes("dsl:up") >= 2 * size and lab.bytes("a1>reef") >= size and lab.bytes("a2>reef") >= size


@needs_lab
@pytest.mark.wire
def test_a_machine_keeps_to_its_share_and_its_memory() -> None:
    spin = ("import time\nstart, before = time.monotonic(), time.process_time()\nwhile time.monotonic() - start < 0.6: pass\n"
            "print((time.process_time() - before) / (time.monotonic() - start))")
    with Lab(parse()) as lab:
        assert [machine.devices[0].speed for machine in lab.addressed().machines] == [0.2, 0.5, 0.5], "shares of a core"
        slow = lab.run("a1", [sys.executable, "-S", "-c", spin], stdout=subprocess.PIPE, text=True)
        assert float(slow.communicate(timeout=60)[0]) <= 0.2 * 1.15, "cores = speed 0.4 x cpu_share 0.5"
        grow = "x = bytearray(600 << 20); x[::4096] = bytes(len(x) // 4096); print(len(x))"
        assert lab.run("a1", [sys.executable, "-c", grow], stdout=subprocess.DEVNULL).wait(60) == -signal.SIGKILL
        assert lab.run("a2", [sys.executable, "-c", grow], stdout=subprocess.DEVNULL).wait(60) == 0


@needs_lab
@pytest.mark.wire
def test_two_labs_stand_beside_each_other_and_nothing_is_left() -> None:
    with Lab(parse()) as first, Lab(parse()) as second:
        serve(first, "a2")
        serve(second, "a2")
        assert first.address("a2") == second.address("a2") and first.name != second.name
        assert transfer(first, "a1", "a2", 1000)["received"] == 1005
        assert first.bytes("a1>reef") > 1000 and second.bytes("a1>reef") < 1000
        names = first.name, second.name
        stubborn = first.run("b1", ["sh", "-c", "trap '' TERM; sleep 1000 & while true; do sleep 1; done"])
    assert stubborn.poll() is not None
    for name in names:
        assert kernel.namespaces(name) == [] and limits.remnants(name) == []


@needs_lab
@pytest.mark.wire
def test_what_a_killed_lab_left_is_swept_and_a_living_one_is_not() -> None:
    program = textwrap.dedent("""
        import sys, time
        from atoll.cluster.network import load_cluster
        from atoll.lab.lab import Lab
        with Lab(load_cluster(sys.argv[1])) as lab:
            print(lab.name, lab.run("coral", ["sleep", "1000"]).pid, flush=True)
            time.sleep(1000)
    """)
    owner = subprocess.Popen([sys.executable, "-c", program, str(EXAMPLES[-1])], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name, orphan = owner.stdout.readline().split()
    assert name not in sweep() and len(kernel.namespaces(name)) == 5
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 20
    while (kernel.namespaces(name) or limits.remnants(name)) and time.monotonic() < deadline:
        sweep()  # the start of another lab may be at it, or have done it, already
        time.sleep(0.05)
    assert kernel.namespaces(name) == [] and limits.remnants(name) == []
    stat = Path(f"/proc/{orphan}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX", "the orphan has been ended"


@needs_lab
@pytest.mark.wire
def test_unknown_names_are_refused_with_near_ones() -> None:
    with Lab(parse(), limits=False) as lab:
        with pytest.raises(LabError, match=r"no machine 'a3'; did you mean 'a2' or 'a1'"):
            lab.run("a3", ["true"])
        with pytest.raises(LabError, match=r"no segment 'a1>lagoon'; did you mean"):
            lab.bytes("a1>lagoon")
        document = lab.addressed(7711)
        assert document.emulation is None, "the lab is the emulation; nobody slows itself down once more"
        assert [machine.address for machine in document.machines] == ["10.77.0.2:7711", "10.77.0.3:7711", "10.77.0.4:7711"]
        assert document.emulation is None and all(machine.devices[0].speed == 1.0 for machine in document.machines)


@needs_lab
@pytest.mark.wire
def test_a_command_runs_once_on_every_machine() -> None:
    program = """
        import os, socket, sys, time
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        print("I am", os.environ["ATOLL_MACHINE"], sys.argv[1:], world)
        if rank == 0:
            server = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            for _ in range(world - 1):
                server.accept()[0].sendall(b"x")
        else:
            for _ in range(400):
                try:
                    peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
                    break
                except OSError:
                    time.sleep(0.05)
            assert peer.recv(1) == b"x"
    """
    out = io.StringIO()
    argv = [sys.executable, "-c", textwrap.dedent(program), "{machine}-{rank}", "{address}", "{head}"]
    assert run_everywhere(parse(), argv, out=out) == 0, out.getvalue()
    lines = out.getvalue().splitlines()
    assert "a2 | I am a2 ['a2-1', '10.77.0.3', '10.77.0.2'] 3" in lines
    assert any(line.startswith("lab: dsl:down: ") for line in lines), "b1 calls a1 from outside"


@needs_lab
@pytest.mark.wire
def test_the_first_failure_decides_and_ends_the_others() -> None:
    out = io.StringIO()
    code = run_everywhere(parse(), ["sh", "-c", 'if [ $ATOLL_RANK = 1 ]; then echo going; exit 7; fi; sleep 1000'], out=out)
    assert code == 7
    assert "a2 | going" in out.getvalue()
    assert "lab: the command on a2 ended with exit code 7; ending the others" in out.getvalue()
