"""How long an operator takes on a device, and what a parameter costs in memory: the one place both the simulator's costs
and the planner's estimates take it from.

time = max(FLOPs / (efficiency x peak), bytes / memory bandwidth) / speed   (roofline; FusionLLM, 2024, for the efficiency)
or, where a profile was made, the measured time / speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.cluster.calibration import Calibration, OperatorTimes
from atoll.cluster.catalogue import resolve
from atoll.cluster.cluster import Cluster, Device
from atoll.graph.graph import DTYPE_BYTES, Graph
from atoll.plan.job import Precision

__all__ = ["DeviceView", "device_view", "operator_times", "state_bytes_per_element"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """A device as the cost model sees it. ``speed``: of a device of its kind; in an emulated cluster times the share of
    a core that stands for speed 1.0."""

    kind: str
    speed: float
    flops_per_s: tuple[tuple[str, float], ...]
    memory_bytes_per_s: float
    memory_bytes: int
    launch_ns: int
    watts: float
    price_per_hour: float

    def rate(self, dtype: str) -> float:
        """FLOP/s that real operators reach; a dtype without units of its own runs at the float32 rate."""
        rates = dict(self.flops_per_s)
        return rates.get(dtype) or rates.get("float32") or min(rates.values())


def device_view(cluster: Cluster, device: Device) -> DeviceView:
    full = resolve(device)
    share = cluster.emulation.cpu_share if cluster.emulation else 1.0
    efficiency = full.efficiency or 1.0
    return DeviceView(kind=full.kind, speed=full.speed * share, memory_bytes=int(full.memory or 0),
                      flops_per_s=tuple(sorted((dtype, rate * efficiency) for dtype, rate in full.flops.items())),
                      memory_bytes_per_s=float(full.memory_bandwidth or 1), launch_ns=int(full.launch or 0),
                      watts=full.watts or 0.0, price_per_hour=full.price_per_hour or 0.0)


def operator_times(graph: Graph, view: DeviceView, precision: Precision, samples: int,
                   calibration: Calibration | None = None,
                   between: tuple[int, int] | None = None) -> tuple[OperatorTimes, ...]:
    """Times of every operator of ``graph`` (or of those ``between`` two cuts) for a microbatch of ``samples``, in graph
    order, ``speed`` included.

    The backward reads and writes about twice what the forward does (each input once more, each gradient once).
    """
    operators = graph.operators if between is None else graph.operators[between[0]:between[1]]
    if calibration is not None and calibration.samples == samples and calibration.graph == graph.name:
        return tuple(_scaled(calibration.operators[operator.name], view.speed) for operator in operators)
    rate = view.rate(precision.compute) * view.speed / 1e9
    bandwidth = view.memory_bytes_per_s * view.speed / 1e9
    result = []
    for operator in operators:
        traffic = (operator.read_bytes + operator.written_bytes) * samples / bandwidth

        def bound(flops: int, moved: float) -> int:
            return round(max(flops * samples / rate, moved))

        halves = bound(operator.backward_input_flops, traffic), bound(operator.backward_weight_flops,
                                                                      traffic if operator.parameters else 0.0)
        result.append(OperatorTimes(forward_ns=bound(operator.forward_flops, traffic), backward_ns=sum(halves),
                                    backward_input_ns=halves[0], backward_weight_ns=halves[1]))
    return tuple(result)


def _scaled(times: OperatorTimes, speed: float) -> OperatorTimes:
    return OperatorTimes(forward_ns=round(times.forward_ns / speed), backward_ns=round(times.backward_ns / speed),
                         backward_input_ns=round(times.backward_input_ns / speed),
                         backward_weight_ns=round(times.backward_weight_ns / speed))


def state_bytes_per_element(precision: Precision) -> int:
    """Bytes a worker holds per parameter: weight, gradient accumulator, two moments, and a master copy where it differs.

    float32: 16; bfloat16 with float32 master: 2 + 4 + 4 + 8 = 18 (Korthikanti et al., 2022, count the same).
    """
    compute, master = DTYPE_BYTES[precision.compute], DTYPE_BYTES[precision.master]
    return compute + master + 2 * master + (master if precision.compute != precision.master else 0)
