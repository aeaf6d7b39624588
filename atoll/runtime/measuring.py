"""Measure this machine's device for one job, before there is a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from atoll.cluster.calibration import Calibration
from atoll.cluster.catalogue import resolve
from atoll.cluster.cluster import Cluster
from atoll.cluster.network import Network
from atoll.plan.job import PRECISIONS, Job
from atoll.records import from_plain
from atoll.runtime.assembly import device_of, limit_threads
from atoll.runtime.capture.stage import Captured, capture
from atoll.runtime.control import Measure
from atoll.runtime.profile import profile
from atoll.runtime.world import Stop

__all__ = ["measure", "measure_device"]


def measure(request: Measure, worker: str, stop: Stop) -> tuple[Calibration, ...]:
    """What the head asked of ``worker``, which this is. Raises ``StoppedError`` when the run ends meanwhile."""
    job = from_plain(request.job, Job, source="the job as the head sent it")
    cluster = from_plain(request.cluster, Cluster, source="the cluster as the head sent it")
    captured = capture(job.model, job.sequence_length, 1, PRECISIONS[job.precision].compute)
    return measure_device(job, captured, cluster, worker, request.sizes, request.vocabulary, seconds=request.seconds,
                          check=stop.check)


def measure_device(job: Job, captured: Captured, cluster: Cluster, worker: str, sizes: Sequence[int], vocabulary: int, *,
                   seconds: float, check: Callable[[], None], beside: Sequence[float] = ()) -> tuple[Calibration, ...]:
    """Profile the device of ``worker`` for microbatches of each of ``sizes``, on random tokens; see ``profile.profile``."""
    network = Network(cluster)
    device = network.worker(worker).device
    threads = torch.get_num_threads()
    limit_threads(cluster, device)
    generator = torch.Generator().manual_seed(0)
    batches = {}
    for samples in sizes:
        block = torch.randint(0, vocabulary, (samples, job.sequence_length + 1), generator=generator)
        batches[samples] = {"tokens": block[:, :-1].contiguous(), "targets": block[:, 1:].contiguous()}
    try:
        return profile(captured, PRECISIONS[job.precision], batches, device_of(network, worker), seconds, check=check,
                       kind=resolve(device).kind, beside=beside,
                       speed=None if cluster.emulation else device.speed)
    finally:
        torch.set_num_threads(threads)
