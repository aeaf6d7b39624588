"""From what was measured to ``cluster.yaml``: machines joined by fast links become islands, the rest become links.

The text is a valid document; what was not measured is left out or, where the document needs it, assumed and said so in a
comment beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from atoll import records
from atoll.cluster.cluster import Cluster, Island, Link, Machine
from atoll.cluster.network import validate
from atoll.runtime.probe import MachineFacts, machine_of, rounded
from atoll.runtime.probe_links import LinkFacts
from atoll.units import Bandwidth, Duration, format_bandwidth, format_bytes, format_duration, format_flop_rate

__all__ = ["FAST_BYTES_PER_S", "FAST_NS", "cluster_document", "cluster_of", "islands_of"]

FAST_BYTES_PER_S = 500 * 10**6 // 8
FAST_NS = 2_000_000
"""Two machines are of one island when each reaches the other at this rate or more within this latency or less."""

ASSUMED_PORT_BYTES_PER_S = 10**9 // 8


def islands_of(machines: Sequence[str], links: Sequence[LinkFacts]) -> list[list[str]]:
    """Machines in groups: whoever is joined, directly or through others, by fast links."""
    group = {name: name for name in machines}

    def root(name: str) -> str:
        while group[name] != name:
            name = group[name]
        return name

    for link in links:
        if _fast(link):
            group[root(link.second)] = root(link.first)
    found: dict[str, list[str]] = {}
    for name in machines:
        found.setdefault(root(name), []).append(name)
    return list(found.values())


def _fast(link: LinkFacts) -> bool:
    return min(link.forward_bytes_per_s, link.backward_bytes_per_s) >= FAST_BYTES_PER_S and link.latency_ns <= FAST_NS


def cluster_of(facts: Sequence[MachineFacts], links: Sequence[LinkFacts], addresses: Mapping[str, str],
               name: str = "measured") -> tuple[Cluster, dict[str, str]]:
    """The cluster, and remarks by place ("islands.site1", "links[0]") for what the figures do not say themselves."""
    groups = islands_of([machine.name for machine in facts], links)
    names = {machine: f"site{number}" for number, group in enumerate(groups, 1) for machine in group}
    remarks: dict[str, str] = {}
    islands = {names[group[0]]: _island(names[group[0]], group, facts, links, remarks) for group in groups}
    machines = tuple(machine_of(machine, names[machine.name], addresses.get(machine.name)) for machine in facts)
    cluster = Cluster(name=name, islands=islands, machines=machines, links=_links(names, links, remarks))
    validate(cluster, source="measured cluster")
    return cluster, remarks


def _island(name: str, group: Sequence[str], facts: Sequence[MachineFacts], links: Sequence[LinkFacts],
            remarks: dict[str, str]) -> Island:
    inside = [link for link in links if link.first in group and link.second in group]
    if inside:
        rates = [rate for link in inside for rate in (link.forward_bytes_per_s, link.backward_bytes_per_s)]
        remarks[f"islands.{name}"] = f"median over {len(inside)} measured pairs" if len(inside) > 1 else "measured"
        return Island(bandwidth=_bandwidth(statistics.median(rates)),
                      latency=Duration(rounded(statistics.median(link.latency_ns for link in inside))))
    ports = [machine.port_bytes_per_s for machine in facts if machine.name in group and machine.port_bytes_per_s]
    outside = [rate for link in links if {link.first, link.second} & set(group)
               for rate in (link.forward_bytes_per_s, link.backward_bytes_per_s)]
    if ports:
        remarks[f"islands.{name}"] = "not measured: what the network adapter says of itself"
    else:
        remarks[f"islands.{name}"] = "not measured: assumed; correct it if you know the adapter"
    return Island(bandwidth=Bandwidth(max([*ports, *outside] if ports else [ASSUMED_PORT_BYTES_PER_S, *outside])))


def _links(names: Mapping[str, str], links: Sequence[LinkFacts], remarks: dict[str, str]) -> tuple[Link, ...]:
    """One link for each pair of islands: all pairs of machines between them are taken to share it, so it is as fast as the
    fastest of them was alone."""
    together: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for link in links:
        first, second = names[link.first], names[link.second]
        there, back = link.forward_bytes_per_s, link.backward_bytes_per_s
        if first < second:
            together.setdefault((first, second), []).append((there, back, link.latency_ns))
        elif second < first:
            together.setdefault((second, first), []).append((back, there, link.latency_ns))
    found: list[Link] = []
    for pair, rows in together.items():
        if len(rows) > 1:
            remarks[f"links[{len(found)}]"] = f"the fastest of {len(rows)} pairs, measured one at a time"
        found.append(Link(between=pair, bandwidth=_bandwidth(max(row[0] for row in rows)),
                          bandwidth_back=_bandwidth(max(row[1] for row in rows)),
                          latency=Duration(rounded(statistics.median(row[2] for row in rows)))))
    return tuple(found)


def cluster_document(facts: Sequence[MachineFacts], links: Sequence[LinkFacts] = (), addresses: Mapping[str, str] | None = None,
                     *, failed: Sequence[str] = (), name: str = "measured") -> str:
    """The text of ``cluster.yaml``: valid, in human units, with comments for what was assumed or could not be measured."""
    cluster, remarks = cluster_of(facts, links, addresses or {}, name)
    lines = ["# Written by atoll probe. Rates of devices are measured matrix products; efficiency is a guess that a profile",
             "# replaces. Pairs of machines were measured one at a time: if several share one line to the world, say so under",
             "# segments: [{name: uplink, machines: [...], up: 50 Mbit/s, down: 250 Mbit/s}].",
             f"name: {cluster.name}", "islands:"]
    for island_name, island in cluster.islands.items():
        latency = f", latency: {_written(format_duration(island.latency))}" if island.latency else ""
        lines.append(f"  {island_name}: {{bandwidth: {format_bandwidth(island.bandwidth)}{latency}}}  "
                     f"# {remarks[f'islands.{island_name}']}")
    lines.append("machines:")
    for machine, known in zip(cluster.machines, facts, strict=True):
        lines += _machine_lines(machine, known)
    if cluster.links:
        lines.append("links:")
    for index, link in enumerate(cluster.links):
        remark = remarks.get(f"links[{index}]")
        back = f", bandwidth_back: {format_bandwidth(link.bandwidth_back)}" if link.bandwidth_back is not None else ""
        lines.append(f"  - {{between: [{', '.join(link.between)}], bandwidth: {format_bandwidth(link.bandwidth)}{back}, "
                     f"latency: {_written(format_duration(link.latency))}}}" + (f"  # {remark}" if remark else ""))
    lines += [f"# not measured: {sentence}".replace("\n", " ") for sentence in failed]
    text = "\n".join(lines) + "\n"
    validate(records.parse(text, Cluster, source="measured cluster"), source="measured cluster")
    return text


def _machine_lines(machine: Machine, facts: MachineFacts) -> list[str]:
    lines = [f"  - name: {machine.name}", f"    island: {machine.island}"]
    if machine.address is not None:
        lines.append(f'    address: "{machine.address}"')
    else:
        lines.append('    # address: "host:7700"   # how others reach it; left out: it can only dial out')
    lines.append(f"    host_memory: {format_bytes(machine.host_memory or 0)}")
    if machine.disk_bandwidth is not None:
        lines.append(f"    disk_bandwidth: {machine.disk_bandwidth / 1e6:.0f} MB/s")
    lines.append("    devices:")
    for device, known in zip(machine.devices, facts.devices, strict=True):
        rates = ", ".join(f"{dtype}: {format_flop_rate(rate)}" for dtype, rate in device.flops.items())
        cores = f", all {facts.cores} cores" if known.backend == "cpu" else ""
        lines += [f"      - kind: {device.kind}   # {known.name}{cores}",
                  f"        count: {device.count}", f"        memory: {format_bytes(device.memory or 0)}",
                  f"        flops: {{{rates}}}", f"        memory_bandwidth: {(device.memory_bandwidth or 0) / 1e9:.3g} GB/s",
                  f"        efficiency: {device.efficiency}"]
    return lines + [f"    # {note}" for note in facts.notes]


def _bandwidth(bytes_per_s: float) -> Bandwidth:
    """Rounded to three digits in bits, as people write it."""
    return Bandwidth(rounded(bytes_per_s * 8) // 8)


def _written(text: str) -> str:
    return text.replace("µs", "us")
