"""Which one change to the cluster would help most: a faster link, a faster device, more memory.

Every change is tried on a copy of the cluster with the fast estimate (before and after by the same estimate), so the gain is
that of the best plan for the changed cluster, not of today's plan. A whole search a change would take too long on a large
cluster, so arrangements are narrowed down first (see ``advise``).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from atoll.cluster.catalogue import resolve
from atoll.cluster.cluster import Cluster, Device
from atoll.plan.job import Job
from atoll.planner.search import draft_candidates, one_of_each
from atoll.planner.times import Problem
from atoll.records import Record
from atoll.units import Bandwidth, Bytes, Duration, format_bandwidth, format_bytes, format_duration

__all__ = ["Advice", "advise"]


class Advice(Record):
    """``gain``: step time before / after - 1, by the estimate."""

    change: str
    gain: float


def advise(problem: Problem, job: Job, seconds: float = 4.0, clock: Callable[[], float] = time.monotonic) -> tuple[Advice, ...]:
    """Changes that help, the best first: doubling each link and uplink, halving each latency, doubling the memory and the
    speed of each device. A change of links or speeds is tried on the best arrangements of today and the best of every
    shape; one of memory on all, since it makes new ones possible. Nothing new is tried after ``seconds``.
    """
    ends = clock() + seconds
    drafts, _, _ = draft_candidates(problem, job)
    if not drafts:
        return ()
    before = drafts[0].estimate_ns
    chosen = [*drafts[:_BEST], *one_of_each(drafts[_BEST:], drafts[:_BEST])]
    known = list(dict.fromkeys(tuple(draft.ranks for draft in candidate.replicas) for candidate in chosen))
    found = []
    for change, cluster, of_memory in _changes(problem.cluster):
        if clock() > ends:
            break
        changed = Problem(problem.graph, cluster, problem.precision, problem.profile, problem.memory_share)
        after, _, _ = draft_candidates(changed, job, among=None if of_memory else known)
        if after and before / after[0].estimate_ns > 1.01:
            found.append(Advice(change=change, gain=before / after[0].estimate_ns - 1))
    return tuple(sorted(found, key=lambda advice: -advice.gain))


_BEST = 40


def _changes(cluster: Cluster) -> list[tuple[str, Cluster, bool]]:
    """(sentence, the cluster after it, whether it is one of memory), links first."""
    return [*((text, changed, False) for text, changed in _of_links(cluster)), *_of_devices(cluster)]


def _of_links(cluster: Cluster) -> list[tuple[str, Cluster]]:
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
    return changes


def _of_devices(cluster: Cluster) -> list[tuple[str, Cluster, bool]]:
    """Machine by machine in a small cluster, kind by kind in a large one; speeds before memories."""
    replace = msgspec.structs.replace
    fast: list[tuple[str, Cluster, bool]] = []
    large: list[tuple[str, Cluster, bool]] = []
    groups: dict[tuple[str, str], list[Device]] = {}
    for machine in cluster.machines:
        for device in machine.devices:
            where = machine.name if len(cluster.machines) <= _FEW_MACHINES else "every machine"
            groups.setdefault((where, f"{device.kind} {device.memory} {device.speed}"), []).append(device)
    for (where, _), devices in groups.items():
        kind, memory = devices[0].kind, int(resolve(devices[0]).memory or 0)
        count = sum(device.count for device in devices)
        name = f"{where}: {f'{count} x ' if count > 1 else ''}{kind}"
        sizes = f"{format_bytes(2 * memory)} instead of {format_bytes(memory)}"
        faster = {id(device): replace(device, speed=2 * device.speed) for device in devices}
        larger = {id(device): replace(device, memory=Bytes(2 * memory)) for device in devices}
        fast.append((f"{name} twice as fast", _with(cluster, faster), False))
        large.append((f"{name} with {sizes}", _with(cluster, larger), True))
    return [*fast, *large]


_FEW_MACHINES = 12


def _with(cluster: Cluster, changed: dict[int, Device]) -> Cluster:
    """``changed``: new devices by the identity of those they replace."""
    replace = msgspec.structs.replace
    return replace(cluster, machines=tuple(
        replace(machine, devices=tuple(changed.get(id(device), device) for device in machine.devices))
        for machine in cluster.machines))
