"""A worker is killed or frozen in the middle of a step: the others stop, the head says who and at what, nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_driver import LIGHT, cluster, documents, free_ports, job

from atoll.cluster.cluster import Cluster
from atoll.errors import WorkerLostError
from atoll.graph.graph import Graph
from atoll.plan.job import Job
from atoll.plan.plan import Plan, ReplicaPlan, StagePlacement
from atoll.records import from_plain
from atoll.runtime.capture.stage import capture
from atoll.runtime.data.ledger import about, prove
from atoll.runtime.data.packed import Packed, prepare
from atoll.runtime.driver import RunResult, drive
from atoll.runtime.events import Came, RunEvent, Saved, StepEnded, Waiting
from atoll.runtime.launch import find_checkpoint, launch

torch.set_num_threads(1)

pytestmark = pytest.mark.wire
SECOND = 10**9


class Saboteur:
    """Sends ``signal_number`` to the process of ``victim`` when step ``at`` has ended."""

    def __init__(self, victim: str, signal_number: int, at: int) -> None:
        self.victim, self.signal_number, self.at = victim, signal_number, at
        self.pids: dict[str, int] = {}
        self.struck_s = 0.0
        self.events: list[RunEvent] = []

    def __call__(self, event: RunEvent) -> None:
        self.events.append(event)
        if isinstance(event, Came):
            self.pids[event.worker] = int(event.facts["pid"])
        elif isinstance(event, StepEnded) and event.step == self.at:
            self.struck_s = time.monotonic()
            os.kill(self.pids[self.victim], self.signal_number)

    def nobody_is_left(self) -> bool:
        return not any(Path(f"/proc/{pid}").exists() for pid in self.pids.values())


@pytest.mark.parametrize(("number", "sentence", "limit_s"), [
    (signal.SIGKILL, r"^machine b1 was killed \(signal 9, SIGKILL\) while doing step \d+, 2B3 on compute$", 10),
    (signal.SIGSTOP, r"^machine b1 is frozen or cut off: silent for [\d.]+ s while doing step \d+, 2B3 on compute$", 8),
])
def test_the_others_stop_and_the_machine_is_named(tmp_path: Path, number: int, sentence: str, limit_s: float) -> None:
    """``limit_s``: what is promised (10 s; for a frozen worker ``max_pause``), not what is measured (1-3 s)."""
    saboteur = Saboteur("b1", number, at=20)
    with pytest.raises(WorkerLostError, match=sentence):
        drive(documents(tmp_path, job(5000, max_pause="8 s"), cluster(), {"step_s": 0.05}), tmp_path, on_event=saboteur,
              commit=lambda step, entries: "", command=LIGHT)
    assert time.monotonic() - saboteur.struck_s < limit_s
    assert saboteur.nobody_is_left()
    for name in ("a1", "a2"):
        assert "machine b1" in (tmp_path / "logs" / f"{name}.log").read_text()


@pytest.mark.parametrize(("number", "sentence"), [(signal.SIGKILL, r"^machine a2 was killed"),
                                                  (signal.SIGSTOP, r"^machine a2 is frozen or cut off")])
def test_a_neighbour_inside_the_island_is_named_too(tmp_path: Path, number: int, sentence: str) -> None:
    """Here the others sit in calls of the collective library, which cannot be interrupted."""
    saboteur = Saboteur("a2", number, at=3)
    with pytest.raises(WorkerLostError, match=sentence):
        drive(documents(tmp_path, job(5000, max_pause="5 s"), cluster()), tmp_path, on_event=saboteur,
              commit=lambda step, entries: "", command=LIGHT)
    assert saboteur.nobody_is_left()


@pytest.mark.parametrize("largest_bytes", [8, 1 << 20], ids=["direct", "threads"])
@pytest.mark.parametrize(("number", "sentence"), [(signal.SIGKILL, r"^worker a1:1 on machine a1 was killed"),
                                                  (signal.SIGSTOP, r"^worker a1:1 on machine a1 is frozen or cut off")])
def test_a_neighbour_on_a_real_link_of_the_library_is_named(tmp_path: Path, number: int, sentence: str,
                                                            largest_bytes: int) -> None:
    """Two devices of one machine; whether messages go with threads of ours or without."""
    place = from_plain({"islands": {"aa": {"bandwidth": "1 Gbit/s"}},
                        "machines": [{"name": "a1", "island": "aa", "devices": [{"kind": "cpu-core", "count": 2}]}]}, Cluster)
    papers = documents(tmp_path, job(100_000, max_pause="5 s"), place, {"largest_bytes": largest_bytes, "step_s": 0.001},
                       workers=("a1:0", "a1:1"))
    saboteur = Saboteur("a1:1", number, at=30)
    with pytest.raises(WorkerLostError, match=sentence):
        drive(papers, tmp_path, on_event=saboteur, commit=lambda step, entries: "", command=LIGHT)
    assert time.monotonic() - saboteur.struck_s < 8
    assert saboteur.nobody_is_left()


# -- the real thing: a model, checkpoints, resuming --------------------------------------------------------------------


def papers(folder: Path) -> tuple[Job, Cluster, Graph, Packed]:
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    for number in range(20):
        (folder / "corpus" / f"{number}.txt").write_text(f"The {number}th island is made of sand and words. " * 40)
    wanted = from_plain({
        "name": "faults", "sequence_length": 16, "global_batch": 4, "steps": 8, "precision": "fp64", "max_pause": "20 s",
        "model": {"family": "gpt2", "config": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 257, "n_positions": 16}},
        "data": {"source": str(folder / "corpus"), "validation": 0.2}, "evaluation": {"samples": 4}, "checkpoint": {"every": 3},
    }, Job)
    graph = capture(wanted.model, 16, 1, "float64").graph
    return wanted, cluster(), graph, prepare(wanted.data, 16, folder / "data")


def pipeline(graph: Graph, workers: tuple[str, ...]) -> Plan:
    """One replica, as many stages as workers, cut evenly by operators."""
    names = [operator.name for operator in graph.operators]
    ends = [len(names) * (place + 1) // len(workers) for place in range(len(workers))]
    stages = tuple(StagePlacement(first=names[low], last=names[high - 1], worker=worker, recompute=False)
                   for low, high, worker in zip([0, *ends], ends, workers, strict=False))
    return Plan(job="faults", cluster="three", graph=graph.name, schedule="1f1b", chunks=1, microbatch_samples=1,
                bucket_bytes=1 << 20, collective="ring", native=True, replicas=(ReplicaPlan(stages=stages, microbatches=4),))


ELSEWHERE = """
import sys
from atoll.runtime import worker
from atoll.runtime.assembly import assemble
from atoll.runtime.measuring import measure
worker.boot_mark = lambda: "another system"  # so it takes none of the head's folders for its own
worker.leave(worker.main(assemble, measure, sys.argv[1:]))
"""


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """Three emulated workers lose one mid-run. Two real machines without a common disk go on: the checkpoint is fetched, the
    corpus packed again, shards are handed over. The curve is that of one process that nothing befell."""
    wanted, place, graph, packed = papers(tmp_path)

    def go(folder: Path, where: Cluster, workers: tuple[str, ...], on_event: Callable[[RunEvent], None],
           resume: bool = False) -> RunResult:
        checkpoint = find_checkpoint(folder, wanted, packed) if resume else None
        return launch(wanted, where, pipeline(graph, workers), graph, packed, folder, head="a1", on_event=on_event,
                      resume=checkpoint)

    whole = go(tmp_path / "whole", place, ("a1",), lambda event: None)
    assert len(whole.losses) == 8
    assert whole.saved == 8

    saboteur = Saboteur("b1", signal.SIGKILL, at=4)
    with pytest.raises(WorkerLostError, match=r"^machine b1 was killed \(signal 9, SIGKILL\) while doing "):
        go(tmp_path / "run", place, ("a1", "a2", "b1"), saboteur)
    assert saboteur.nobody_is_left()
    assert [event.step for event in saboteur.events if isinstance(event, Saved)] == [3]
    before = [event.loss for event in saboteur.events if isinstance(event, StepEnded)]
    assert before == pytest.approx(list(whole.losses[:len(before)]), rel=1e-9)

    first, second = free_ports(2)
    others: list[subprocess.Popen[bytes]] = []

    def by_hand(event: RunEvent) -> None:
        if isinstance(event, Waiting):
            command = [sys.executable, "-c", ELSEWHERE, event.worker, "--keys", event.bundle, "--home", str(tmp_path / "b1")]
            others.append(subprocess.Popen(command))

    real = cluster(addresses={"a1": f"127.0.0.1:{first}", "b1": f"127.0.0.1:{second}"})
    resumed = go(tmp_path / "run", real, ("a1", "b1"), by_hand, resume=True)
    assert others[0].wait(30) == 0
    assert resumed.first_step == 3
    assert resumed.saved == 8
    assert list(resumed.losses) == pytest.approx(list(whole.losses[3:]), rel=1e-9)
    assert resumed.evaluations[-1][1] == pytest.approx(whole.evaluations[-1][1], rel=1e-9)
    last = find_checkpoint(tmp_path / "run", wanted, packed)
    assert (last.facts.step, last.facts.updates, last.problem()) == (8, 8, None)
    assert (tmp_path / "b1" / "checkpoints" / "step-00000003" / "manifest.json").is_file()  # fetched, not found
    assert about(tmp_path / "run" / "ledger.jsonl").sequences == packed.sequences("train", wanted.sequence_length)
    assert prove(tmp_path / "run" / "ledger.jsonl").steps == 8
