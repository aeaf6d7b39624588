"""What this machine and its links can do, as measured, and the cluster document made of it; and what doctor finds."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from atoll import records
from atoll.cluster.catalogue import resolve
from atoll.cluster.cluster import Cluster
from atoll.cluster.network import Network, validate
from atoll.errors import WorkplaceError
from atoll.runtime import doctor, probe, probe_links
from atoll.runtime.doctor import examine
from atoll.runtime.probe import DeviceFacts, MachineFacts, decode_facts, encode_facts, machine_of, probe_disk, probe_machine
from atoll.runtime.probe_document import cluster_document, cluster_of, islands_of
from atoll.runtime.probe_links import LinkFacts, Server

MBIT = 10**6 // 8


def facts(name: str, kind: str = "NVIDIA GeForce RTX 3090", count: int = 1, port: int | None = None) -> MachineFacts:
    flops = {"float32": 33_333_333_333_333, "bfloat16": 65_555_555_555_555}
    device = DeviceFacts(name=kind, backend="cuda", count=count, memory_bytes=25_300_000_000, flops=flops,
                         memory_bytes_per_s=834_567_890_123)
    return MachineFacts(name=name, devices=(device,), cores=16, host_memory_bytes=64 << 30, disk_read_bytes_per_s=2_345_678_901,
                        disk_write_bytes_per_s=10**9, port_bytes_per_s=port)


def link(first: str, second: str, ms: float, forward: int, backward: int) -> LinkFacts:
    return LinkFacts(first=first, second=second, latency_ns=round(ms * 1e6), forward_bytes_per_s=forward * MBIT,
                     backward_bytes_per_s=backward * MBIT)


def test_this_machine_is_measured(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = probe_machine(budget_s=0.02, folder=tmp_path, disk_bytes=8 << 20)
    finally:
        torch.set_num_threads(threads)
    assert here.devices and here.host_memory_bytes > 2**28 and here.cores >= 1
    for device in here.devices:
        assert device.flops["float32"] > 10**8 and device.memory_bytes_per_s > 10**8
    assert (here.disk_read_bytes_per_s or 0) > 10**6 and (here.disk_write_bytes_per_s or 0) > 10**5
    assert list(tmp_path.iterdir()) == [], "the probe's file is removed"
    assert decode_facts(encode_facts(here)) == here
    document = records.parse(cluster_document([here]), Cluster)
    (machine,) = document.machines
    assert machine.name == here.name and machine.island in document.islands
    for device in machine.devices:
        assert resolve(device).flops["float32"] == device.flops["float32"]
    assert probe.sentences(here)[0].startswith(f"{here.name}: ")


def test_a_disk_that_cannot_be_written_is_said_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "devices_here", lambda: [])
    here = probe_machine("x", folder=tmp_path / "nowhere", disk_bytes=1 << 20)
    assert here.disk_read_bytes_per_s is None and "disk not measured" in here.notes[0]
    with pytest.raises(OSError, match="nowhere"):
        probe_disk(tmp_path / "nowhere")


def test_a_known_card_keeps_its_name_and_an_unknown_one_its_figures() -> None:
    known = machine_of(facts("a"), "site1").devices[0]
    assert known.kind == "RTX-3090" and known.flops["bfloat16"] == 65_600_000_000_000
    unknown = machine_of(facts("b", kind="Abacus (TM) 9000"), "site1").devices[0]
    assert unknown.kind == "Abacus-TM-9000" and resolve(unknown).flops["float32"] == 33_300_000_000_000


def test_fast_pairs_become_islands_and_the_rest_links() -> None:
    machines = [facts("a"), facts("b"), facts("c", port=1250 * 10**6), facts("d")]
    links = [link("a", "b", 0.2, 940, 930), link("a", "c", 25, 40, 210), link("b", "c", 26, 50, 190), link("d", "a", 9, 30, 20)]
    assert islands_of(["a", "b", "c", "d"], links) == [["a", "b"], ["c"], ["d"]]
    cluster, remarks = cluster_of(machines, links, {"c": "c.example.org:7700"})
    assert [machine.island for machine in cluster.machines] == ["site1", "site1", "site2", "site3"]
    assert cluster.islands["site1"].bandwidth == 935 * MBIT and cluster.islands["site1"].latency == 200_000
    first, second = cluster.links
    assert first.between == ("site1", "site2") and first.latency == 25_500_000
    assert (first.bandwidth, first.bandwidth_back) == (50 * MBIT, 210 * MBIT), "the fastest pair in each direction"
    assert second.between == ("site1", "site3") and (second.bandwidth, second.bandwidth_back) == (20 * MBIT, 30 * MBIT)
    assert "2 pairs" in remarks["links[0]"] and "not measured" in remarks["islands.site2"]
    assert cluster.islands["site2"].bandwidth == 1250 * 10**6


def test_the_document_is_valid_and_says_what_it_assumed() -> None:
    machines = [facts("a"), facts("b", count=2)]
    text = cluster_document(machines, [link("a", "b", 30, 20, 100)], {"b": "b.example.org:7700"},
                            failed=["b could not measure c: no"])
    cluster = records.parse(text, Cluster)
    validate(cluster)
    assert Network(cluster).path("a", "b:1").latency_ns == 30_000_000
    assert Network(cluster).capacity["site2>site1"] == 100 * MBIT
    assert "# not measured: b could not measure c: no" in text and "# not measured: assumed" in text
    assert cluster.machines[1].address == "b.example.org:7700" and cluster.machines[0].address is None


@pytest.fixture
def served() -> Iterator[Server]:
    with Server(facts("away"), port=0, token="secret", host="127.0.0.1") as server:
        yield server


def test_a_link_is_measured_both_ways(served: Server) -> None:
    found, links, failed = probe_links.probe_links(facts("here"), [f"127.0.0.1:{served.port}"], "secret", seconds=0.1)
    assert found == [facts("away")] and failed == []
    (only,) = links
    assert (only.first, only.second) == ("here", "away") and only.latency_ns > 0
    assert min(only.forward_bytes_per_s, only.backward_bytes_per_s) > MBIT


def test_peers_measure_each_other(served: Server) -> None:
    with Server(facts("third"), port=0, token="secret", host="127.0.0.1") as third:
        peers = [f"127.0.0.1:{served.port}", f"127.0.0.1:{third.port}"]
        _, links, failed = probe_links.probe_links(facts("here"), peers, "secret", seconds=0.05)
    assert failed == []
    assert [(one.first, one.second) for one in links] == [("here", "away"), ("here", "third"), ("away", "third")]


def test_a_pair_that_cannot_be_measured_is_named(served: Server) -> None:
    with Server(facts("third"), port=0, token="another", host="127.0.0.1") as third:
        answer = served._measure_other(f"127.0.0.1:{third.port}", 0.05)
    assert "refused the token" in answer["error"]


def test_a_wrong_token_is_refused_and_nothing_is_told(served: Server) -> None:
    with pytest.raises(WorkplaceError, match="refused the token"):
        probe_links.probe_links(facts("here"), [f"127.0.0.1:{served.port}"], "guess", seconds=0.05)


def test_an_impostor_is_not_believed() -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            wire = probe_links._Wire(connection)
            wire.send(b"atoll-probe-1" + bytes(16))
            wire.receive()
            wire.send(bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WorkplaceError, match="does not know the token"):
            probe_links.probe_links(facts("here"), [f"127.0.0.1:{listener.getsockname()[1]}"], "secret")
        thread.join()


def test_two_machines_of_one_name_are_refused(served: Server) -> None:
    with pytest.raises(WorkplaceError, match=r"two machines call themselves 'away'; .*--name"):
        probe_links.probe_links(facts("away"), [f"127.0.0.1:{served.port}"], "secret", seconds=0.05)


def test_bad_peers_and_ports_are_one_sentence(served: Server) -> None:
    with pytest.raises(WorkplaceError, match="expected host:port"):
        probe_links.probe_links(facts("here"), ["nowhere"], "secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    with pytest.raises(WorkplaceError, match=r"cannot be reached: .*; run atoll probe --serve there"):
        probe_links.probe_links(facts("here"), [f"127.0.0.1:{free}"], "secret")
    with pytest.raises(WorkplaceError, match=rf"port {served.port} cannot be listened on: .*; give another with --port"):
        Server(facts("x"), port=served.port, host="127.0.0.1")


def test_the_rate_is_that_of_the_last_part_of_a_stream() -> None:
    near, far = socket.socketpair()
    with near, far:
        near_wire, far_wire = probe_links._Wire.__new__(probe_links._Wire), probe_links._Wire.__new__(probe_links._Wire)
        near_wire.socket, far_wire.socket = near, far
        giver = threading.Thread(target=probe_links._give, args=(near_wire, 0.05))
        giver.start()
        assert probe_links._take(far_wire) > 0
        giver.join()
        near.close()
        with pytest.raises(ConnectionError, match="hung up"):
            probe_links._take(far_wire)


def test_doctor_examines_without_raising_and_says_what_to_do(tmp_path: Path) -> None:
    found = examine(folder=tmp_path, lab=lambda: "the lab needs root; run it with sudo")
    whats = [finding.what for finding in found]
    for needed in ("python", "torch", "memory", "disk", "clock", "ports", "lab"):
        assert any(what.startswith(needed) for what in whats), f"{needed} missing in {whats}"
    assert {finding.level for finding in found} <= {"good", "hint", "problem"}
    assert all(finding.remedy for finding in found if finding.level != "good")
    lab = next(finding for finding in found if finding.what == "lab")
    assert lab.level == "hint" and "needs root" in lab.found


@pytest.mark.parametrize(("found", "level"), [("bbr", "good"), ("cubic", "hint")])
def test_doctor_says_how_tcp_is_paced(tmp_path: Path, found: str, level: str) -> None:
    (tmp_path / "setting").write_text(f"{found}\n")
    (finding,) = doctor._network(tmp_path / "setting")
    assert finding.level == level and found in finding.found
    assert doctor._network(tmp_path / "none") == [], "not Linux: nothing to say"


def test_doctor_survives_a_broken_examination(tmp_path: Path) -> None:
    def broken() -> str | None:
        raise RuntimeError("surprise")

    finding = next(finding for finding in examine(folder=tmp_path / "missing", lab=broken) if finding.what == "lab")
    assert finding.level == "problem" and "surprise" in finding.found


def test_doctor_sees_a_taken_port() -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        finding = next(finding for finding in examine(ports=(port,)) if finding.what == "ports")
    assert finding.level == "problem" and str(port) in finding.found and "another port" in finding.remedy
