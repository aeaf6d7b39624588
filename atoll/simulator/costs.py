"""What instructions cost and buffers weigh under a plan: the ``CostModel`` of real runs.

Times: the sum over a stage's operators (``rates.operator_times``: measured where a profile was made, else roofline) plus
the launch term, on the worker's device. In an emulated cluster a device of speed s is s x ``cpu_share`` of one core; launch
terms stretch with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from atoll.cluster.calibration import Calibration, Profile
from atoll.cluster.cluster import Cluster
from atoll.cluster.network import workers
from atoll.errors import PlanError
from atoll.graph.graph import DTYPE_BYTES, Graph
from atoll.plan.job import Precision
from atoll.plan.layout import Layout, ReplicaLayout
from atoll.plan.plan import Plan
from atoll.program.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Forward,
    Instruction,
    Load,
    Recompute,
    Reduce,
    Save,
    Update,
    Vote,
)
from atoll.records import Record
from atoll.simulator.rates import DeviceView, device_view, operator_times

__all__ = ["DISK_BYTES_PER_S", "PlanCosts", "Resident"]

DISK_BYTES_PER_S = 500 * 10**6
"""Of a machine that does not say: one SATA solid-state disk."""

MOMENTS = 2
"""State tensors of AdamW per parameter, in the master dtype."""

_SLOT: dict[type[Instruction], int] = {Forward: 0, Backward: 1, BackwardInput: 2, BackwardWeight: 3, Recompute: 0}


class Resident(Record):
    """Bytes that a worker holds all the time. ``weights_bytes``: in the compute dtype and, where that differs, the master
    copy. ``working_bytes``: the largest tensor that one of its operators writes, twice in float32 (as it is turned into a loss
    or a gradient)."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    working_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.working_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What one worker is and holds. ``times``: by stage, ns of forward, backward and the two halves, launch included."""

    view: DeviceView
    measured: Calibration | None
    launch_ns: int
    disk_bytes_per_s: int
    elements: int
    times: dict[int, tuple[int, int, int, int]]
    sizes: dict[Buffer, int]
    resident: Resident


class PlanCosts:
    """Costs of ``plan``'s program (``CostModel``). ``profile``: measured times, used where they are of this graph,
    microbatch size and kind of device.

    Raises ``PlanError`` when the plan does not cover the graph or names a worker that the cluster lacks.
    """

    def __init__(self, graph: Graph, plan: Plan, cluster: Cluster, precision: Precision,
                 profile: Profile | None = None) -> None:
        self.graph, self.precision, self.samples = graph, precision, plan.microbatch_samples
        self._profile = profile or Profile()
        self._layout = Layout.of(plan, graph)
        self._stage_times: dict[tuple[DeviceView, int, int], tuple[int, int, int, int]] = {}
        disks = {machine.name: int(machine.disk_bandwidth or DISK_BYTES_PER_S) for machine in cluster.machines}
        known = {worker.name: worker for worker in workers(cluster)}
        self._parts: dict[str, _Part] = {}
        for name in self._layout.workers:
            if name not in known:
                raise PlanError(f"plan: worker {name!r} is not in cluster {cluster.name}; it has {', '.join(known)}")
            view = device_view(cluster, known[name].device)
            self._parts[name] = self._part(name, view, disks[known[name].machine])

    def _part(self, name: str, view: DeviceView, disk_bytes_per_s: int) -> _Part:
        replica = self._layout.replica(name)
        stages = replica.stages_of(name)
        measured = self._profile.of(view.kind, view.speed, self.graph.name, self.samples)
        launch_ns = round((measured.launch_ns if measured else view.launch_ns) / view.speed)
        elements = {parameter.name: parameter.elements for stage in stages
                    for parameter in self._layout.index.parameters_of(replica.cuts[stage], replica.cuts[stage + 1])}
        return _Part(view=view, measured=measured, launch_ns=launch_ns, disk_bytes_per_s=disk_bytes_per_s,
                     elements=sum(elements.values()), times={
                         stage: self._times(view, measured, (replica.cuts[stage], replica.cuts[stage + 1]), launch_ns)
                         for stage in stages},
                     sizes=self._sizes(replica, stages), resident=self._resident(replica, stages, sum(elements.values())))

    def _times(self, view: DeviceView, measured: Calibration | None, between: tuple[int, int],
               launch_ns: int) -> tuple[int, int, int, int]:
        key = (view, *between)
        if key not in self._stage_times:
            times = operator_times(self.graph, view, self.precision, self.samples, measured, between)
            self._stage_times[key] = (sum(time.forward_ns for time in times), sum(time.backward_ns for time in times),
                                      sum(time.backward_input_ns for time in times),
                                      sum(time.backward_weight_ns for time in times))
        forward, backward, halfway, rest = self._stage_times[key]
        return forward + launch_ns, backward + launch_ns, halfway + launch_ns, rest + launch_ns

    def _sizes(self, replica: ReplicaLayout, stages: tuple[int, ...]) -> dict[Buffer, int]:
        """By buffer without its microbatch."""
        sizes: dict[Buffer, int] = {}
        index, samples = self._layout.index, self.samples
        for edge in replica.edges:
            if edge.source in stages or edge.target in stages:
                sizes["activation", edge.source, edge.target] = edge.forward_bytes(samples)
                sizes["delta", edge.source, edge.target] = edge.backward_bytes(samples)
        for stage in stages:
            low, high = replica.cuts[stage], replica.cuts[stage + 1]
            given = sum(tensor.size_bytes(samples) for tensor in index.inputs_of(low, high))
            sizes["saved", stage] = index.stage_cost(low, high).saved_bytes * samples
            sizes["input", stage] = given
            sizes["kept", stage] = given + sum(edge.forward_bytes(samples) for edge in replica.edges if edge.target == stage)
        return sizes

    def _resident(self, replica: ReplicaLayout, stages: tuple[int, ...], elements: int) -> Resident:
        compute, master = DTYPE_BYTES[self.precision.compute], DTYPE_BYTES[self.precision.master]
        copy = master if self.precision.compute != self.precision.master else 0
        largest = max((prod(tensor.shape) * (self.samples if tensor.batched else 1) for stage in stages
                       for operator in self.graph.operators[replica.cuts[stage]:replica.cuts[stage + 1]]
                       for tensor in operator.outputs), default=0)
        return Resident(weights_bytes=(compute + copy) * elements, gradients_bytes=master * elements,
                        optimizer_bytes=MOMENTS * master * elements,
                        working_bytes=2 * max(DTYPE_BYTES["float32"], compute) * largest)

    def view(self, worker: str) -> DeviceView:
        return self._parts[worker].view

    def resident(self, worker: str) -> Resident:
        return self._parts[worker].resident

    def resident_bytes(self, worker: str) -> int:
        return self._parts[worker].resident.total_bytes

    def buffer_bytes(self, worker: str, buffer: Buffer) -> int:
        """Bytes of a buffer besides what is resident. A sum over all holders lands in the gradients (0); what BackwardWeight
        needs from BackwardInput is taken to be part of what is saved (0); votes are a few numbers (0)."""
        return self._parts[worker].sizes.get(buffer[:-1], 0)

    def duration_ns(self, worker: str, instruction: Instruction) -> int:
        part = self._parts[worker]
        slot = _SLOT.get(type(instruction))
        if slot is not None:
            return part.times[instruction.stage][slot]  # type: ignore[attr-defined]
        return part.launch_ns + self._other_ns(part, instruction)

    def _other_ns(self, part: _Part, instruction: Instruction) -> int:
        view, measured = part.view, part.measured
        bytes_per_ns = view.memory_bytes_per_s * view.speed / 1e9
        master = DTYPE_BYTES[self.precision.master]
        if isinstance(instruction, Update):
            if measured:
                return round(part.elements * measured.update_ns_per_element / view.speed)
            return round(part.elements * self._update_bytes() / bytes_per_ns)
        if isinstance(instruction, Reduce):
            if measured:
                return round(instruction.size_bytes * measured.reduce_ns_per_byte / view.speed)
            return round(instruction.size_bytes * (1 + 1 / len(instruction.sources)) / bytes_per_ns)
        if isinstance(instruction, Vote):
            held = {buffer[1] for buffer in instruction.evidence if buffer[0] in ("gradient", "reduced")}
            share = len(instruction.counted) / len(held) if held else 0.0
            read = share * part.elements * master
            rate = (measured.vote_ns_per_byte or measured.reduce_ns_per_byte) / view.speed if measured else 1 / bytes_per_ns
            return round(read * rate)
        if isinstance(instruction, Load):
            return round(instruction.size_bytes / bytes_per_ns)
        if isinstance(instruction, Save):
            return instruction.size_bytes * 10**9 // part.disk_bytes_per_s
        return 0

    def _update_bytes(self) -> int:
        """Memory traffic of AdamW per element: gradient, weight and two moments read; weight and moments written; and the
        copy in the compute dtype written where there is one."""
        compute, master = DTYPE_BYTES[self.precision.compute], DTYPE_BYTES[self.precision.master]
        return 7 * master + (compute if self.precision.compute != self.precision.master else 0)
