"""Over which directed segments, at which latency, does a message from one worker reach another?

A *directed segment* is a stretch of road in one direction that everything on it shares. Their names:

- ``a1>reef``, ``reef>a1``: the port of machine a1 into the switch of its island, and back;
- ``reef>lagoon``: a link in one direction (its ends are islands or machines; ``a1>a1``: a link of a machine with itself
  limits what its own workers hand each other);
- ``uplink:up``, ``uplink:down``: a ``Segment``, crossed when a machine that it lists sends out of, or receives from
  outside, its island.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from atoll.cluster.cluster import Cluster, Device, Machine
from atoll.cluster.validation import load_cluster, near, validate
from atoll.errors import ClusterError
from atoll.records import Record

__all__ = ["LOCAL_BYTES_PER_S", "LOCAL_MESSAGE_NS", "MESSAGE_NS", "Network", "Path", "Worker", "load_cluster",
           "validate", "workers"]

MESSAGE_NS = 100_000
"""Fixed cost of a message between machines, where none was measured (a gRPC call, framing, two thread wake-ups)."""
LOCAL_MESSAGE_NS = 30_000
"""The same between two workers of one machine."""
LOCAL_BYTES_PER_S = 10 * 10**9
"""Hand-over inside one machine, where no link of the machine with itself says otherwise: a copy through host memory."""


class Worker(Record):
    """One process on one device. ``device``: ``count`` 1, else as in the document (see ``catalogue.resolve``)."""

    name: str
    machine: str
    island: str
    device: Device


class Path(Record):
    """The way of a message. ``segments``: in the order of travel (none inside one machine). ``latency_ns``: one way,
    from the first byte sent to the first byte received on an idle road. ``message_ns``: fixed cost of every message
    besides."""

    segments: tuple[str, ...]
    latency_ns: int
    message_ns: int


def workers(cluster: Cluster) -> tuple[Worker, ...]:
    """All workers in the order of the document: "a1" for a machine with one device, "a1:0", "a1:1" for several."""
    found: list[Worker] = []
    for machine in cluster.machines:
        devices = [_single(device) for device in machine.devices for _ in range(device.count)]
        for index, device in enumerate(devices):
            name = machine.name if len(devices) == 1 else f"{machine.name}:{index}"
            found.append(Worker(name=name, machine=machine.name, island=machine.island, device=device))
    return tuple(found)


def _single(device: Device) -> Device:
    import msgspec

    return device if device.count == 1 else msgspec.structs.replace(device, count=1)


class Network:
    """Answers for one cluster; built once, then only read.

    ``workers``: by name, in the order of the document. ``capacity``: bytes/s of each directed segment.
    ``latency_ns``: of each directed segment; the latency of a path is their sum (an island's lies half on either port).
    ``local_bytes_per_s``: rate of a hand-over inside one machine.
    """

    def __init__(self, cluster: Cluster) -> None:
        validate(cluster, source=cluster.name)
        self.cluster = cluster
        self.workers: dict[str, Worker] = {worker.name: worker for worker in workers(cluster)}
        self.machines: dict[str, Machine] = {machine.name: machine for machine in cluster.machines}
        self.local_bytes_per_s = LOCAL_BYTES_PER_S
        self.capacity: dict[str, int] = {}
        self.latency_ns: dict[str, int] = {}
        self._links: dict[tuple[str, str], str] = {}
        self._uplinks: dict[str, list[str]] = {name: [] for name in self.machines}
        self._routes: dict[tuple[str, str], tuple[str, ...]] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._collect()

    def _collect(self) -> None:
        cluster = self.cluster
        for machine in cluster.machines:
            island = cluster.islands[machine.island]
            out_ns = int(island.latency) // 2
            self._segment(f"{machine.name}>{machine.island}", island.bandwidth, out_ns)
            self._segment(f"{machine.island}>{machine.name}", island.bandwidth, int(island.latency) - out_ns)
        for link in cluster.links:
            first, second = link.between
            self._segment(f"{first}>{second}", link.bandwidth, link.latency)
            self._links[first, second] = f"{first}>{second}"
            if first != second:
                back = link.bandwidth if link.bandwidth_back is None else link.bandwidth_back
                self._segment(f"{second}>{first}", back, link.latency)
                self._links[second, first] = f"{second}>{first}"
        for segment in cluster.segments:
            self._segment(f"{segment.name}:up", segment.up, segment.latency)
            self._segment(f"{segment.name}:down", segment.down, segment.latency)
            for name in segment.machines:
                self._uplinks[name].append(segment.name)

    def _segment(self, name: str, bytes_per_s: int, latency_ns: int) -> None:
        self.capacity[name] = int(bytes_per_s)
        self.latency_ns[name] = int(latency_ns)

    def worker(self, name: str) -> Worker:
        """Raises ``ClusterError`` with near names when there is no such worker."""
        found = self.workers.get(name)
        if found is None:
            raise ClusterError(f"cluster {self.cluster.name}: there is no worker {name!r}; {near(name, self.workers)}")
        return found

    def island(self, worker: str) -> str:
        return self.worker(worker).island

    def path(self, source: str, target: str) -> Path:
        """The way from worker ``source`` to worker ``target``. Raises ``ClusterError`` if their islands are not joined."""
        return self.machine_path(self.worker(source).machine, self.worker(target).machine)

    def machine_path(self, source: str, target: str) -> Path:
        """The way from machine to machine: the port, uplinks, links, uplinks, the port.

        A link between the two machines is taken before one between a machine and an island, and that before links
        between islands; without a direct link, the sequence of links with the smallest latency. Inside one island a
        link between two machines is a cable of their own and uses no ports.
        """
        found = self._paths.get((source, target))
        if found is None:
            segments = self._travel(source, target)
            found = Path(segments=segments, latency_ns=sum(self.latency_ns[name] for name in segments),
                         message_ns=LOCAL_MESSAGE_NS if source == target else MESSAGE_NS)
            self._paths[source, target] = found
        return found

    def _travel(self, source: str, target: str) -> tuple[str, ...]:
        direct = self._links.get((source, target))
        if source == target:
            return () if direct is None else (direct,)
        home, away = self.machines[source].island, self.machines[target].island
        if home == away:
            return (f"{source}>{home}", f"{home}>{target}") if direct is None else (direct,)
        up = tuple(f"{name}:up" for name in self._uplinks[source])
        down = tuple(f"{name}:down" for name in reversed(self._uplinks[target]))
        return (f"{source}>{home}", *up, *self._between(source, target), *down, f"{away}>{target}")

    def _between(self, source: str, target: str) -> tuple[str, ...]:
        home, away = self.machines[source].island, self.machines[target].island
        for ends in ((source, target), (source, away), (home, target), (home, away)):
            if ends in self._links:
                return (self._links[ends],)
        found = self._routes.get((source, target))
        if found is None:
            found = _cheapest(self._links, self.latency_ns, {source, home}, {target, away}, set(self.cluster.islands))
            self._routes[source, target] = found
        if not found:
            raise ClusterError(f"cluster {self.cluster.name}: no link joins island {home!r} (machine {source}) with "
                               f"island {away!r} (machine {target}); add one to links: {{between: [{home}, {away}], "
                               "bandwidth: ..., latency: ...}")
        return found


def _cheapest(links: Mapping[tuple[str, str], str], latency_ns: Mapping[str, int], starts: set[str], ends: set[str],
              through: set[str]) -> tuple[str, ...]:
    """The links from any of ``starts`` to any of ``ends`` with the smallest latency, then the fewest, then by name;
    only nodes of ``through`` (islands: machines do not forward) may lie between. Empty when there is no way."""
    queue: list[tuple[int, int, tuple[str, ...], str]] = [(0, 0, (), start) for start in sorted(starts)]
    done: set[str] = set()
    while queue:
        cost, hops, way, node = heapq.heappop(queue)
        if node in ends:
            return way
        if node in done or (hops and node not in through):
            continue
        done.add(node)
        for (first, second), name in links.items():
            if first == node and second not in done and second != first:
                heapq.heappush(queue, (cost + latency_ns[name], hops + 1, (*way, name), second))
    return ()
