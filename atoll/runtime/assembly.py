"""From the documents to one worker's part: its stages, weights, data, optimizer, links; nothing of anybody else's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from atoll.cluster.cluster import Cluster, Device
from atoll.cluster.network import Network
from atoll.errors import ProgramError, WorkplaceError
from atoll.graph.graph import Graph
from atoll.plan.job import PRECISIONS, Job
from atoll.plan.layout import Layout, evaluation_plan
from atoll.plan.lower import lower
from atoll.plan.plan import Plan
from atoll.policies.schedules.table import find as find_schedule
from atoll.program.instructions import Receive, Save, Send
from atoll.program.program import Program
from atoll.records import Record, from_plain
from atoll.runtime.capture.stage import Captured, build_stage, capture
from atoll.runtime.capture.weights import initialise, load_weights
from atoll.runtime.checkpoint.shards import ShardEntry, shard_chunks, step_folder, write_shard
from atoll.runtime.checkpoint.state import restore_worker, worker_tensors
from atoll.runtime.checkpoint.store import MANIFEST, Checkpoint, open_checkpoint
from atoll.runtime.checkpoint.trained import CHECKPOINTS
from atoll.runtime.clock import Clock
from atoll.runtime.control import Member, Report
from atoll.runtime.data.packed import PackedBatches, PackedFacts, compare, open_packed, prepare
from atoll.runtime.data.tokenizer import load_tokenizer
from atoll.runtime.engine import Engine
from atoll.runtime.handover import pieces, shard_header, write_file
from atoll.runtime.heap import freeze_objects, keep_heap
from atoll.runtime.kernels.optimizers import optimizer
from atoll.runtime.keys import Bundle
from atoll.runtime.liveness import Timeouts
from atoll.runtime.pace import EmulatedPace
from atoll.runtime.rendezvous import LINKS_FILE
from atoll.runtime.state import ParameterStore
from atoll.runtime.transport.links import Links
from atoll.runtime.worker import Documents, Place, Turn
from atoll.runtime.worker_state import World
from atoll.runtime.world import Stop

__all__ = ["DataNote", "EngineCrew", "assemble", "device_of", "limit_threads", "programs_of"]


class DataNote(Record):
    """``Documents.data``: what the head's packed data is (``facts``), the folder it lies in there, and the tokenizer's files
    (name -> text) for machines that must pack the corpus themselves."""

    facts: PackedFacts
    folder: str
    tokenizer: dict[str, str]


def programs_of(job: Job, plan: Plan, graph: Graph, network: Network) -> dict[str, Program]:
    """The programs of a run by kind of turn: "train", "evaluate" (when validation data is held out) and "save"."""
    precision = PRECISIONS[job.precision]
    islands = {name: worker.island for name, worker in network.workers.items()}
    programs = {kind: lower(plan, graph, islands, precision, kind=kind, rule=job.optimizer.rule) for kind in ("train", "save")}
    if job.data.validation > 0:
        programs["evaluate"] = lower(evaluation_plan(plan, job.evaluation.samples), graph, islands, precision, kind="evaluate",
                                     rule=job.optimizer.rule)
    return programs


def device_of(network: Network, worker: str) -> torch.device:
    """Where a worker computes: CPU for a CPU device or an emulated one, else the accelerator of the same number.

    Raises ``WorkplaceError`` when this machine has fewer than the cluster says.
    """
    own = network.worker(worker)
    if network.cluster.emulation is not None or own.device.kind.lower().startswith("cpu"):
        return torch.device("cpu")
    accelerators = [name for name, other in network.workers.items()
                    if other.machine == own.machine and not other.device.kind.lower().startswith("cpu")]
    number = accelerators.index(worker)
    found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if number >= found:
        raise WorkplaceError(f"machine {own.machine}: the cluster gives it {len(accelerators)} accelerators such as "
                             f"{own.device.kind}, PyTorch finds {found} here; install the PyTorch build for them, or correct "
                             "the cluster (atoll probe writes it)")
    kind = torch.accelerator.current_accelerator()
    return torch.device(kind.type if kind is not None else "cpu", number)


def limit_threads(cluster: Cluster, device: Device) -> None:
    """A device that is one core, or emulated, computes on one thread."""
    if cluster.emulation is not None or device.kind.lower() == "cpu-core":
        torch.set_num_threads(1)


class EngineCrew:
    """One worker's part around the lane engine (the ``Crew`` of ``runtime.worker``)."""

    def __init__(self, world: World, programs: Mapping[str, Program], links: Links, saver: _Saver) -> None:
        name = world.name
        self.program, self.links, self.card = programs["train"].digest, links, _card(world.device)
        self._programs, self._saver = programs, saver
        self._engine = Engine(world)
        instructions = [instruction for program in programs.values() for instruction in program.part(name).instructions]
        self.sends_to = sorted({found.peer for found in instructions if isinstance(found, Send)})
        self.receives_from = sorted({found.peer for found in instructions if isinstance(found, Receive)})

    def run(self, turn: Turn) -> Report:
        split = "validation" if turn.kind == "evaluate" else "train"
        program = None if turn.kind == "train" else self._programs[turn.kind]
        result = self._engine.run_step(turn.step, split, program)
        if turn.kind == "save":
            return Report(kind="save", step=turn.step, figures={}, spans=result.spans, extra=self._saver.entry)
        figures = {"loss": result.loss, "tokens": result.tokens, "gradient_norm": result.gradient_norm,
                   "learning_rate": result.learning_rate, "committed": float(result.committed)}
        return Report(kind=turn.kind, step=turn.step, spans=result.spans, figures=dict(figures))

    def doing(self) -> str:
        lanes = self._engine.doing()
        first = sorted(lanes, key=lambda lane: (lane != "compute", lane))[:3]
        return ", ".join(f"{lanes[lane]} on {lane}" for lane in first)

    def close(self) -> None:
        self._engine.close()


def _card(device: torch.device) -> str:
    return f"{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


class _Saver:
    """Writes this worker's shard and, where the head's disk is elsewhere, hands it over and keeps the newest ``keep`` that it
    wrote. ``entry``: of the last one."""

    def __init__(self, folder: Path, name: str, names: tuple[str, ...], member: Member | None, keep: int) -> None:
        self._folder, self._name, self._names, self._member, self._keep = folder, name, names, member, keep
        self._written: list[Path] = []
        self.entry: ShardEntry | None = None
        self.world: World | None = None

    def __call__(self, instruction: Save, step: int) -> int:
        if self.world is None:
            raise ProgramError(f"worker {self._name} was asked to save before it was built")
        tensors = worker_tensors(self.world.store, self.world.optimizer, self._names)
        self.entry = entry = write_shard(self._folder, step, self._name, tensors)
        if self._member is not None:
            self._member.upload(_with_header(shard_header(step, entry), pieces(shard_chunks(self._folder, step, entry))))
            self._written.append(step_folder(self._folder, step) / entry.file)
            for old in self._written[:-self._keep]:
                old.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # other workers of this machine have theirs there, or the head's copy
                    old.parent.rmdir()
            del self._written[:-self._keep]
        return entry.size_bytes


def _with_header(header: bytes, chunks):  # type: ignore[no-untyped-def]
    yield header
    yield from chunks


def assemble(documents: Documents, place: Place, bundle: Bundle, times: Timeouts, clock: Clock, stop: Stop,
             member: Member) -> EngineCrew:
    """Build worker ``place.name`` alone. Raises the error of whatever cannot be built here."""
    keep_heap()
    job, plan, name = documents.job, documents.plan, place.name
    precision, network = PRECISIONS[job.precision], Network(documents.cluster)
    worker, emulation = network.worker(name), documents.cluster.emulation
    device = device_of(network, name)
    limit_threads(documents.cluster, worker.device)
    captured = capture(job.model, job.sequence_length, plan.microbatch_samples, precision.compute)
    programs = programs_of(job, plan, captured.graph, network)
    train = programs["train"]
    layout = Layout.of(plan, captured.graph)
    replica = layout.replica(name)
    shared: dict[str, torch.nn.Parameter] = {}
    stages = {stage: build_stage(captured, replica.cuts[stage], replica.cuts[stage + 1], device=device, shared=shared,
                                 split_backward=find_schedule(plan.schedule).splits_backward, compile=job.compile)
              for stage in replica.stages_of(name)}
    part = train.part(name)
    buckets = [bucket for bucket in train.buckets if bucket.index in part.buckets]
    links = Links(name, documents.plan.workers, network, documents.head, bundle, stop, times,
                  buckets=None if emulation is None else Path(documents.run) / LINKS_FILE,
                  largest_message_bytes=_largest_message(programs), device=device)
    folder = Path(place.home) / CHECKPOINTS
    first_held = tuple(parameter for bucket in buckets if bucket.holders[0] == name for parameter in bucket.parameters)
    saver = _Saver(folder, name, first_held, None if place.shared else member, job.checkpoint.keep)
    store = ParameterStore(stages, buckets, getattr(torch, precision.master))
    if not documents.resume:
        _first_weights(store.masters, captured, job)  # in the master dtype: nothing is rounded before the first step
        store.publish()
    kernel = optimizer(store, job.optimizer)
    if documents.resume:
        checkpoint = _checkpoint(documents, place, tuple(store.masters), kernel.moments(), member)
        restore_worker(checkpoint, store, kernel)
    world = World(
        name=name, program=train, stages=stages, edges={(edge.source, edge.target): edge for edge in replica.edges},
        loss=captured.graph.loss, store=store, optimizer=kernel, optimizer_spec=job.optimizer, total_steps=job.total_steps,
        step_tokens=job.step_tokens, tokens_per_sample=job.sequence_length, channel=links.channel,
        batches=_batches(documents, place, worker.machine), stop=stop, clock=clock, device=device, save=saver,
        pace=None if emulation is None else EmulatedPace.of(worker.device.speed, emulation.cpu_share, clock, stop,
                                                              alone=True))
    saver.world = world
    crew = EngineCrew(world, programs, links, saver)
    freeze_objects()
    return crew


def _first_weights(parameters: Mapping[str, torch.Tensor], captured: Captured, job: Job) -> None:
    if job.model.weights == "folder" and job.model.folder is not None:
        load_weights(parameters, captured, job.model.folder)
    else:
        initialise(parameters, captured, job.seed)


def _largest_message(programs: Mapping[str, Program]) -> int:
    """Payload bytes, over all workers: both ends of a link must come to the same decisions."""
    return max((instruction.size_bytes for program in programs.values() for part in program.workers
                for instruction in part.instructions if isinstance(instruction, Send | Receive)), default=0)


def _batches(documents: Documents, place: Place, machine: str) -> PackedBatches:
    """The packed data: the head's own where the disk is common, else packed here and compared with the head's."""
    job, note = documents.job, from_plain(documents.data, DataNote, source="documents of the head: data")
    if place.shared:
        packed = open_packed(note.folder)
    else:
        folder = Path(place.home) / "tokenizer"
        for file, text in note.tokenizer.items():
            write_file(folder / os.path.basename(file), [text.encode()])
        packed = prepare(job.data, job.sequence_length, Path(place.home) / "data", base=place.home,
                         tokenizer=load_tokenizer(folder))
        compare(packed.facts, note.facts, machine)
    return PackedBatches(packed, seed=job.seed, global_batch=job.global_batch, sequence_length=job.sequence_length)


def _checkpoint(documents: Documents, place: Place, names: tuple[str, ...], moments: Mapping[str, Mapping[str, torch.Tensor]],
                member: Member) -> Checkpoint:
    """The checkpoint to resume from; a machine without the head's disk fetches the shards that it needs."""
    if place.shared:
        return open_checkpoint(documents.resume)
    folder = Path(place.home) / CHECKPOINTS / Path(documents.resume).name
    write_file(folder / MANIFEST, member.download(f"{documents.resume}/{MANIFEST}"))
    checkpoint = open_checkpoint(folder)
    wanted = [f"parameter/{name}" for name in names] + [f"{kind}/{name}" for name in names for kind in moments.get(name, {})]
    for shard in checkpoint.shards_of(wanted):
        write_file(folder / shard.file, member.download(f"{documents.resume}/{shard.file}"))
    return checkpoint
