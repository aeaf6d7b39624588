"""Which one change to the cluster would help most: a faster link, a faster device, more memory.

Every change is tried on a copy of the cluster with the fast estimate (before and after by the same estimate), so the gain is
that of the best plan for the changed cluster, not of today's plan.
"""

from __future__ import annotations

import msgspec

from atoll.cluster.calibration import Calibration
from atoll.cluster.catalogue import resolve
from atoll.cluster.cluster import Cluster
from atoll.plan.job import Job
from atoll.planner.search import draft_candidates
from atoll.planner.times import Problem
from atoll.records import Record
from atoll.units import Bandwidth, Bytes, Duration, format_bandwidth, format_bytes, format_duration

__all__ = ["Advice", "advise"]


class Advice(Record):
    """``gain``: step time before / after - 1, by the estimate."""

    change: str
    gain: float


def advise(problem: Problem, job: Job, drafts: int = 400) -> tuple[Advice, ...]:
    """Changes that help, the best first. Tries doubling each link and uplink, halving each latency, doubling the memory and
    the speed of each kind of device. Cost: one coarse search a change."""
    before = _best(problem, job, drafts)
    if before is None:
        return ()
    found = []
    calibrations = tuple(problem.calibrations.values())
    for change, cluster in _changes(problem.cluster):
        after = _best(_changed(problem, cluster, calibrations), job, drafts)
        if after is not None and before / after > 1.01:
            found.append(Advice(change=change, gain=before / after - 1))
    return tuple(sorted(found, key=lambda advice: -advice.gain))


def _changed(problem: Problem, cluster: Cluster, calibrations: tuple[Calibration, ...]) -> Problem:
    return Problem(problem.graph, cluster, problem.precision, calibrations, problem.memory_share)


def _best(problem: Problem, job: Job, drafts: int) -> float | None:
    found, _, _ = draft_candidates(problem, job, limit=drafts)
    return found[0].estimate_ns if found else None


def _changes(cluster: Cluster) -> list[tuple[str, Cluster]]:
    changes: list[tuple[str, Cluster]] = []
    replace = msgspec.structs.replace
    for position, link in enumerate(cluster.links):
        ends = " - ".join(link.between)
        faster = replace(link, bandwidth=Bandwidth(2 * link.bandwidth),
                         bandwidth_back=None if link.bandwidth_back is None else Bandwidth(2 * link.bandwidth_back))
        changes.append((f"link {ends}: {format_bandwidth(link.bandwidth)} to {format_bandwidth(2 * link.bandwidth)}",
                        replace(cluster, links=(*cluster.links[:position], faster, *cluster.links[position + 1:]))))
        if link.latency:
            nearer = replace(link, latency=Duration(link.latency // 2))
            changes.append((f"link {ends}: latency {format_duration(link.latency)} to {format_duration(link.latency / 2)}",
                            replace(cluster, links=(*cluster.links[:position], nearer, *cluster.links[position + 1:]))))
    for position, segment in enumerate(cluster.segments):
        wider = replace(segment, up=Bandwidth(2 * segment.up), down=Bandwidth(2 * segment.down))
        changes.append((f"uplink {segment.name}: {format_bandwidth(segment.up)} to {format_bandwidth(2 * segment.up)}",
                        replace(cluster, segments=(*cluster.segments[:position], wider, *cluster.segments[position + 1:]))))
    for name, island in cluster.islands.items():
        wider_island = replace(island, bandwidth=Bandwidth(2 * island.bandwidth))
        changes.append((f"island {name}: {format_bandwidth(island.bandwidth)} to {format_bandwidth(2 * island.bandwidth)}",
                        replace(cluster, islands={**cluster.islands, name: wider_island})))
    for machine in cluster.machines:
        for device in machine.devices:
            count = f"{device.count} x " if device.count > 1 else ""
            memory = int(resolve(device).memory or 0)
            sizes = f"{format_bytes(2 * memory)} instead of {format_bytes(memory)}"
            changes.append((f"{machine.name}: {count}{device.kind} twice as fast",
                            _with_device(cluster, machine.name, device, replace(device, speed=2 * device.speed))))
            changes.append((f"{machine.name}: {count}{device.kind} with {sizes}",
                            _with_device(cluster, machine.name, device, replace(device, memory=Bytes(2 * memory)))))
    return changes


def _with_device(cluster: Cluster, name: str, old: object, new: object) -> Cluster:
    replace = msgspec.structs.replace
    machines = tuple(
        replace(machine, devices=tuple(new if device is old else device for device in machine.devices))  # type: ignore[misc]
        if machine.name == name else machine for machine in cluster.machines)
    return replace(cluster, machines=machines)
