"""What a range of operators costs on a worker, as prefix sums: the planner's fast view of graph, cluster and calibration.

Estimates only rank plans; what is predicted in the end is read off the simulated program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

from atoll.cluster.calibration import Profile
from atoll.cluster.cluster import Cluster
from atoll.cluster.network import Network
from atoll.graph.graph import DTYPE_BYTES, Graph, GraphIndex
from atoll.plan.job import Precision
from atoll.simulator.rates import DeviceView, device_view, operator_times, state_bytes_per_element

__all__ = ["Held", "Problem", "RangeCosts"]


_MOST_CUTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeCosts:
    """Prefix sums over the operators for one kind of device and one microbatch size. ``*_ns[i]``: operators before i."""

    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a stage must hold besides its weights: activations of ``live`` microbatches of ``samples`` (with ``recompute``
    only their inputs and one microbatch whole); ``last``: the stage that may share a tied weight with the first."""

    samples: int
    live: int
    recompute: bool
    last: bool


class Problem:
    """All that a search needs, computed once: graph, cluster, per-operator times by (worker, samples), sizes by cut.

    ``memory_share``: the fraction of a device's memory that a plan may fill (the rest is for the library and fragments).
    """

    def __init__(self, graph: Graph, cluster: Cluster, precision: Precision,
                 profile: Profile | None = None, memory_share: float = 0.92) -> None:
        self.graph, self.cluster, self.precision = graph, cluster, precision
        self.profile = profile.fitting(graph.name, graph.work) if profile and profile.measured else Profile()
        self.index = GraphIndex(graph)
        self.network = Network(cluster)
        self.memory_share = memory_share
        self.devices: dict[str, DeviceView] = {name: device_view(cluster, worker.device)
                                               for name, worker in self.network.workers.items()}
        self.state_bytes = state_bytes_per_element(precision)
        self._ranges: dict[tuple[DeviceView, int], RangeCosts] = {}
        self._reach: dict[tuple[Held, int], list[int]] = {}
        self._lines: dict[tuple[DeviceView, int], list[float]] = {}
        self._busy: dict[tuple[float, int], list[float]] = {}
        self._rates: dict[tuple[str, str], float] = {}

    def ranges(self, worker: str, samples: int) -> RangeCosts:
        view = self.devices[worker]
        key = (view, samples)
        if key not in self._ranges:
            measured = self.profile.of(view.kind, view.speed, self.graph.name, samples)
            times = operator_times(self.graph, view, self.precision, samples, measured)
            self._ranges[key] = RangeCosts(forward_ns=(0, *accumulate(time.forward_ns for time in times)),
                                           backward_ns=(0, *accumulate(time.backward_ns for time in times)))
        return self._ranges[key]

    def memory_bytes(self, worker: str) -> int:
        return int(self.devices[worker].memory_bytes * self.memory_share)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Candidate cut positions, 0 and n included: where least lives across, at most a few hundred."""
        bytes_at = self.index.cut_bytes
        inner = sorted(range(1, len(bytes_at) - 1), key=lambda cut: (bytes_at[cut], cut))
        if len(inner) > _MOST_CUTS:
            narrow = [cut for cut in inner if bytes_at[cut] <= bytes_at[inner[0]]]
            inner = narrow if len(narrow) >= 64 else inner[:_MOST_CUTS]
        return (0, *self._distinct(sorted(inner)), len(self.graph.operators))

    def _distinct(self, cuts: list[int]) -> list[int]:
        """Of cuts between which nothing happens (no time, no parameters, same bytes) only the first is worth trying."""
        kept: list[int] = []
        for cut in cuts:
            if kept and self.index.cut_bytes[cut] == self.index.cut_bytes[kept[-1]] and not any(
                    operator.parameters or operator.forward_flops or operator.saved_bytes
                    for operator in self.graph.operators[kept[-1]:cut]):
                continue
            kept.append(cut)
        return kept

    @cached_property
    def element_sums(self) -> list[int]:
        """Parameter elements first used before each operator (a tied weight is counted at its first use only)."""
        seen: set[str] = set()
        sums = [0]
        for operator in self.graph.operators:
            fresh = [name for name in operator.parameters if name not in seen]
            seen.update(fresh)
            sums.append(sums[-1] + sum(self.index.parameter[name].elements for name in fresh))
        return sums

    @cached_property
    def _saved_sums(self) -> list[int]:
        return [0, *accumulate(operator.saved_bytes for operator in self.graph.operators)]

    @cached_property
    def _widest(self) -> list[int]:
        """Per piece between candidate cuts, float32 bytes per sample of the largest tensor an operator there writes."""
        return [max(prod(tensor.shape) * 4 for operator in self.graph.operators[low:high] for tensor in operator.outputs)
                for low, high in pairwise(self.cuts)]

    @cached_property
    def _tied_elements(self) -> int:
        """Elements that later operators share with earlier ones (a tied output embedding): held again by the last stage."""
        seen: set[str] = set()
        again: set[str] = set()
        for operator in self.graph.operators:
            again.update(name for name in operator.parameters if name in seen)
            seen.update(operator.parameters)
        return sum(self.index.parameter[name].elements for name in again)

    def held_bytes(self, held: Held, low: int, high: int) -> float:
        """Memory of a stage from candidate cut ``low`` to ``high`` (positions in ``cuts``), as the simulator counts it."""
        first, last = self.cuts[low], self.cuts[high]
        return self._held(held, first, last, max(self._widest[low:high], default=0))

    def _held(self, held: Held, first: int, last: int, widest: int) -> float:
        boundary = self.index.cut_bytes
        elements = self.element_sums[last] - self.element_sums[first] + (self._tied_elements if held.last else 0)
        state = elements * self.state_bytes
        saved = (self._saved_sums[last] - self._saved_sums[first]) * held.samples
        inbound, outbound = boundary[first] * held.samples, boundary[last] * held.samples
        activations = saved + inbound * held.live if held.recompute else saved * held.live
        return state + activations + 2 * (inbound + outbound) + 2 * widest * held.samples

    def whole_bytes(self, held: Held) -> float:
        """More than any stage could need."""
        return self._held(held, 0, len(self.graph.operators), max(self._widest)) * 2

    def reach(self, held: Held, room_bytes: float, *, keep: bool = True) -> list[int]:
        """For every candidate cut, the furthest one to which a stage that begins there fits into ``room_bytes``."""
        key = (held, round(room_bytes))
        if key in self._reach:
            return self._reach[key]
        last = len(self.cuts) - 1
        result = []
        high = 0
        for low in range(last + 1):
            high = max(high, low)
            while high < last and self.held_bytes(held, low, high + 1) <= room_bytes:
                high += 1
            result.append(high)
        if keep:
            self._reach[key] = result
        return result

    def time_line(self, worker: str, samples: int) -> list[float]:
        """Forward and backward time before each candidate cut, for one microbatch on ``worker``."""
        key = (self.devices[worker], samples)
        if key not in self._lines:
            ranges = self.ranges(worker, samples)
            self._lines[key] = [ranges.forward_ns[cut] + ranges.backward_ns[cut] for cut in self.cuts]
        return self._lines[key]

    def busy_line(self, source: str, target: str, samples: int) -> list[float]:
        """Time one microbatch's message keeps the link between two workers busy, for each candidate cut."""
        rate = self.rate(source, target)
        key = (rate, samples)
        if key not in self._busy:
            self._busy[key] = [self.index.cut_bytes[cut] * samples / rate * 1e9 for cut in self.cuts]
        return self._busy[key]

    def rate(self, source: str, target: str) -> float:
        """Bytes/s of the narrowest segment between two workers."""
        key = (source, target)
        if key not in self._rates:
            path = self.network.path(source, target)
            self._rates[key] = min((self.network.capacity[segment] for segment in path.segments),
                                   default=self.network.local_bytes_per_s)
        return self._rates[key]

    def link_ns(self, source: str, target: str, size_bytes: float) -> tuple[float, float]:
        """(time the link is busy, latency) for one message between two workers."""
        path = self.network.path(source, target)
        return size_bytes / self.rate(source, target) * 1e9, path.latency_ns + path.message_ns

    @property
    def master_bytes(self) -> int:
        return DTYPE_BYTES[self.precision.master]
