"""A plan on an emulated cluster, every worker a thread of this process: the short form of the twin benchmark.

The same programs, engine, pace and shaped links as in a run; what is left out is what takes the time: processes, their
imports, and bytes that really travel.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import torch

from atoll.cluster.calibration import Calibration, Profile
from atoll.cluster.cluster import Cluster
from atoll.cluster.network import Network
from atoll.plan.job import PRECISIONS, Job
from atoll.plan.layout import Layout
from atoll.plan.plan import Plan
from atoll.planner.predict import predict
from atoll.planner.times import Problem
from atoll.policies.schedules.table import find
from atoll.program.program import Program
from atoll.report.compare import Comparison, compare
from atoll.runtime.capture.stage import Captured, build_stage
from atoll.runtime.capture.weights import initialise
from atoll.runtime.clock import Clock
from atoll.runtime.engine import Engine
from atoll.runtime.kernels.optimizers import optimizer
from atoll.runtime.pace import EmulatedPace
from atoll.runtime.profile import profile
from atoll.runtime.state import ParameterStore
from atoll.runtime.transport.local import LocalHub
from atoll.runtime.transport.shaped import Buckets, Shaped
from atoll.runtime.worker_state import World
from atoll.runtime.world import Stop
from atoll.trace.span import Span, Trace, TraceHeader

__all__ = ["RandomTokens", "measured", "profiled"]


class RandomTokens:
    """Random tokens from (step, sample) alone."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def microbatch(self, split: str, step: int, first: int, samples: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * step + first)
        block = torch.randint(0, self.vocabulary, (samples, self.length + 1), generator=generator)
        return {"tokens": block[:, :-1].contiguous(), "targets": block[:, 1:].contiguous()}


def profiled(job: Job, cluster: Cluster, captured: Captured, samples: int, seconds: float) -> Calibration:
    """This computer's core, profiled beside the load that the other devices will make."""
    assert cluster.emulation is not None
    batches = RandomTokens(int(job.model.config["vocab_size"]), job.sequence_length)
    shares = sorted(device.speed * cluster.emulation.cpu_share for machine in cluster.machines for device in machine.devices)
    (found,) = profile(captured, PRECISIONS[job.precision], {samples: batches.microbatch("train", 0, 0, samples)},
                       torch.device("cpu"), seconds, kind="cpu-core", beside=shares[:-1])
    return found


def measured(job: Job, cluster: Cluster, plan: Plan, captured: Captured, calibration: Calibration) -> Comparison:
    """Predict ``plan``, run ``job.steps`` steps of it in threads, and lay one over the other."""
    problem = Problem(captured.graph, cluster, PRECISIONS[job.precision], Profile(measured=(calibration,)))
    prediction = predict(problem, plan, steps=3)
    program = prediction.program
    with tempfile.TemporaryDirectory(prefix="atoll-twin-") as folder:
        worlds = _worlds(job, cluster, plan, captured, program, Path(folder) / "links.bin")
        spans: list[Span] = []
        errors: list[BaseException] = []

        def work(world: World) -> None:
            try:
                with Engine(world) as engine:
                    for step in range(job.total_steps):
                        spans.extend(engine.run_step(step).spans)
            except BaseException as error:
                errors.append(error)
                for other in worlds:
                    other.stop.set(str(error))

        threads = [threading.Thread(target=work, args=(world,)) for world in worlds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
    header = TraceHeader(program=program.digest, clock="measured", workers=tuple(part.worker for part in program.workers))
    return compare(prediction.simulation.trace(), Trace(header=header, spans=tuple(spans)))


def _worlds(job: Job, cluster: Cluster, plan: Plan, captured: Captured, program: Program, links: Path) -> list[World]:
    network, layout, clock = Network(cluster), Layout.of(plan, captured.graph), Clock()
    hub = LocalHub([part.worker for part in program.workers])
    assert cluster.emulation is not None
    worlds = []
    for part in program.workers:
        name, stop, replica = part.worker, Stop(), layout.replica(part.worker)
        shared: dict[str, torch.nn.Parameter] = {}
        stages = {stage: build_stage(captured, replica.cuts[stage], replica.cuts[stage + 1], device=torch.device("cpu"),
                                     shared=shared, split_backward=find(plan.schedule).splits_backward)
                  for stage in replica.stages_of(name)}
        initialise(shared, captured, job.seed)
        store = ParameterStore(stages, [bucket for bucket in program.buckets if bucket.index in part.buckets],
                               getattr(torch, PRECISIONS[job.precision].master))
        worlds.append(World(
            name=name, program=program, stages=stages, edges={(edge.source, edge.target): edge for edge in replica.edges},
            loss=captured.graph.loss, store=store, optimizer=optimizer(store, job.optimizer), optimizer_spec=job.optimizer,
            total_steps=job.total_steps, step_tokens=job.step_tokens, tokens_per_sample=job.sequence_length,
            channel=Shaped(hub.channel(name, stop), name, Buckets(links, network.capacity), network.path, stop),
            batches=RandomTokens(int(job.model.config["vocab_size"]), job.sequence_length), stop=stop, clock=clock,
            pace=EmulatedPace.of(network.worker(name).device.speed, cluster.emulation.cpu_share, clock, stop, alone=False)))
    return worlds
