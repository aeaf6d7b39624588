"""What exists: machines with devices, islands of fast links, the slow links between them, shared segments.

``Cluster`` is the document (cluster.yaml). ``Network`` answers the one question everybody asks of it: over which
directed segments, at which latency, does a message from one worker reach another.
"""

from __future__ import annotations

from atoll.records import Record
from atoll.units import Bandwidth, Bytes, Duration, FlopRate, Rate

__all__ = ["Cluster", "Device", "Emulation", "Island", "Link", "Machine", "Segment"]


class Device(Record):
    """One accelerator or CPU that runs one worker.

    ``kind`` names an entry of the catalogue, whose figures fill what is left out here. ``speed`` scales all rates
    (0.5: half as fast). ``efficiency`` is the fraction of the peak that real operators reach (lambda of the FusionLLM
    workload estimate). ``launch``: fixed cost of one instruction.
    """

    kind: str
    count: int = 1
    speed: float = 1.0
    memory: Bytes | None = None
    flops: dict[str, FlopRate] = {}
    memory_bandwidth: Bandwidth | None = None
    efficiency: float | None = None
    launch: Duration | None = None
    watts: Rate | None = None
    price_per_hour: Rate | None = None


class Machine(Record):
    """``address``: "host:port" under which other machines reach it (none: emulated, or dial-out only)."""

    name: str
    island: str
    devices: tuple[Device, ...]
    address: str | None = None
    host_memory: Bytes | None = None
    disk_bandwidth: Bandwidth | None = None


class Island(Record):
    """Machines joined by fast links: each has a port of ``bandwidth`` each way into a switch; ``latency`` one way."""

    bandwidth: Bandwidth
    latency: Duration = Duration(0)


class Link(Record):
    """A path between two ends (islands or machines). All pairs of machines that use it share its bandwidth.

    ``bandwidth``: first end to second; ``bandwidth_back``: second to first (the same if left out). ``latency``: one way.
    """

    between: tuple[str, str]
    bandwidth: Bandwidth
    bandwidth_back: Bandwidth | None = None
    latency: Duration = Duration(0)
    kind: str = "internet"
    price_per_gb: float = 0.0


class Segment(Record):
    """A bottleneck that machines share whenever they leave their island: a home's uplink, a site's router."""

    name: str
    machines: tuple[str, ...]
    up: Bandwidth
    down: Bandwidth
    latency: Duration = Duration(0)


class Emulation(Record):
    """Run all machines as processes on this one. ``cpu_share``: cores that stand for a device of speed 1.0."""

    cpu_share: float = 0.5


class Cluster(Record):
    """The document ``cluster.yaml``."""

    name: str = "cluster"
    islands: dict[str, Island]
    machines: tuple[Machine, ...]
    links: tuple[Link, ...] = ()
    segments: tuple[Segment, ...] = ()
    emulation: Emulation | None = None
