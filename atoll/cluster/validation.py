"""Whether a cluster as written down can exist; every refusal is one sentence with the place and the remedy."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator

from atoll import records
from atoll.cluster.catalogue import resolve
from atoll.cluster.cluster import Cluster, Machine
from atoll.errors import ClusterError

__all__ = ["load_cluster", "near", "validate"]

_MOST_DEVICES = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:]+\]|[^:\s]+):([0-9]{1,5})")


def near(name: str, known: Iterable[str]) -> str:
    """The end of a refusal: what ``name`` may have meant, and what is allowed (at most twelve names)."""
    names = list(known)
    matches = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(match) for match in matches)}? " if matches else ""
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return f"{hint}known: {shown or 'none'}"


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Read and validate ``cluster.yaml``. Raises ``DocumentError`` (no cluster) or ``ClusterError`` (an impossible one)."""
    cluster = records.load(path, Cluster)
    validate(cluster, source=str(path))
    return cluster


def validate(cluster: Cluster, *, source: str = "cluster") -> None:
    """Raise ``ClusterError`` for the first thing that is wrong: place, what was found, what to change."""
    for sentence in problems(cluster):
        raise ClusterError(f"{source}: {sentence}")


def problems(cluster: Cluster) -> Iterator[str]:
    """All that is wrong with ``cluster``, one sentence each, in the order of the document."""
    yield from _islands(cluster)
    for index, machine in enumerate(cluster.machines):
        yield from _machine(cluster, index, machine)
    yield from _names(cluster)
    yield from _links(cluster)
    yield from _segments(cluster)
    if cluster.emulation is not None and not 0 < cluster.emulation.cpu_share <= 64:
        yield (f"emulation.cpu_share: found {cluster.emulation.cpu_share}, expected the number of cores that stand for "
               "a device of speed 1.0, such as 0.5")


def _islands(cluster: Cluster) -> Iterator[str]:
    if not cluster.machines:
        yield "machines: the cluster has no machine; list at least one with name, island and devices"
    count = sum(max(0, device.count) for machine in cluster.machines for device in machine.devices)
    if count > _MOST_DEVICES:
        yield f"machines: {count} devices in all, more than the {_MOST_DEVICES} that can be planned for; correct their counts"
    for name, island in cluster.islands.items():
        if not _NAME.fullmatch(name):
            yield f"islands.{name}: a name consists of letters, digits, '.', '_' and '-'; rename it"
        if island.bandwidth <= 0:
            yield (f"islands.{name}.bandwidth: found 0, nothing would ever arrive; write the measured rate, such as "
                   "'1 Gbit/s'")


def _machine(cluster: Cluster, index: int, machine: Machine) -> Iterator[str]:
    place = f"machines[{index}] ({machine.name})"
    if not _NAME.fullmatch(machine.name):
        yield f"{place}.name: a name consists of letters, digits, '.', '_' and '-'; rename it"
    if machine.island not in cluster.islands:
        yield f"{place}.island: there is no island {machine.island!r}; {near(machine.island, cluster.islands)}"
    if machine.address is not None:
        match = _ADDRESS.fullmatch(machine.address)
        if match is None or not 0 < int(match.group(2)) < 65536:
            yield f"{place}.address: found {machine.address!r}, expected 'host:port' such as 'lab.example.org:7700'"
    for field in ("host_memory", "disk_bandwidth"):
        if getattr(machine, field) == 0:
            yield f"{place}.{field}: found 0; write what was measured or leave the field out"
    if not machine.devices:
        yield f"{place}.devices: the machine has no device; list at least one, such as {{kind: cpu-core}}"
    for number, device in enumerate(machine.devices):
        where = f"{place}.devices[{number}]"
        if device.count < 1:
            yield f"{where}.count: found {device.count}, expected at least 1 (or leave the device out)"
        if not 0 < device.speed < float("inf"):
            yield f"{where}.speed: found {device.speed}, expected more than 0 (1.0 is the speed of the catalogue)"
        if device.efficiency is not None and not 0 < device.efficiency <= 1:
            yield f"{where}.efficiency: found {device.efficiency}, expected more than 0 and at most 1"
        if device.memory is not None and device.memory <= 0:
            yield f"{where}.memory: found 0, nothing fits into it; write a size such as '16 GiB'"
        if device.memory_bandwidth is not None and device.memory_bandwidth <= 0:
            yield f"{where}.memory_bandwidth: found 0; write the measured rate or leave it to the catalogue"
        for dtype, rate in device.flops.items():
            if rate <= 0:
                yield f"{where}.flops.{dtype}: found 0; write the measured rate or leave it to the catalogue"
        try:
            resolve(device)
        except ClusterError as error:
            yield f"{where}: {error}"


def _names(cluster: Cluster) -> Iterator[str]:
    seen: dict[str, str] = dict.fromkeys(cluster.islands, "an island")
    for index, machine in enumerate(cluster.machines):
        if machine.name in seen:
            yield (f"machines[{index}].name: {machine.name!r} is already the name of {seen[machine.name]}; "
                   "machines, islands and segments need different names")
        seen.setdefault(machine.name, f"machine {index}")
    for index, segment in enumerate(cluster.segments):
        if segment.name in seen:
            yield (f"segments[{index}].name: {segment.name!r} is already the name of {seen[segment.name]}; "
                   "machines, islands and segments need different names")
        seen.setdefault(segment.name, f"segment {index}")


def _links(cluster: Cluster) -> Iterator[str]:
    machines = {machine.name: machine.island for machine in cluster.machines}
    ends = [*cluster.islands, *machines]
    seen: dict[frozenset[str], int] = {}
    for index, link in enumerate(cluster.links):
        place = f"links[{index}]"
        for end in link.between:
            if end not in cluster.islands and end not in machines:
                yield f"{place}.between: there is no island or machine {end!r}; {near(end, ends)}"
        first, second = link.between
        if first == second:
            if first in cluster.islands:
                yield f"{place}.between: joins island {first!r} with itself; write islands.{first}.bandwidth instead"
        elif machines.get(first) == second or machines.get(second) == first:
            yield f"{place}.between: one of {first!r} and {second!r} is the other's island; give its bandwidth instead"
        pair = frozenset(link.between)
        if pair in seen:
            yield f"{place}.between: {first!r} and {second!r} are already joined by links[{seen[pair]}]; keep one of them"
        seen.setdefault(pair, index)
        if link.bandwidth <= 0:
            yield f"{place}.bandwidth: found 0, nothing would arrive; write the measured rate or leave the link out"
        if link.bandwidth_back is not None and link.bandwidth_back <= 0:
            yield (f"{place}.bandwidth_back: found 0, no answer would ever arrive; write the measured rate or leave "
                   "the field out")
        if link.price_per_gb < 0:
            yield f"{place}.price_per_gb: found {link.price_per_gb}, expected 0 or more"


def _segments(cluster: Cluster) -> Iterator[str]:
    machines = [machine.name for machine in cluster.machines]
    for index, segment in enumerate(cluster.segments):
        place = f"segments[{index}] ({segment.name})"
        if not _NAME.fullmatch(segment.name):
            yield f"{place}.name: a name consists of letters, digits, '.', '_' and '-'; rename it"
        if not segment.machines:
            yield f"{place}.machines: no machine uses the segment; list those behind it or leave it out"
        for name in segment.machines:
            if name not in machines:
                yield f"{place}.machines: there is no machine {name!r}; {near(name, machines)}"
        if len(set(segment.machines)) < len(segment.machines):
            yield f"{place}.machines: a machine is listed twice; keep it once"
        for field in ("up", "down"):
            if getattr(segment, field) <= 0:
                yield f"{place}.{field}: found 0, nothing would ever pass; write the measured rate"
