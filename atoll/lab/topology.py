"""A cluster as cables, addresses and routes: everything the lab will build, as data.

Every machine has a network namespace; one more, the *core*, holds the switches and everything between islands. A *cable*
is a pair of network devices; each of its two directions is one directed segment of ``cluster.network``, and its rate is
enforced where packets leave into it. So two machines that share a segment share one device, and its counter is the
segment's byte truth. The core finds the next cable from the device a packet came in by, its source and its target.
"""

from __future__ import annotations

from atoll.cluster.network import Network
from atoll.errors import ClusterError
from atoll.records import Record

__all__ = ["CORE", "OWN_LATENCY_NS", "Cable", "End", "Layout", "Rule", "lay_out"]

CORE = ""
"""The namespace between the machines (machines have names, so no machine is called this)."""

OWN_LATENCY_NS = 125_000
"""A cable is a plain pair of virtual devices up to this latency (one way): their own delay stands for it. Above, packets
are held for the latency by the relay."""


class End(Record):
    """``namespace``: name of a machine, or ``CORE``."""

    namespace: str
    device: str


class Cable(Record):
    """``forward``: the segment that leaves ``first`` and arrives at ``second``; ``backward``: the other way."""

    first: End
    second: End
    forward: str
    backward: str
    forward_bytes_per_s: int
    backward_bytes_per_s: int
    forward_ns: int
    backward_ns: int

    @property
    def delayed(self) -> bool:
        return max(self.forward_ns, self.backward_ns) > OWN_LATENCY_NS


class Rule(Record):
    """In the core: what came in by ``came_in`` (from address ``source``, if given) for ``target`` leaves by ``leaves``."""

    came_in: str
    target: str
    leaves: str
    source: str | None = None


class Layout(Record):
    """``addresses``: by machine. ``routes``: in a machine's namespace, (machine, address, device) besides the default by
    "eth0". ``loops``: machine -> bytes/s of its link with itself. ``apart``: pairs of machines with no way between."""

    machines: tuple[str, ...]
    addresses: dict[str, str]
    cables: tuple[Cable, ...]
    rules: tuple[Rule, ...]
    routes: tuple[tuple[str, str, str], ...]
    loops: dict[str, int]
    apart: tuple[tuple[str, str], ...]
    longest_ns: int

    def leaving(self, segment: str) -> End:
        """The device whose sent bytes are those of ``segment``. Raises ``KeyError`` when there is none."""
        for cable in self.cables:
            if segment == cable.forward:
                return cable.first
            if segment == cable.backward:
                return cable.second
        machine = segment.partition(">")[0]
        if machine in self.loops and segment == f"{machine}>{machine}":
            return End(namespace=machine, device="lo")
        raise KeyError(segment)


def lay_out(network: Network) -> Layout:
    """What to build for ``network``. Addresses are 10.77.x.y: namespaces are private, so every lab may use the same."""
    machines = tuple(network.machines)
    addresses = {name: f"10.77.{(i + 1) // 250}.{(i + 1) % 250 + 1}" for i, name in enumerate(machines)}
    cables = tuple(_cables(network))
    leave = {cable.forward: cable.first for cable in cables} | {cable.backward: cable.second for cable in cables}
    arrive = {cable.forward: cable.second for cable in cables} | {cable.backward: cable.first for cable in cables}
    hops: dict[tuple[str, str], dict[str, set[str]]] = {}
    routes: list[tuple[str, str, str]] = []
    apart: list[tuple[str, str]] = []
    longest = 0
    for source in machines:
        for target in machines:
            if source == target:
                continue
            try:
                path = network.machine_path(source, target)
            except ClusterError:
                apart.append((source, target))
                continue
            longest = max(longest, path.latency_ns)
            first = leave[path.segments[0]]
            if first.device != "eth0":
                routes.append((source, addresses[target], first.device))
            for before, after in zip(path.segments, path.segments[1:], strict=False):
                ways = hops.setdefault((arrive[before].device, addresses[target]), {})
                ways.setdefault(leave[after].device, set()).add(addresses[source])
    loops = {name: network.capacity[f"{name}>{name}"] for name in machines if f"{name}>{name}" in network.capacity}
    return Layout(machines=machines, addresses=addresses, cables=cables, rules=tuple(_rules(hops)), routes=tuple(routes),
                  loops=loops, apart=tuple(apart), longest_ns=longest)


def _rules(hops: dict[tuple[str, str], dict[str, set[str]]]) -> list[Rule]:
    """Where all sources leave by the same device one rule does; else the fewer sources get rules of their own."""
    rules: list[Rule] = []
    for (came_in, target), ways in hops.items():
        usual = max(sorted(ways), key=lambda device: len(ways[device]))
        rules.append(Rule(came_in=came_in, target=target, leaves=usual))
        rules += [Rule(came_in=came_in, target=target, leaves=device, source=source)
                  for device, sources in ways.items() if device != usual for source in sorted(sources)]
    return rules


def _cables(network: Network) -> list[Cable]:
    cluster = network.cluster
    found: list[Cable] = []
    for i, machine in enumerate(cluster.machines):
        found.append(_cable(network, End(namespace=machine.name, device="eth0"), End(namespace=CORE, device=f"p{i}"),
                            f"{machine.name}>{machine.island}", f"{machine.island}>{machine.name}"))
    for i, link in enumerate(cluster.links):
        first, second = link.between
        if first == second:
            continue
        ends = End(namespace=CORE, device=f"k{i}a"), End(namespace=CORE, device=f"k{i}b")
        both = [network.machines[end].island for end in link.between if end in network.machines]
        if len(both) == 2 and both[0] == both[1]:
            ends = End(namespace=first, device=f"k{i}a"), End(namespace=second, device=f"k{i}b")
        found.append(_cable(network, *ends, f"{first}>{second}", f"{second}>{first}"))
    for i, segment in enumerate(cluster.segments):
        found.append(_cable(network, End(namespace=CORE, device=f"u{i}a"), End(namespace=CORE, device=f"u{i}b"),
                            f"{segment.name}:up", f"{segment.name}:down"))
    return found


def _cable(network: Network, first: End, second: End, forward: str, backward: str) -> Cable:
    return Cable(first=first, second=second, forward=forward, backward=backward,
                 forward_bytes_per_s=network.capacity[forward], backward_bytes_per_s=network.capacity[backward],
                 forward_ns=network.latency_ns[forward], backward_ns=network.latency_ns[backward])
