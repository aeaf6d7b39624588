"""What a range of operators costs on a worker, as prefix sums: the planner's fast view of graph, cluster and calibration.

Estimates only rank plans; what is predicted in the end is read off the simulated program.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from atoll.cluster.calibration import Calibration
from atoll.cluster.cluster import Cluster
from atoll.cluster.network import Network
from atoll.graph.graph import DTYPE_BYTES, Graph, GraphIndex
from atoll.plan.job import Precision
from atoll.simulator.rates import DeviceView, device_view, operator_times, state_bytes_per_element

__all__ = ["Problem", "RangeCosts"]


@dataclass(frozen=True)
class RangeCosts:
    """Prefix sums over the operators for one kind of device and one microbatch size. ``*_ns[i]``: operators before i."""

    forward_ns: Any
    backward_ns: Any


class Problem:
    """All that a search needs, computed once: graph, cluster, per-operator times by (worker, samples), sizes by cut.

    ``memory_share``: the fraction of a device's memory that a plan may fill (the rest is for the library and fragments).
    """

    def __init__(self, graph: Graph, cluster: Cluster, precision: Precision,
                 calibrations: tuple[Calibration, ...] = (), memory_share: float = 0.92) -> None:
        self.graph, self.cluster, self.precision = graph, cluster, precision
        self.calibrations = {calibration.samples: calibration for calibration in calibrations}
        self.index = GraphIndex(graph)
        self.network = Network(cluster)
        self.memory_share = memory_share
        self.devices: dict[str, DeviceView] = {name: device_view(cluster, worker.device)
                                               for name, worker in self.network.workers.items()}
        self.state_bytes = state_bytes_per_element(precision)
        self._ranges: dict[tuple[DeviceView, int], RangeCosts] = {}

    def calibration(self, samples: int) -> Calibration | None:
        return self.calibrations.get(samples)

    def ranges(self, worker: str, samples: int) -> RangeCosts:
        import numpy

        view = self.devices[worker]
        key = (view, samples)
        if key not in self._ranges:
            times = operator_times(self.graph, view, self.precision, samples, self.calibration(samples))
            forward = numpy.concatenate(([0], numpy.cumsum([time.forward_ns for time in times], dtype=float)))
            backward = numpy.concatenate(([0], numpy.cumsum([time.backward_ns for time in times], dtype=float)))
            self._ranges[key] = RangeCosts(forward_ns=forward, backward_ns=backward)
        return self._ranges[key]

    def memory_bytes(self, worker: str) -> int:
        return int(self.devices[worker].memory_bytes * self.memory_share)

    @cached_property
    def cuts(self) -> Any:
        """Candidate cut positions, 0 and n included: where least lives across, at most a few hundred."""
        import numpy

        bytes_at = self.index.cut_bytes
        inner = sorted(range(1, len(bytes_at) - 1), key=lambda cut: (bytes_at[cut], cut))
        if len(inner) > 400:
            narrow = [cut for cut in inner if bytes_at[cut] <= bytes_at[inner[0]]]
            inner = narrow if len(narrow) >= 64 else inner[:400]
        inner = self._distinct(sorted(inner))
        return numpy.array([0, *inner, len(self.graph.operators)])

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
    def element_sums(self) -> Any:
        """Parameter elements first used before each operator (a tied weight is counted at its first use only)."""
        import numpy

        seen: set[str] = set()
        sums = [0]
        for operator in self.graph.operators:
            fresh = [name for name in operator.parameters if name not in seen]
            seen.update(fresh)
            sums.append(sums[-1] + sum(self.index.parameter[name].elements for name in fresh))
        return numpy.array(sums, dtype=float)

    @cached_property
    def saved_sums(self) -> Any:
        """Activation bytes kept for the backward, per sample, before each operator."""
        import numpy

        return numpy.concatenate(([0], numpy.cumsum([operator.saved_bytes for operator in self.graph.operators], dtype=float)))

    @cached_property
    def largest_output(self) -> int:
        """Bytes per sample of the largest tensor any operator writes: working space of a stage."""
        return max(tensor.size_bytes(1) for operator in self.graph.operators for tensor in operator.outputs)

    @cached_property
    def tied_elements_at_end(self) -> int:
        """Elements that the last operators share with earlier ones (a tied output embedding): held again by the last stage."""
        seen: set[str] = set()
        again: set[str] = set()
        for operator in self.graph.operators:
            again.update(name for name in operator.parameters if name in seen)
            seen.update(operator.parameters)
        return sum(self.index.parameter[name].elements for name in again)

    def link_ns(self, source: str, target: str, size_bytes: float) -> tuple[float, float]:
        """(time the link is busy, latency) for one message between two workers."""
        path = self.network.path(source, target)
        rate = min((self.network.capacity[segment] for segment in path.segments), default=self.network.local_bytes_per_s)
        return size_bytes / rate * 1e9, path.latency_ns + path.message_ns

    @property
    def master_bytes(self) -> int:
        return DTYPE_BYTES[self.precision.master]
