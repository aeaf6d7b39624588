"""The way a message takes, what a cluster may not be, and what the catalogue says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import records
from atoll.cluster import catalogue
from atoll.cluster.cluster import Cluster, Device
from atoll.cluster.network import LOCAL_MESSAGE_NS, MESSAGE_NS, Network, load_cluster, validate, workers
from atoll.errors import ClusterError, DocumentError

ROOT = Path(__file__).parents[1] / "examples"
EXAMPLES = [*sorted((ROOT / "clusters").glob("*.yaml")), ROOT / "demo" / "cluster.yaml"]

BASE = """
name: test
islands:
  reef: {bandwidth: 1 Gbit/s, latency: 201 ns}
  lagoon: {bandwidth: 10 Gbit/s}
  atoll: {bandwidth: 2 Gbit/s}
machines:
  - {name: a1, island: reef, devices: [{kind: cpu-core}]}
  - {name: a2, island: reef, devices: [{kind: T4, count: 2}, {kind: L4}]}
  - {name: b1, island: lagoon, devices: [{kind: cpu-core}]}
  - {name: b2, island: lagoon, devices: [{kind: cpu-core}]}
  - {name: c1, island: atoll, devices: [{kind: cpu-core}]}
links:
  - {between: [reef, lagoon], bandwidth: 80 Mbit/s, bandwidth_back: 40 Mbit/s, latency: 25 ms}
  - {between: [lagoon, atoll], bandwidth: 100 Mbit/s, latency: 5 ms}
"""


def cluster(text: str = BASE, *, change: tuple[str, str] = ("", ""), more: str = "") -> Cluster:
    assert change[0] in text
    return records.parse(text.replace(*change) + more, Cluster, source="cluster.yaml")


def test_a_machine_with_several_devices_is_several_workers() -> None:
    found = workers(cluster())
    assert [worker.name for worker in found] == ["a1", "a2:0", "a2:1", "a2:2", "b1", "b2", "c1"]
    assert [worker.device.kind for worker in found[1:4]] == ["T4", "T4", "L4"]
    assert all(worker.device.count == 1 for worker in found)


def test_paths_inside_and_between_islands() -> None:
    network = Network(cluster())
    assert network.path("a2:0", "a2:2").segments == ()
    assert network.path("a2:0", "a2:2").message_ns == LOCAL_MESSAGE_NS
    inside = network.path("a1", "a2:1")
    assert inside.segments == ("a1>reef", "reef>a2") and inside.latency_ns == 201 and inside.message_ns == MESSAGE_NS
    across = network.path("a1", "b2")
    assert across.segments == ("a1>reef", "reef>lagoon", "lagoon>b2") and across.latency_ns == 25_000_100
    assert network.path("b2", "a1").latency_ns == 25_000_101
    assert network.capacity["reef>lagoon"] == 10_000_000 and network.capacity["lagoon>reef"] == 5_000_000
    assert network.capacity["a1>reef"] == network.capacity["reef>a1"] == 125_000_000
    assert network.island("a2:1") == "reef"


def test_without_a_direct_link_the_way_with_the_smallest_latency_is_taken() -> None:
    network = Network(cluster())
    assert network.path("a1", "c1").segments == ("a1>reef", "reef>lagoon", "lagoon>atoll", "atoll>c1")
    slow = Network(cluster(more="  - {between: [reef, atoll], bandwidth: 1 Mbit/s, latency: 900 ms}\n"))
    assert slow.path("a1", "c1").segments == ("a1>reef", "reef>atoll", "atoll>c1"), "a direct link is taken first"
    assert slow.path("c1", "b1").segments == ("c1>atoll", "atoll>lagoon", "lagoon>b1")


def test_links_of_machines_come_before_links_of_islands() -> None:
    network = Network(cluster(more="""
  - {between: [a1, a2], bandwidth: 40 Gbit/s, latency: 1 us}
  - {between: [a1, lagoon], bandwidth: 200 Mbit/s, latency: 9 ms}
  - {between: [a1, b1], bandwidth: 300 Mbit/s, latency: 8 ms}
  - {between: [a2, a2], bandwidth: 16 GB/s}
"""))
    assert network.path("a1", "a2:0").segments == ("a1>a2",), "a cable inside an island uses no ports"
    assert network.path("a1", "b1").segments == ("a1>reef", "a1>b1", "lagoon>b1")
    assert network.path("b2", "a1").segments == ("b2>lagoon", "lagoon>a1", "reef>a1")
    assert network.path("a2:0", "b2").segments == ("a2>reef", "reef>lagoon", "lagoon>b2")
    assert network.path("a2:0", "a2:1").segments == ("a2>a2",)


def test_a_shared_segment_is_crossed_on_leaving_and_on_coming_home_only() -> None:
    network = Network(cluster(more="""
segments:
  - {name: dsl, machines: [a1, a2], up: 10 Mbit/s, down: 100 Mbit/s, latency: 7 ms}
  - {name: gate, machines: [b1], up: 1 Gbit/s, down: 1 Gbit/s}
"""))
    assert network.path("a1", "a2:0").segments == ("a1>reef", "reef>a2")
    there = network.path("a1", "b1")
    assert there.segments == ("a1>reef", "dsl:up", "reef>lagoon", "gate:down", "lagoon>b1")
    assert there.latency_ns == 32_000_100
    assert network.path("b1", "a1").segments == ("b1>lagoon", "gate:up", "lagoon>reef", "dsl:down", "reef>a1")
    assert network.capacity["dsl:up"] == 1_250_000 and network.capacity["dsl:down"] == 12_500_000


def test_islands_that_are_not_joined_are_named() -> None:
    network = Network(cluster(change=("  - {between: [lagoon, atoll], bandwidth: 100 Mbit/s, latency: 5 ms}\n", "")))
    with pytest.raises(ClusterError, match=r"'reef' \(machine a1\) with island 'atoll' \(machine c1\)"):
        network.path("a1", "c1")
    with pytest.raises(ClusterError, match=r"no worker 'a2'; did you mean .*'a2:0'"):
        network.path("a2", "c1")


def test_machines_do_not_forward() -> None:
    text = BASE.replace("between: [reef, lagoon]", "between: [b1, reef]")
    network = Network(cluster(text))
    assert network.path("b1", "a1").segments == ("b1>lagoon", "b1>reef", "reef>a1")
    with pytest.raises(ClusterError, match="no link joins"):
        network.path("b2", "a1")


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 50)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_routes_are_the_shortest_of_all(edges: list[tuple[int, int, int]]) -> None:
    """Against Floyd-Warshall: every pair of islands is reached at the smallest latency, unless a direct link exists."""
    links = {frozenset((first, second)): latency for first, second, latency in edges if first != second}
    text = "islands: {" + ", ".join(f"i{i}: {{bandwidth: 1 Gbit/s}}" for i in range(5)) + "}\nmachines:\n"
    text += "".join(f"  - {{name: m{i}, island: i{i}, devices: [{{kind: cpu-core}}]}}\n" for i in range(5))
    rows = [f"  - {{between: [i{min(pair)}, i{max(pair)}], bandwidth: 1 Gbit/s, latency: {latency} ms}}\n"
            for pair, latency in links.items()]
    network = Network(cluster(text, more=("links:\n" + "".join(rows)) if rows else ""))
    far = float("inf")
    best = {(i, j): 0 if i == j else links.get(frozenset((i, j)), far) for i in range(5) for j in range(5)}
    for k in range(5):
        for i in range(5):
            for j in range(5):
                best[i, j] = min(best[i, j], best[i, k] + best[k, j])
    for (i, j), latency in best.items():
        if i == j:
            continue
        if latency == far:
            with pytest.raises(ClusterError):
                network.path(f"m{i}", f"m{j}")
        else:
            expected = links.get(frozenset((i, j)), latency)
            assert network.path(f"m{i}", f"m{j}").latency_ns == expected * 10**6


@pytest.mark.parametrize(("change", "message"), [
    (("name: a2", "name: a1"), r"machines\[1\].name: 'a1' is already the name of machine 0"),
    (("name: a2", "name: reef"), r"'reef' is already the name of an island"),
    (("name: a2", "name: 'a 2'"), r"letters, digits"),
    (("b2, island: lagoon", "b2, island: lagon"),
     r"machines\[3\] \(b2\).island: there is no island 'lagon'; did you mean 'lagoon'"),
    (("[reef, lagoon]", "[reef, lagun]"), r"links\[0\].between: there is no island or machine 'lagun'; did you mean 'lagoon'"),
    (("[reef, lagoon]", "[reef, reef]"), r"joins island 'reef' with itself"),
    (("[reef, lagoon]", "[reef, a1]"), r"is the other's island"),
    (("[lagoon, atoll]", "[lagoon, reef]"), r"already joined by links\[0\]"),
    (("80 Mbit/s", "0 bit/s"), r"links\[0\].bandwidth: found 0"),
    (("40 Mbit/s", "0 bit/s"), r"links\[0\].bandwidth_back: found 0"),
    (("10 Gbit/s", "0 bit/s"), r"islands.lagoon.bandwidth: found 0"),
    (("kind: T4, count: 2", "kind: T4, count: 0"), r"devices\[0\].count: found 0"),
    (("kind: T4", "kind: T4, speed: 0"), r"devices\[0\].speed"),
    (("kind: T4", "kind: T4, efficiency: 1.5"), r"efficiency: found 1.5"),
    (("kind: T4", "kind: T4, memory: 0 GiB"), r"memory: found 0"),
    (("kind: T4", "kind: T4, flops: {bf61: 1 TFLOP/s}"), r"unknown dtype 'bf61'"),
    (("kind: L4", "kind: L44"),
     r"machines\[1\] \(a2\).devices\[1\]: device kind 'L44' is not in the catalogue; did you mean .*L4"),
    (("name: b1,", "name: b1, address: nowhere,"), r"address: found 'nowhere', expected 'host:port'"),
])
def test_what_cannot_exist_is_refused_in_one_sentence(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        validate(cluster(change=change), source="cluster.yaml")
    assert str(caught.value).startswith("cluster.yaml: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(("segments", "message"), [
    ("{name: dsl, machines: [a1, a9], up: 1 Mbit/s, down: 1 Mbit/s}", r"there is no machine 'a9'; did you mean 'a2' or 'a1'"),
    ("{name: dsl, machines: [], up: 1 Mbit/s, down: 1 Mbit/s}", "no machine uses the segment"),
    ("{name: dsl, machines: [a1, a1], up: 1 Mbit/s, down: 1 Mbit/s}", "listed twice"),
    ("{name: dsl, machines: [a1], up: 0, down: 1 Mbit/s}", r"up: found 0"),
    ("{name: a1, machines: [a1], up: 1, down: 1 Mbit/s}", r"already the name of machine 0"),
])
def test_impossible_segments_are_refused(segments: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        validate(cluster(more=f"segments: [{segments}]\n"))


def test_a_wrong_document_names_file_and_place(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(BASE.replace("island: atoll", "iland: atoll"))
    with pytest.raises(DocumentError, match=r"cluster.yaml: machines\[4\]: unknown field 'iland'; did you mean 'island'"):
        load_cluster(path)
    path.write_text(BASE.replace("80 Mbit/s", "80 Mbits"))
    with pytest.raises(DocumentError, match=r"'80 Mbits', expected a bandwidth"):
        load_cluster(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_stand_and_every_worker_reaches_every_other(path: Path) -> None:
    network = Network(load_cluster(path))
    for source in network.workers:
        for target in network.workers:
            for segment in network.path(source, target).segments:
                assert network.capacity[segment] > 0
    if path.stem == "unlike-64":
        assert len(network.workers) == 64
        assert len({worker.device.kind for worker in network.workers.values()}) >= 9


def test_the_demo_fits_two_cores() -> None:
    demo = load_cluster(EXAMPLES[-1])
    assert demo.emulation is not None
    assert sum(worker.device.speed for worker in workers(demo)) * demo.emulation.cpu_share <= 1.8


def test_every_entry_of_the_catalogue_is_whole() -> None:
    plain: dict[str, str] = {}
    for name, entry in catalogue.DEVICES.items():
        full = catalogue.resolve(Device(kind=name))
        assert all(getattr(full, field) is not None for field in Device.__struct_fields__), name
        assert full.flops["float32"] <= full.flops.get("tfloat32", full.flops["float32"]), name
        assert entry.source and 0 < entry.efficiency < 1 and entry.memory_gib >= 3, name
        for alias in (name, *entry.aliases):
            assert catalogue.find(alias) == name, f"{alias} means {catalogue.find(alias)} before {name}"
            plain[alias] = name
    needed = ["V100", "T4", "A10", "A40", "A100-40", "A100-80", "L4", "L40S", "H100", "H200", "RTX 2080 Ti", "RTX 3060",
              "RTX 3080", "RTX 3090", "RTX 4090", "RTX 5090", "MI250", "MI300X", "M1", "M2", "M3", "M4", "cpu-core"]
    assert [kind for kind in needed if catalogue.find(kind) is None] == []


def test_names_of_drivers_are_understood() -> None:
    assert catalogue.find("NVIDIA GeForce RTX 3090") == "RTX-3090"
    assert catalogue.find("NVIDIA A100-SXM4-80GB") == "A100-80"
    assert catalogue.find("NVIDIA H100 80GB HBM3") == "H100-SXM"
    assert catalogue.find("Tesla T4") == "T4"
    assert catalogue.find("Apple M3 Max") == "M3-Max"
    assert catalogue.find("abacus") is None


def test_what_the_document_gives_overrides_the_catalogue() -> None:
    device = records.from_plain({"kind": "rtx 3090", "flops": {"bf16": "50 TFLOP/s"}, "watts": 280.0, "speed": 0.5}, Device)
    full = catalogue.resolve(device)
    assert full.flops["bfloat16"] == 50 * 10**12 and full.flops["float16"] == 71_200_000_000_000 and full.watts == 280
    assert full.memory == 24 * 2**30
    assert catalogue.peak(device, "bf16") == catalogue.peak(device, "bfloat16") == 25 * 10**12, "speed counts in the peak"
    assert catalogue.memory_rate(device) == 468 * 10**9


def test_an_unknown_kind_needs_its_own_figures() -> None:
    with pytest.raises(ClusterError, match="RTX-4090"):
        catalogue.resolve(Device(kind="RTX 4091"))
    plain = {"kind": "abacus", "flops": {"fp32": "3 GFLOP/s"}, "memory": "1 GiB", "memory_bandwidth": "1 GB/s"}
    device = records.from_plain(plain, Device)
    assert dict(catalogue.resolve(device).flops) == {"float32": 3 * 10**9}
    assert catalogue.peak(device, "bf16") == 3 * 10**9
    with pytest.raises(ClusterError, match="cannot compute in float64"):
        catalogue.peak(device, "fp64")
    with pytest.raises(ClusterError, match="cannot compute in float64"):
        catalogue.peak(Device(kind="M2"), "float64")
