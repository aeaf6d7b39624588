"""The head and its workers: who is judged lost, what everybody computes for himself, a run from its keys to its end."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster.cluster import Cluster
from atoll.errors import CheckpointError, DataError, DocumentError, ProgramError, WorkerLostError, WorkplaceError
from atoll.plan.job import Job
from atoll.plan.plan import Plan, ReplicaPlan, StagePlacement
from atoll.records import from_plain, parse
from atoll.runtime.checkpoint.shards import shard_chunks, write_shard
from atoll.runtime.control import (
    Assign,
    Done,
    Finish,
    FromWorker,
    Gone,
    Head,
    Hello,
    Measure,
    Member,
    Ready,
    Report,
    Start,
    Welcome,
)
from atoll.runtime.driver import RunResult, drive
from atoll.runtime.events import Began, Came, Evaluated, RunEvent, Saved, StepEnded, Waiting
from atoll.runtime.handover import Files, pieces, shard_header
from atoll.runtime.keys import make_run_keys, read_bundle
from atoll.runtime.liveness import (
    Accused,
    Broken,
    Exited,
    Failed,
    Finished,
    Joined,
    Liveness,
    LivenessEvent,
    Seen,
    head_silent,
    own_pause,
    timeouts,
)
from atoll.runtime.rendezvous import Rendezvous
from atoll.runtime.worker import Documents, Turn, agenda
from atoll.runtime.world import Stop, StoppedError
from atoll.trace.files import read_trace

SECOND = 10**9
LIGHT = (sys.executable, str(Path(__file__).with_name("light_worker.py")))


def job(steps: int = 5, max_pause: str = "10 s", **more: object) -> Job:
    plain = {"name": "light", "model": {"preset": "gpt2-small"}, "sequence_length": 8, "global_batch": 1, "steps": steps,
             "max_pause": max_pause}
    return from_plain(plain | more, Job)


def cluster(latency: str = "1 ms", addresses: dict[str, str] | None = None) -> Cluster:
    """a1 and a2 on one island, b1 on another; emulated unless addresses are given."""
    machines = [{"name": name, "island": name[0] * 2, "devices": [{"kind": "cpu-core"}],
                 **({"address": addresses[name]} if addresses and name in addresses else {})} for name in ("a1", "a2", "b1")]
    return from_plain({
        "name": "three", "islands": {"aa": {"bandwidth": "1 Gbit/s"}, "bb": {"bandwidth": "1 Gbit/s"}}, "machines": machines,
        "links": [{"between": ["aa", "bb"], "bandwidth": "100 Mbit/s", "latency": latency}],
        **({} if addresses else {"emulation": {}})}, Cluster)


def documents(folder: Path, wanted: Job, place: Cluster, data: object = None, workers: tuple[str, ...] = ("a1", "a2", "b1"),
              ) -> Documents:
    stages = tuple(StagePlacement(first="x", last="x", worker=worker, recompute=False) for worker in workers)
    plan = Plan(job="light", cluster="three", graph="none", schedule="1f1b", chunks=1, microbatch_samples=1, bucket_bytes=1,
                collective="ring", native=True, replicas=(ReplicaPlan(stages=stages, microbatches=1),))
    return Documents(job=wanted, cluster=place, plan=plan, program="light", head="a1", run=str(folder), base=".", data=data)


# -- decisions without clocks ------------------------------------------------------------------------------------------


def judged(events: list[LivenessEvent], now_s: float, max_pause_s: float = 10) -> tuple[str, str, str] | None:
    state = Liveness(times=timeouts(int(max_pause_s * SECOND)))
    for name in ("a1", "b1"):
        state = state.after(Joined(worker=name, at_ns=0, machine=name))
    for event in events:
        state = state.after(event)
    found = state.verdict(int(now_s * SECOND))
    return None if found is None else (found.worker, found.kind, found.sentence)


def seen(worker: str, at_s: float, doing: str = "") -> Seen:
    return Seen(worker=worker, at_ns=int(at_s * SECOND), doing=doing)


def test_a_healthy_run_has_no_verdict() -> None:
    assert judged([seen("a1", 9), seen("b1", 9)], 10) is None


def test_a_killed_process_is_named_with_what_it_was_doing() -> None:
    events = [seen("a1", 5), seen("b1", 5, "step 3, 2B3 on compute"), Broken(worker="b1", at_ns=5 * SECOND),
              Exited(worker="b1", at_ns=5 * SECOND, code=-9)]
    sentence = "machine b1 was killed (signal 9, SIGKILL) while doing step 3, 2B3 on compute"
    assert judged(events, 5.1) == ("b1", "killed", sentence)


def test_silence_is_a_freeze_only_after_its_time() -> None:
    events = [seen("b1", 1, "step 3, 2B3 on compute"), seen("a1", 7)]
    assert judged(events, 6.9) is None
    assert judged(events, 7.0) == ("b1", "frozen", "machine b1 is frozen or cut off: silent for 6 s while doing step 3, "
                                                   "2B3 on compute")


def test_a_broken_connection_waits_for_a_better_explanation() -> None:
    broken = [seen("a1", 5), seen("b1", 5), Broken(worker="b1", at_ns=5 * SECOND)]
    assert judged(broken, 5.9) is None
    found = judged(broken, 6.0)
    assert found is not None
    assert found[:2] == ("b1", "gone")
    found = judged([*broken, Exited(worker="b1", at_ns=6 * SECOND, code=3)], 6.0)
    assert found is not None
    assert found[1] == "ended"


def test_an_accusation_waits_until_the_accused_is_found_dead_or_well() -> None:
    accused = Accused(worker="a1", at_ns=5 * SECOND, text="a1 lost b1")
    assert judged([seen("a1", 5), seen("b1", 5), accused], 6) is None
    dead = judged([seen("b1", 5), accused, Exited(worker="b1", at_ns=6 * SECOND, code=-9)], 6)
    assert dead is not None
    assert dead[:2] == ("b1", "killed")
    assert judged([accused, seen("b1", 6), seen("a1", 6)], 6) == ("a1", "parted", "a1 lost b1")
    frozen = judged([seen("b1", 1), accused, seen("a1", 7)], 7.0)
    assert frozen is not None
    assert frozen[:2] == ("b1", "frozen")


def test_an_error_of_its_own_comes_before_the_trouble_it_makes() -> None:
    events = [Accused(worker="a1", at_ns=SECOND, text="a1 lost b1"), Failed(worker="b1", at_ns=2 * SECOND, text="disk full"),
              Broken(worker="b1", at_ns=2 * SECOND), Exited(worker="b1", at_ns=2 * SECOND, code=5), seen("a1", 3)]
    assert judged(events, 3) == ("b1", "failed", "machine b1 failed before its first step: disk full")


def test_who_has_finished_may_go() -> None:
    events = [Finished(worker="b1", at_ns=SECOND), Broken(worker="b1", at_ns=SECOND), Exited(worker="b1", at_ns=SECOND, code=0),
              seen("a1", 30)]
    assert judged(events, 30) is None


def test_a_process_that_ends_before_it_registers_is_noticed() -> None:
    state = Liveness(times=timeouts(10 * SECOND)).after(Exited(worker="c1", at_ns=0, code=1))
    found = state.verdict(0)
    assert found is not None
    assert found.sentence == "machine c1 ended unasked with exit code 1 before its first step"


@given(st.lists(st.sampled_from(["seen", "broken", "exited", "failed", "accused", "finished"]), max_size=12),
       st.integers(min_value=SECOND, max_value=600 * SECOND))
@settings(max_examples=200, deadline=None)
def test_whatever_happens_a_lost_worker_is_judged_within_max_pause(kinds: list[str], max_pause_ns: int) -> None:
    """After any events, b1 falls silent at time 0 while a1 lives on: there is a verdict, in time, and no finished worker is
    blamed; replaying the events gives the same one."""
    times = timeouts(max_pause_ns)
    makers: dict[str, Callable[[], LivenessEvent]] = {
        "seen": lambda: Seen(worker="b1", at_ns=0, doing="x"), "broken": lambda: Broken(worker="b1", at_ns=0),
        "exited": lambda: Exited(worker="b1", at_ns=0, code=1), "failed": lambda: Failed(worker="b1", at_ns=0, text="t"),
        "accused": lambda: Accused(worker="a1", at_ns=0, text="t"), "finished": lambda: Finished(worker="b1", at_ns=0)}
    events: list[LivenessEvent] = [Joined(worker=name, at_ns=0, machine=name) for name in ("a1", "b1")]
    events += [makers[kind]() for kind in kinds]
    last = times.silence_ns + times.heartbeat_ns
    events.append(Seen(worker="a1", at_ns=last, doing="y"))
    verdicts = []
    for _ in range(2):
        state = Liveness(times=times)
        for event in events:
            state = state.after(event)
        verdicts.append(state.verdict(last))
    assert verdicts[0] == verdicts[1]
    if "finished" in kinds:
        assert verdicts[0] is None or verdicts[0].worker != "b1"
    else:
        assert verdicts[0] is not None
    assert last + times.settle_ns + times.grace_ns <= max_pause_ns


def test_who_stood_still_himself_blames_nobody_for_it() -> None:
    times = timeouts(10 * SECOND)
    state = Liveness(times=times).after(Joined(worker="b1", at_ns=0, machine="b1"))
    assert own_pause(SECOND, SECOND + 2 * times.heartbeat_ns, times) == 0
    assert own_pause(0, 12 * SECOND, times) == 12 * SECOND
    assert state.verdict(12 * SECOND) is not None
    rested = state.excused(own_pause(0, 12 * SECOND, times))
    assert rested.verdict(17 * SECOND) is None
    assert rested.verdict(18 * SECOND) is not None  # and silence after that counts as ever


def test_a_pause_too_short_to_mean_anything_is_refused() -> None:
    with pytest.raises(DocumentError, match=r"job.max_pause: found 1 ms, expected at least 50 ms"):
        timeouts(1_000_000)


def test_a_silent_head_is_noticed_too() -> None:
    times = timeouts(10 * SECOND)
    assert head_silent(0, 5 * SECOND, times) is None
    assert head_silent(0, 6 * SECOND, times) == "the head is frozen or cut off: silent for 6 s"


def test_everybody_computes_the_same_agenda() -> None:
    wanted = job(5, evaluation={"every": 2}, checkpoint={"every": 3})
    turns = [(turn.kind[0], turn.step) for turn in agenda(wanted, 0)]
    assert turns == [("t", 0), ("t", 1), ("e", 2), ("t", 2), ("s", 3), ("t", 3), ("e", 4), ("t", 4), ("e", 5), ("s", 5)]
    assert list(agenda(wanted, 3)) == [Turn(kind={"t": "train", "e": "evaluate", "s": "save"}[kind], step=step)
                                       for kind, step in turns[5:]]
    assert [turn.kind for turn in agenda(job(1, data={"validation": 0}), 0)] == ["train", "save"]


# -- the control service -----------------------------------------------------------------------------------------------


class Service:
    """A head in this process, and members of it."""

    def __init__(self, folder: Path, max_pause_s: float = 10) -> None:
        self.events: queue.SimpleQueue[tuple[str, FromWorker, int]] = queue.SimpleQueue()
        self.times = timeouts(int(max_pause_s * SECOND))
        self.folder = folder
        paths = make_run_keys(folder / "keys", ["a1", "b1"], head="a1")
        self.bundles = {name: read_bundle(path) for name, path in paths.items()}
        offered = folder / "offered"
        offered.mkdir()
        self.head = Head(self.bundles["a1"], "127.0.0.1:0", {"a1": "a1", "b1": "b1"}, self.times, self.events,
                         Files(folder / "checkpoints", [offered]))
        self.members: list[Member] = []

    def member(self, name: str) -> Member:
        self.members.append(Member(name, self.bundles[name], f"127.0.0.1:{self.head.port}", Stop()))
        return self.members[-1]

    def joined(self, name: str) -> Member:
        member = self.member(name)
        answer: list[object] = []
        hello = Hello(incarnation="i", facts={"pid": 1})
        thread = threading.Thread(target=lambda: answer.append(member.join(hello, 5 * SECOND)))
        thread.start()
        assert isinstance(self.heard(name), Hello)
        self.head.send(name, Welcome(times=self.times, boot="elsewhere"))
        thread.join(5)
        assert isinstance(answer[0], Welcome)
        self.head.send(name, Assign(documents={"x": 1}))
        assert member.order() == Assign(documents={"x": 1})
        return member

    def heard(self, name: str) -> FromWorker:
        worker, message, _ = self.events.get(timeout=5)
        assert worker == name
        return message

    def close(self) -> None:
        self.head.close(1)
        for member in self.members:
            member.close()


@pytest.fixture
def service(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Service(tmp_path)
    yield made
    made.close()


@pytest.mark.wire
def test_two_workers_that_claim_one_name(service: Service) -> None:
    service.joined("b1")
    with pytest.raises(WorkplaceError, match=r"worker b1 already takes part in this run \(from 127.0.0.1:\d+\), and a second "
                                             r"process \(from 127.0.0.1:\d+\) claims its name: two workers claim one name"):
        service.member("b1").join(Hello(incarnation="j", facts={}), 5 * SECOND)


@pytest.mark.wire
def test_a_name_is_free_again_when_its_holder_has_gone(service: Service) -> None:
    first = service.joined("b1")
    first.close()
    assert isinstance(service.heard("b1"), Gone)
    service.joined("b1")


@pytest.mark.wire
def test_a_worker_of_another_machine_or_run_does_not_come_in(service: Service, tmp_path: Path) -> None:
    address = f"127.0.0.1:{service.head.port}"
    with pytest.raises(WorkplaceError, match="its keys were made for machine b1"):
        Member("a1", service.bundles["b1"], address, Stop()).join(Hello(incarnation="i", facts={}), 5 * SECOND)
    stranger = read_bundle(make_run_keys(tmp_path / "other", ["b1"], head="a1")["b1"])
    with pytest.raises(WorkplaceError, match=r"worker b1 cannot reach the head .* not with the keys of this bundle"):
        Member("b1", stranger, address, Stop()).join(Hello(incarnation="i", facts={}), SECOND // 2)


@pytest.mark.wire
def test_the_clocks_are_compared_and_both_sides_hear_each_other(service: Service) -> None:
    member = service.joined("b1")
    member.beat(lambda: "step 1, 0F0 on compute")
    for _ in range(5):
        beat = service.heard("b1")
    assert beat.doing == "step 1, 0F0 on compute"  # type: ignore[union-attr]
    assert abs(member.offset_ns) <= member._shortest_ns  # one machine: off by at most half a round trip
    member.report(Report(kind="train", step=0, figures={"loss": float("nan")}))
    while not isinstance(report := service.heard("b1"), Report):
        continue
    assert report.figures == {"loss": None}
    started: list[Start] = []
    ready = Ready(address=None, store_port=0, program="p", card="")
    thread = threading.Thread(target=lambda: started.append(member.start(ready)))
    thread.start()
    service.head.broadcast(Start(addresses={}, stores={}, cards={}, origin_ns=7))
    thread.join(5)
    assert started[0].origin_ns == 7
    done = threading.Thread(target=member.finish)
    done.start()
    while not isinstance(service.heard("b1"), Done):
        continue
    service.head.broadcast(Finish())
    done.join(5)
    assert not done.is_alive()


@pytest.mark.wire
def test_shards_go_up_and_checkpoints_come_down(service: Service, tmp_path: Path) -> None:
    member = service.joined("b1")
    entry = write_shard(tmp_path / "there", 3, "b1", {"parameter/w": torch.arange(500_000.0)})
    member.upload(iter([shard_header(3, entry), *pieces(shard_chunks(tmp_path / "there", 3, entry))]))
    arrived = tmp_path / "checkpoints" / "step-00000003" / entry.file
    assert arrived.read_bytes() == (tmp_path / "there" / "step-00000003" / entry.file).read_bytes()
    with pytest.raises(CheckpointError, match="in the name of worker a1"):
        member.upload(iter([shard_header(3, msgspec.structs.replace(entry, worker="a1"))]))
    (tmp_path / "offered" / "manifest.json").write_bytes(b"m" * 3_000_000)
    assert b"".join(member.download(str(tmp_path / "offered" / "manifest.json"))) == b"m" * 3_000_000
    for path in (tmp_path / "keys" / "b1.pem", tmp_path / "offered" / ".." / "keys" / "b1.pem", Path("/etc/hostname")):
        with pytest.raises(CheckpointError, match="offers no such file"):
            list(member.download(str(path)))


@pytest.mark.wire
def test_a_worker_stops_and_says_so_when_the_head_goes(tmp_path: Path) -> None:
    service = Service(tmp_path, max_pause_s=1)
    member = service.joined("b1")
    member.beat(lambda: "")
    service.head.close(0.1)
    assert member._stop.event.wait(1)
    assert "the head" in member._stop.reason
    with pytest.raises(StoppedError):
        member.start(Ready(address=None, store_port=0, program="", card=""))
    service.close()


# -- whole runs of light workers ---------------------------------------------------------------------------------------


def run(folder: Path, wanted: Job, place: Cluster, data: object = None, **more: object) -> tuple[RunResult, list[RunEvent]]:
    events: list[RunEvent] = []
    on_event = more.pop("on_event", events.append)
    result = drive(documents(folder, wanted, place, data, **more), folder, on_event=on_event,  # type: ignore[arg-type]
                   commit=lambda step, entries: f"step {step} of {len(entries)}", command=LIGHT)
    return result, events


@pytest.mark.wire
def test_a_run_from_its_keys_to_its_end(tmp_path: Path) -> None:
    result, events = run(tmp_path, job(5, evaluation={"every": 2}, checkpoint={"every": 3}), cluster())
    assert result.losses == (2.0,) * 5
    assert [event.worker for event in events if isinstance(event, Came)].__len__() == 3
    assert [type(event) for event in events[3:4]] == [Began]
    assert [event.step for event in events if isinstance(event, StepEnded)] == [0, 1, 2, 3, 4]
    assert [event.step for event in events if isinstance(event, Evaluated)] == [2, 4, 5]
    assert [event.path for event in events if isinstance(event, Saved)] == ["step 3 of 3", "step 5 of 3"]
    trace = read_trace(tmp_path / "trace.jsonl")
    assert trace.header.clock == "measured"
    assert sorted((span.worker, span.step) for span in trace.spans) == [(w, s) for w in ("a1", "a2", "b1") for s in range(5)]
    assert all(0 <= span.start_ns <= span.end_ns <= result.duration_ns for span in trace.spans)
    assert result.passed_bytes["aa>bb"] == result.passed_bytes["bb>aa"] == 2 * 8 * (5 + 3 + 2)  # two laps of 8 bytes a turn
    assert not (tmp_path / "keys").exists()  # nobody can join a run that is over


@pytest.mark.wire
def test_an_error_of_a_worker_keeps_its_kind_and_gets_its_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^machine b1 failed while doing step 2: the corpus ends here$"):
        run(tmp_path, job(50), cluster(), {"fail": {"b1": 2}})
    assert "the corpus ends here" in (tmp_path / "logs" / "a2.log").read_text()  # the others say why they stopped


@pytest.mark.wire
def test_a_worker_that_cannot_start_is_quoted(tmp_path: Path) -> None:
    sentence = "machine a1 ended unasked with exit code 3 before its first step; it said: no torch here"
    with pytest.raises(WorkerLostError, match=sentence):
        drive(documents(tmp_path, job(), cluster(), workers=("a1",)), tmp_path, on_event=lambda event: None,
              command=(sys.executable, "-c", "print('no torch here'); raise SystemExit(3)"))


@pytest.mark.wire
def test_another_program_is_refused(tmp_path: Path) -> None:
    papers = documents(tmp_path, job(), cluster(), {"program": "old"}, workers=("a1",))
    with pytest.raises(ProgramError, match="worker a1 made program old of the plan, the head light"):
        drive(papers, tmp_path, on_event=lambda event: None, command=LIGHT)


def free_ports(count: int) -> list[int]:
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in with_ports]
    for each in with_ports:
        each.close()
    return ports


@pytest.mark.wire
def test_real_machines_listen_at_their_addresses_and_wait_for_each_other(tmp_path: Path) -> None:
    """No emulation: the head starts its own worker only; the other is started by hand, with the bundle it is told."""
    first, second = free_ports(2)
    place = cluster(addresses={"a1": f"127.0.0.1:{first}", "b1": f"127.0.0.1:{second}"})
    events: list[RunEvent] = []
    others: list[subprocess.Popen[bytes]] = []

    def on_event(event: RunEvent) -> None:
        events.append(event)
        if isinstance(event, Waiting):
            others.append(subprocess.Popen([*LIGHT, event.worker, "--keys", event.bundle, "--home", str(tmp_path)]))

    result, _ = run(tmp_path, job(4), place, workers=("a1", "b1"), on_event=on_event)
    assert result.losses == (1.0,) * 4
    assert [(event.worker, event.machine) for event in events if isinstance(event, Waiting)] == [("b1", "b1")]
    assert others[0].wait(20) == 0


@pytest.mark.wire
def test_all_measure_before_the_plan_and_who_is_not_needed_is_let_go(tmp_path: Path) -> None:
    first, second, third = free_ports(3)
    place = cluster(addresses={"a1": f"127.0.0.1:{first}", "a2": f"127.0.0.1:{second}", "b1": f"127.0.0.1:{third}"})
    others: dict[str, subprocess.Popen[bytes]] = {}

    def on_event(event: RunEvent) -> None:
        if isinstance(event, Waiting):
            others[event.worker] = subprocess.Popen([*LIGHT, event.worker, "--keys", event.bundle, "--home", str(tmp_path)])

    papers = documents(tmp_path, job(4), place, workers=("a1", "b1"))
    with Rendezvous(place, ("a1", "a2", "b1"), "a1", tmp_path, 10 * SECOND, on_event) as rendezvous:
        rendezvous.open(LIGHT)
        found = rendezvous.measure(Measure(job={}, cluster={}, sizes=(2,), vocabulary=9, seconds=0.5))
        assert [(one.graph, one.samples, one.update_ns_per_element) for one in found] == [
            (name, 2, 0.5) for name in ("a1", "a2", "b1")]
        result = drive(papers, tmp_path, on_event=on_event, rendezvous=rendezvous)
        assert result.losses == (1.0,) * 4
        assert others["a2"].wait(20) == others["b1"].wait(20) == 0


@pytest.mark.wire
def test_who_is_lost_before_there_is_a_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match=r"^machine b1 was killed \(signal 9, SIGKILL\) while doing nothing yet$"), \
            Rendezvous(cluster(), ("a1", "b1"), "a1", tmp_path, 10 * SECOND, lambda event: None) as rendezvous:
        rendezvous.open(LIGHT)
        while len(rendezvous.joined) < 2:
            list(rendezvous.turn(None))
        for _ in range(20):
            list(rendezvous.turn(None))
        os.kill(rendezvous.processes.pids()["b1"], signal.SIGKILL)
        rendezvous.measure(Measure(job={}, cluster={}, sizes=(2,), vocabulary=9, seconds=0.5))
        while True:
            list(rendezvous.turn(None))


@pytest.mark.wire
def test_a_port_in_use_and_a_missing_address_are_said(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        place = cluster(addresses={"a1": f"127.0.0.1:{port}", "b1": "127.0.0.1:9"})
        with pytest.raises(WorkplaceError, match=rf"machine a1: cannot listen on 0.0.0.0:{port}: the port is in use"):
            run(tmp_path, job(), place, workers=("a1", "b1"))
    with pytest.raises(WorkplaceError, match="machine a1 keeps the run and needs an address"):
        run(tmp_path, job(), cluster(addresses={"b1": "127.0.0.1:9"}), workers=("a1", "b1"))


@pytest.mark.wire
def test_a_worker_that_never_comes_is_named(tmp_path: Path) -> None:
    first, second = free_ports(2)
    place = cluster(addresses={"a1": f"127.0.0.1:{first}", "b1": f"127.0.0.1:{second}"})
    papers = documents(tmp_path, job(max_pause="50 ms"), place, workers=("b1",))
    with pytest.raises(WorkplaceError, match="waited 3 s for b1 in vain; start them on their machines"):
        drive(papers, tmp_path, on_event=lambda event: None, command=LIGHT)


def test_the_documents_travel_as_json() -> None:
    papers = documents(Path("/run"), job(), cluster())
    assert parse(msgspec.json.encode(msgspec.to_builtins(papers, enc_hook=int)), Documents) == papers
