"""From documents to a prepared run: data, model, graph, profile, plan; the head's side of ``atoll train``."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll.cluster.calibration import Profile
from atoll.cluster.cluster import Cluster
from atoll.errors import CheckpointError, DataError, DocumentError, GraphError, PlanError, WorkplaceError
from atoll.graph.graph import Graph
from atoll.plan.job import PRECISIONS, Job

if TYPE_CHECKING:
    from atoll.plan.plan import Plan
    from atoll.runtime.capture.stage import Captured
    from atoll.runtime.data.packed import Packed
    from atoll.runtime.rendezvous import Rendezvous

__all__ = ["Prepared", "check_folder", "check_port", "choose_folder", "first_look", "head_machine", "measure_devices",
           "one_kind", "prepare_run", "this_machine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """``job``: with everything filled in that the data decides (the vocabulary)."""

    job: Job
    cluster: Cluster
    packed: Packed
    captured: Captured

    @property
    def graph(self) -> Graph:
        return self.captured.graph


def choose_folder(name: str, given: Path | None) -> Path:
    """``given``, or runs/NAME, or the first free runs/NAME-2, -3, ..."""
    if given is not None:
        return given
    folder = Path("runs") / name
    number = 2
    while folder.exists():
        folder = Path("runs") / f"{name}-{number}"
        number += 1
    return folder


def check_folder(folder: Path, resume: bool) -> None:
    """Before anything is computed: raise ``DocumentError`` when the run's folder holds something else, ``CheckpointError`` when
    there is nothing to resume from, ``WorkplaceError`` when it cannot be written. Leaves nothing behind."""
    if resume:
        from atoll.runtime.checkpoint.store import steps
        from atoll.runtime.checkpoint.trained import CHECKPOINTS

        if not steps(folder / CHECKPOINTS):
            raise CheckpointError(f"--resume: there is no checkpoint in {folder}; name the folder of a run that saved one "
                                  "(job.checkpoint.every), or train without --resume")
    elif (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size:
        raise DocumentError(f"--run: {folder} holds a run already; go on with it (--resume) or name another folder")
    elif folder.is_dir() and any(folder.iterdir()) and not (folder / "metrics.jsonl").exists():  # empty: it never began
        raise DocumentError(f"--run: {folder} holds other things already; name a new folder")
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise WorkplaceError(f"--run: the folder {folder} cannot be written: {error.strerror}; name another one") from None
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def check_port(cluster: Cluster, head: str) -> None:
    """Raise ``WorkplaceError`` before anything is computed when a port on which other machines will dial is taken: the head's
    own, and the next one for each of its workers."""
    own = next(machine for machine in cluster.machines if machine.name == head)
    if cluster.emulation is not None or len(cluster.machines) == 1 or own.address is None:
        return
    first = int(own.address.rpartition(":")[2])
    for port in range(first, first + 1 + sum(device.count for device in own.devices)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except (OSError, OverflowError) as error:
                raise WorkplaceError(f"machine {head}: port {port} (its address is {own.address}, and every worker takes one "
                                     f"more) cannot be listened on: {getattr(error, 'strerror', error)}; end the program that "
                                     "holds it or give the machine another port in the cluster") from None


def this_machine() -> Cluster:
    """This machine alone, for a run without a cluster.yaml: its accelerators, or one core, quickly measured."""
    from atoll.cluster.cluster import Island
    from atoll.runtime.probe import machine_of, probe_machine
    from atoll.units import Bandwidth

    facts = probe_machine(budget_s=0.05, disk_bytes=0)
    return Cluster(name="this-machine", islands={"home": Island(bandwidth=Bandwidth(10**9))},
                   machines=(machine_of(facts, "home"),))


def first_look(job: Job, cluster: Cluster, plan: Path | None) -> tuple[Plan | None, tuple[str, ...]]:
    """Whether the job can be planned at all, before data is read and anything is written: the given plan with what there is
    to say about it, or None. Raises ``PlanError``, ``GraphError`` and so on."""
    from atoll.cli.common import load_plan
    from atoll.cli.plan import graph_of
    from atoll.graph.config import model_config
    from atoll.planner.explain import overfull
    from atoll.planner.predict import predict
    from atoll.planner.problem import likely_vocabulary, problem_of, with_vocabulary
    from atoll.planner.search import refuse_impossible

    likely = with_vocabulary(job)
    graph = graph_of(likely)
    strange = [tensor.name for tensor in graph.inputs if tensor.name not in ("tokens", "targets")]
    if strange:
        raise GraphError(f"model.module: {job.model.module} asks for {', '.join(strange)}; the data set supplies tokens and "
                         "targets")
    if job.sample is not None and job.model.module is not None:
        from atoll.runtime.generate import check_sampling

        check_sampling(job.model)
    resolved, vocabulary = model_config(likely.model), likely_vocabulary(job)
    if resolved is not None and vocabulary is not None and vocabulary > int(resolved[1]["vocab_size"]):
        raise DataError(f"data.tokenizer: it will have {vocabulary} tokens, but the model has {resolved[1]['vocab_size']} "
                        f"embeddings; set the model's vocab_size to at least {vocabulary} or use a smaller vocabulary")
    problem = problem_of(likely, cluster, graph=graph)
    if plan is not None:
        given, notes = load_plan(plan, problem, likely)
        for sentence in overfull(problem, predict(problem, given)):
            raise PlanError(f"--plan: it does not fit: {sentence.rstrip('.')}")
        return given, notes
    refuse_impossible(problem, likely)
    return None, ()


def head_machine(cluster: Cluster, wanted: str | None) -> str:
    """The machine this is: the one asked for, the only one, any of an emulated cluster, or the one whose address is here."""
    names = [machine.name for machine in cluster.machines]
    if wanted is not None:
        if wanted not in names:
            raise DocumentError(f"--machine: there is no machine {wanted!r} in the cluster; it has {', '.join(names)}")
        return wanted
    if cluster.emulation is not None or len(names) == 1:
        return names[0]
    for machine in cluster.machines:
        if machine.address and _is_here(machine.address.rpartition(":")[0]):
            return machine.name
    raise DocumentError("none of the cluster's addresses is this machine's; say which machine this is with --machine "
                        f"({', '.join(names)})")


def _is_here(host: str) -> bool:
    """Whether this machine can listen on ``host``: the operating system knows its own addresses."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def prepare_run(job: Job, cluster: Cluster, folder: Path, base: Path, say: Callable[[str], None]) -> Prepared:
    """Tokenize and capture. ``base``: what relative paths of the job count from."""
    from atoll.graph.config import model_config
    from atoll.planner.problem import with_vocabulary
    from atoll.runtime.capture.stage import capture
    from atoll.runtime.data.packed import prepare

    packed = prepare(job.data, job.sequence_length, folder.absolute().parent / ".cache", base=base)
    job = with_vocabulary(job, packed.tokenizer.size)
    resolved = model_config(job.model)
    if resolved is not None:
        packed.tokenizer.check_vocabulary(int(resolved[1]["vocab_size"]))
    facts = packed.facts
    say(f"data: {facts.train.documents} documents, {facts.train.tokens:,} tokens to train on, "
        f"{facts.validation.tokens:,} held out, vocabulary {packed.tokenizer.size}")
    captured = capture(job.model, job.sequence_length, 1, PRECISIONS[job.precision].compute)
    return Prepared(job=job, cluster=cluster, packed=packed, captured=captured)


def measure_devices(prepared: Prepared, head: str, sizes: tuple[int, ...], rendezvous: Rendezvous | None,
                    say: Callable[[str], None]) -> Profile:
    """Time the operators of the job's model for microbatches of each of ``sizes``: on every device at the same time, by the
    workers of ``rendezvous``; those of an emulated cluster (None) on this machine, which plays them all."""
    from atoll.cluster.calibration import merged

    job, cluster, vocabulary = prepared.job, prepared.cluster, prepared.packed.tokenizer.size
    started = time.monotonic()
    if rendezvous is not None:
        from atoll.records import to_plain
        from atoll.runtime.control import Measure

        found = rendezvous.measure(Measure(job=to_plain(job), cluster=to_plain(cluster), sizes=sizes, vocabulary=vocabulary,
                                           seconds=_MACHINES_PROFILE_S))
        where = f"on {len(rendezvous.workers)} workers at the same time" if len(rendezvous.workers) > 1 else "on this machine"
    elif one_kind(cluster):
        from atoll.cluster.network import Network
        from atoll.runtime.measuring import measure_device

        worker = next(name for name, worker in Network(cluster).workers.items() if worker.machine == head)
        found = measure_device(job, prepared.captured, cluster, worker, sizes, vocabulary, seconds=_PROFILE_S,
                               check=lambda: None, beside=_beside(cluster))
        where = "on this machine"
    else:
        say("profile: devices of several kinds are emulated; their times are the catalogue's")
        return merged(())
    say(f"profile: {len(prepared.graph.operators)} operators timed {where} for microbatches of "
        f"{', '.join(map(str, sizes))} in {time.monotonic() - started:.1f} s")
    return merged(found)


_PROFILE_S = 8.0
_MACHINES_PROFILE_S = 16.0
"""On real machines, where slow ones among them would else see a round or two."""


def one_kind(cluster: Cluster) -> bool:
    """Whether all devices are of one kind and differ in speed alone, so that one core can play them."""
    kinds = [msgspec.structs.replace(device, speed=1.0, count=1, memory=None)
             for machine in cluster.machines for device in machine.devices]
    return all(kind == kinds[0] for kind in kinds)


def _beside(cluster: Cluster) -> tuple[float, ...]:
    """Shares of a core that the other devices of an emulated cluster keep busy while one computes."""
    if cluster.emulation is None:
        return ()
    shares = sorted(device.speed * cluster.emulation.cpu_share for machine in cluster.machines
                    for device in machine.devices for _ in range(device.count))
    return tuple(shares[:-1])
