"""What a short profile measured: how long each operator takes on a device, stated for speed 1.0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import msgspec

from atoll.records import Record

__all__ = ["Calibration", "OperatorTimes", "Profile", "merged"]


class OperatorTimes(Record):
    """Nanoseconds for one microbatch of ``Calibration.samples``. ``backward`` = both halves in one go."""

    forward_ns: int
    backward_ns: int
    backward_input_ns: int
    backward_weight_ns: int


class Calibration(Record):
    """Measured times by operator name, for one graph, precision and microbatch size, on one kind of device.

    ``graph`` and ``work``: name, and FLOPs and bytes of a sample (``graph.Graph.work``), which tell models of one family apart.
    ``kind`` and ``speed``: of the device that was measured, as the cluster names it; the times are what a device of that
    kind and speed 1.0 would take. ``update_ns_per_element``: optimizer step; ``reduce_ns_per_byte``: adding host buffers,
    per byte read; ``vote_ns_per_byte``: the norm of gradients (0: as ``reduce_ns_per_byte``); ``launch_ns``: fixed cost of
    an instruction. (The fixed cost of a message is the network's: ``cluster.network``.)
    """

    kind: str
    speed: float
    graph: str
    work: int
    precision: str
    samples: int
    operators: dict[str, OperatorTimes]
    update_ns_per_element: float
    reduce_ns_per_byte: float
    launch_ns: int
    vote_ns_per_byte: float = 0.0


class Profile(Record):
    """The document profile.json: all that was measured before a run."""

    measured: tuple[Calibration, ...] = ()

    def fitting(self, graph: str, work: int) -> Profile:
        """What was measured of this very model."""
        return Profile(measured=tuple(found for found in self.measured if (found.graph, found.work) == (graph, work)))

    def of(self, kind: str, speed: float, graph: str, samples: int) -> Calibration | None:
        """What holds for a device of ``kind``: measured on the one whose speed is nearest; None: nothing was."""
        fitting = [found for found in self.measured
                   if found.kind == kind and found.graph == graph and found.samples == samples]
        return min(fitting, key=lambda found: max(found.speed / speed, speed / found.speed), default=None)


def merged(measured: Iterable[Calibration]) -> Profile:
    """One calibration for devices alike (kind, speed) and each microbatch size: the mean of what was measured on each."""
    groups: dict[tuple[str, float, str, int], list[Calibration]] = {}
    for found in measured:
        groups.setdefault((found.kind, found.speed, found.graph, found.samples), []).append(found)
    return Profile(measured=tuple(map(_mean, groups.values())))


def _mean(group: Sequence[Calibration]) -> Calibration:
    if len(group) == 1:
        return group[0]
    plain = [msgspec.to_builtins(found) for found in group]
    return msgspec.convert(_mean_of(plain), Calibration)


def _mean_of(values: Sequence[object]) -> object:
    """Means of numbers, wherever they stand; of anything else the first."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _mean_of([value[key] for value in values]) for key in first}  # type: ignore[index]
    if isinstance(first, float):
        return fmean(values)  # type: ignore[arg-type]
    return round(fmean(values)) if isinstance(first, int) else first  # type: ignore[arg-type]
