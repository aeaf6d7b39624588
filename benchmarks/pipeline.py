"""Four stages under 1F1B: Atoll against ``torch.distributed.pipelining`` (Schedule1F1B, PipelineStage, Gloo).

Both train the same four stage modules (``build_stage`` of one captured GPT), from the same weights, on the same
microbatches, each with four processes of one thread, and both end a step alike: the global gradient norm and the loss are
summed over the four, gradients are clipped, fused AdamW updates. Losses of both sides are compared step by step.

Atoll's side is the whole runtime: ``drive`` starts four workers of one island (no emulation, no shaping), each assembles
its part of the lowered program, runs it through the lane engine and reports spans. All eight processes live through the
whole measurement and take turns of a few steps, so whatever else the machine does meets both; one stopwatch, here, times
both from "go" to the fourth "done". The figure is the median over pairs of turns of Atoll's throughput divided by the
other's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from contract import finish, quick

from atoll.cluster.cluster import Cluster, Device, Island, Machine
from atoll.cluster.network import Network, workers
from atoll.graph.spec import ModelSpec
from atoll.plan.job import Job
from atoll.plan.plan import Plan, ReplicaPlan, StagePlacement
from atoll.policies.data.spec import DataSpec
from atoll.records import Record, save, to_plain
from atoll.runtime.assembly import DataNote, assemble, programs_of
from atoll.runtime.capture.stage import Captured, capture
from atoll.runtime.control import Report
from atoll.runtime.data.packed import prepare
from atoll.runtime.driver import drive
from atoll.runtime.measuring import measure as measure_device
from atoll.runtime.worker import Crew, Documents, Turn, leave
from atoll.runtime.worker import main as work
from atoll.units import Bandwidth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STAGES", "Gate", "Setting", "cuts"]

STAGES = 4
SIDES = ("atoll", "torch")
PATIENCE_S = 600
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Setting(Record):
    """What both sides do. ``layers``: of each stage; ``samples``: of a microbatch; ``turn``: steps between two swaps."""

    layers: int
    width: int
    heads: int
    length: int
    samples: int
    microbatches: int
    turn: int
    turns: int

    @property
    def job(self) -> Job:
        config = {"n_layer": STAGES * self.layers, "n_embd": self.width, "n_head": self.heads, "vocab_size": 257,
                  "n_positions": self.length, "tie_word_embeddings": False}
        return Job(name="pipeline", model=ModelSpec(family="gpt2", config=config), data=DataSpec(validation=0.0),
                   sequence_length=self.length, global_batch=self.samples * self.microbatches, steps=self.turn * self.turns)

    @property
    def tokens(self) -> int:
        """Of one turn."""
        return self.job.step_tokens * self.turn


SETTINGS = {
    "small": Setting(layers=1, width=128, heads=4, length=64, samples=2, microbatches=8, turn=8, turns=1),
    "medium": Setting(layers=2, width=256, heads=4, length=128, samples=2, microbatches=8, turn=2, turns=1),
}


def cuts(captured: Captured, layers: int) -> tuple[int, ...]:
    """As many layers on each stage; the embeddings go with the first, the head and the loss with the last."""
    names = [operator.name for operator in captured.graph.operators]
    first = [names.index(f"transformer.h.{layers * stage}.ln_1") for stage in range(1, STAGES)]
    return (0, *first, len(names))


class Gate:
    """A process's end of the turns: waits for "go", says "done"; the stopwatch holds the other end."""

    def __init__(self, path: str, side: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.sendall(side[:1].encode())
        self._started = 0.0

    def wait(self) -> None:
        if not self._socket.recv(1):
            raise SystemExit("the benchmark is gone")
        self._started = time.process_time()

    def done(self) -> None:
        """Say so, and how much CPU time this process took."""
        self._socket.sendall(struct.pack("d", time.process_time() - self._started))


class Stopwatch:
    """Lets one side at a time run a turn and times it."""

    def __init__(self, path: Path) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(2 * STAGES)
        self._server.settimeout(PATIENCE_S)
        self._ends: dict[str, list[socket.socket]] = {side: [] for side in SIDES}

    def gather(self) -> None:
        names = {side[:1].encode(): side for side in SIDES}
        while any(len(ends) < STAGES for ends in self._ends.values()):
            end, _ = self._server.accept()
            end.settimeout(PATIENCE_S)
            self._ends[names[end.recv(1)]].append(end)

    def turn(self, side: str) -> tuple[float, float]:
        """Seconds from "go" to the last "done", and CPU seconds of the four processes."""
        started, cpu = time.perf_counter(), 0.0
        for end in self._ends[side]:
            end.sendall(b"g")
        for end in self._ends[side]:
            answer = end.recv(8)
            if not answer:
                raise RuntimeError(f"a process of {side} ended early")
            cpu += struct.unpack("d", answer)[0]
        return time.perf_counter() - started, cpu

    def close(self) -> None:
        for end in (self._server, *self._ends["atoll"], *self._ends["torch"]):
            end.close()


# -- Atoll's side ------------------------------------------------------------------------------------------------------


class TakingTurns:
    """A crew that passes the gate before the first step of each turn; everything else is the crew's own."""

    def __init__(self, crew: Crew, gate: Gate, turn: int) -> None:
        self._crew, self._gate, self._turn = crew, gate, turn
        self.program, self.card, self.links = crew.program, crew.card, crew.links
        self.sends_to, self.receives_from = crew.sends_to, crew.receives_from
        self.doing, self.close = crew.doing, crew.close

    def run(self, turn: Turn) -> Report:
        if turn.step % self._turn == 0:
            if turn.step:
                self._gate.done()
            if turn.kind == "train":
                self._gate.wait()
        return self._crew.run(turn)


def worker(gate: str, turn: str, arguments: list[str]) -> int:
    """One of Atoll's processes, as ``python -m atoll.runtime`` is, with the gate."""
    return work(lambda *given: TakingTurns(assemble(*given), Gate(gate, "atoll"), int(turn)), measure_device, arguments)


def documents(setting: Setting, captured: Captured, folder: Path) -> Documents:
    """One machine with four cores, a stage on each."""
    job = setting.job
    cluster = Cluster(name="here", islands={"here": Island(bandwidth=Bandwidth(10**9))}, machines=(
        Machine(name="box", island="here", devices=(Device(kind="cpu-core", count=STAGES),)),))
    names, bounds = [operator.name for operator in captured.graph.operators], cuts(captured, setting.layers)
    stages = tuple(StagePlacement(first=names[bounds[i]], last=names[bounds[i + 1] - 1], worker=own.name, recompute=False)
                   for i, own in enumerate(workers(cluster)))
    plan = Plan(job=job.name, cluster=cluster.name, graph=captured.graph.name, schedule="1f1b", chunks=1,
                microbatch_samples=setting.samples, bucket_bytes=1 << 25, collective="ring", native=True,
                replicas=(ReplicaPlan(stages=stages, microbatches=setting.microbatches),))
    packed = prepare(job.data, job.sequence_length, folder.parent / "data")
    return Documents(job=job, cluster=cluster, plan=plan, head="box", run=str(folder), base=str(folder),
                     program=programs_of(job, plan, captured.graph, Network(cluster))["train"].digest,
                     data=to_plain(DataNote(facts=packed.facts, folder=str(packed.folder), tokenizer={})))


@contextlib.contextmanager
def atoll_side(setting: Setting, captured: Captured, folder: Path, gate: Path) -> Iterator[list[float]]:
    """Yields the losses, filled in once the run is over."""
    losses: list[float] = []
    failed: list[BaseException] = []
    command = (sys.executable, __file__, "--worker", str(gate), str(setting.turn))
    folder.mkdir()
    papers = documents(setting, captured, folder)

    def run() -> None:
        try:
            result = drive(papers, folder, on_event=lambda event: None, command=command)
            losses.extend(loss * setting.job.step_tokens for loss in result.losses)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield losses
    finally:
        thread.join()
    if failed:
        raise failed[0]


# -- the other side ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def torch_side(setting: Setting, folder: Path, gate: Path, data: Path) -> Iterator[list[float]]:
    """The same of ``torch_pipeline.py``."""
    losses: list[float] = []
    folder.mkdir()
    save(folder / "setting.yaml", setting)
    script = str(Path(__file__).with_name("torch_pipeline.py"))
    process = subprocess.Popen([sys.executable, script, str(folder), str(gate), str(data)],
                               env=dict(os.environ, GLOO_SOCKET_IFNAME="lo"))
    try:
        yield losses
        if process.wait(PATIENCE_S):
            raise RuntimeError(f"torch_pipeline.py ended with {process.returncode}")
        losses.extend(json.loads((folder / "losses.json").read_text()))
    finally:
        process.kill()
        process.wait()


# -- both --------------------------------------------------------------------------------------------------------------


def measure(setting: Setting, warm: int, folder: Path) -> tuple[dict[str, list[float]], dict[str, list[float]], float]:
    """Seconds and CPU seconds of every turn of each side after ``warm``, and how far apart their losses are (relative)."""
    folder.mkdir()
    gate = folder / "gate"
    captured = capture(setting.job.model, setting.length, setting.samples)
    watch = Stopwatch(gate)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    data = folder / "data"
    try:
        with atoll_side(setting, captured, folder / "atoll", gate) as ours, torch_side(
                setting, folder / "torch", gate, data) as theirs:
            watch.gather()
            for turn in range(setting.turns):
                for side in SIDES if turn % 2 else SIDES[::-1]:
                    seconds, busy = watch.turn(side)
                    if turn >= warm:
                        times[side].append(seconds)
                        cpu[side].append(busy)
    finally:
        watch.close()
    if not len(ours) == len(theirs) == setting.job.steps:
        raise RuntimeError(f"{setting.job.steps} steps were to be done, Atoll did {len(ours)}, the other {len(theirs)}")
    return times, cpu, max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def main() -> int:
    warm, turns = (2, 12) if quick(__doc__ or "") else (3, 33)
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    ratios: dict[str, list[float]] = {}
    folder = Path(tempfile.mkdtemp())
    try:
        for name, setting in SETTINGS.items():
            chosen = Setting(**{**to_plain(setting), "turns": warm + turns})
            times, cpu, apart = measure(chosen, warm, folder / name)
            ratios[name] = [theirs / ours for ours, theirs in zip(times["atoll"], times["torch"], strict=True)]
            figures.update(summary(name, chosen, times, cpu, ratios[name]))
            figures[f"losses_apart_{name}"] = apart
            print(f"{name}: Atoll {figures[f'atoll_tokens_per_s_{name}']:,.0f} tokens/s, torch.distributed.pipelining "
                  f"{figures[f'torch_tokens_per_s_{name}']:,.0f}; median ratio of {len(ratios[name])} pairs "
                  f"{statistics.median(ratios[name]):.4f}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    goals = {f"throughput_ratio_{name}": (">=", 1.0) for name in SETTINGS}
    return finish("pipeline", figures, goals, lambda figure: draw(figure, ratios))


def summary(name: str, setting: Setting, times: Mapping[str, list[float]], cpu: Mapping[str, list[float]],
            ratios: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(ratios, n=4)
    return {f"throughput_ratio_{name}": statistics.median(ratios), f"ratio_first_quartile_{name}": quartiles[0],
            f"ratio_third_quartile_{name}": quartiles[2], f"pairs_{name}": len(ratios),
            f"cpu_ratio_{name}": statistics.median(b / a for a, b in zip(cpu["atoll"], cpu["torch"], strict=True)),
            **{f"{side}_cpu_s_{name}": statistics.median(cpu[side]) for side in SIDES},
            **{f"{side}_tokens_per_s_{name}": setting.tokens / statistics.median(times[side]) for side in SIDES}}


def draw(figure: Figure, ratios: Mapping[str, list[float]]) -> None:
    axes = figure.subplots()
    for name, values in ratios.items():
        axes.plot(values, ".", label=f"{name}: one pair of turns (median {statistics.median(values):.3f})")
    axes.axhline(1.0, color="red", linestyle="--", label="goal 1.0")
    axes.set(xlabel="pair", ylabel="throughput, Atoll / torch.distributed.pipelining", title="Four stages, 1F1B")
    axes.legend()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        leave(worker(*sys.argv[2:4], sys.argv[4:]))
    sys.exit(main())
