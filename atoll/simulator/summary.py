"""A simulation as a plain record: what is printed, kept beside a run and laid against what was measured."""

from __future__ import annotations

from atoll.program.instructions import Forward
from atoll.program.program import Program
from atoll.records import Record
from atoll.simulator.costs import PlanCosts
from atoll.simulator.memory import Peak
from atoll.simulator.roads import Roads
from atoll.simulator.simulation import Simulation

__all__ = ["IDLE_SHARE", "LinkUse", "MemorySplit", "Summary", "WorkerSummary", "summarise"]

IDLE_SHARE = 0.3
"""Fraction of its power that a device draws while it waits (a guess: 80-120 W of a 400 W card held ready)."""

_ACTIVATIONS = ("saved", "kept", "deferred")


class MemorySplit(Record):
    """A worker's memory at its high-water mark. ``activations_bytes``: kept for the backward. ``buffers_bytes``: messages,
    inputs and chunks on their way. ``working_bytes``: see ``costs.Resident``. ``capacity_bytes``: what the device has."""

    peak_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    working_bytes: int
    activations_bytes: int
    buffers_bytes: int
    capacity_bytes: int


class WorkerSummary(Record):
    """``busy_share``: by lane, share of the step. ``makespan_bubble``, ``span_bubble``: fractions (see ``simulator.idle``).

    ``exposed_ns``: the compute lane stood still while a message to this worker or a collective of it was under way;
    ``waiting_ns``: by what its compute lane waited for, that included. ``energy_joules``: of one step.
    """

    device: str
    speed: float
    memory: MemorySplit
    busy_share: dict[str, float]
    makespan_bubble: float
    span_bubble: float
    exposed_ns: int
    waiting_ns: dict[str, int]
    energy_joules: float


class LinkUse(Record):
    """One directed segment in one step. ``busy_share``: bytes against what it could have carried."""

    size_bytes: int
    busy_share: float
    bytes_per_s: int


class Summary(Record):
    """One step as predicted. ``makespan_bubble``, ``span_bubble``: means over the workers that compute.

    ``pairs``: bytes from worker to worker ("a1>b1"). ``limit``: the resource on which most of the critical path is spent;
    ``critical_ns``: what each is answerable for. ``busiest_worker``, ``busiest_link``: by share of the step.
    """

    program: str
    kind: str
    steps: int
    instructions: int
    step_ns: int
    makespan_ns: int
    samples: int
    tokens: int
    tokens_per_s: float
    makespan_bubble: float
    span_bubble: float
    workers: dict[str, WorkerSummary]
    links: dict[str, LinkUse]
    pairs: dict[str, int]
    limit: str
    critical_ns: dict[str, int]
    busiest_worker: str
    busiest_link: str
    energy_joules: float
    idle_share: float = IDLE_SHARE


def summarise(program: Program, simulation: Simulation, costs: PlanCosts, network: Roads) -> Summary:
    """Cost: O(instructions)."""
    samples = program.microbatch_samples * sum(
        isinstance(instruction, Forward) and instruction.gives_loss
        for part in program.workers for instruction in part.instructions)
    tokens = samples * costs.graph.sequence_length
    workers = {name: _worker(name, simulation, costs) for name in simulation.workers}
    links = {name: LinkUse(size_bytes=size_bytes, busy_share=simulation.segment_busy[name],
                           bytes_per_s=int(network.capacity[name]))
             for name, size_bytes in simulation.step_segment_bytes.items() if size_bytes}
    computing = [workers[name] for name in simulation.bubbles]
    path = simulation.critical_path
    return Summary(
        program=program.digest, kind=program.kind, steps=len(simulation.timelines), instructions=simulation.instructions,
        step_ns=simulation.step_ns, makespan_ns=simulation.makespan_ns, samples=samples, tokens=tokens,
        tokens_per_s=tokens * 1e9 / simulation.step_ns if simulation.step_ns else 0.0,
        makespan_bubble=_mean([worker.makespan_bubble for worker in computing]),
        span_bubble=_mean([worker.span_bubble for worker in computing]), workers=workers, links=links,
        pairs={f"{source}>{target}": size_bytes for (source, target), size_bytes in simulation.pair_bytes.items()},
        limit=path.limit, critical_ns=path.by_resource,
        busiest_worker=max(workers, key=lambda name: workers[name].busy_share.get("compute", 0.0)),
        busiest_link=max(links, key=lambda name: links[name].busy_share, default=""),
        energy_joules=sum(worker.energy_joules for worker in workers.values()))


def _worker(name: str, simulation: Simulation, costs: PlanCosts) -> WorkerSummary:
    view, waited = costs.view(name), simulation.idle_ns[name]
    busy = simulation.busy_share[name]
    found = simulation.bubbles.get(name)
    computing = min(1.0, busy.get("compute", 0.0))
    return WorkerSummary(
        device=view.kind, speed=view.speed, memory=_memory(simulation.peaks[name], costs, name), busy_share=busy,
        makespan_bubble=found.makespan_bubble_ns / found.step_ns if found and found.step_ns else 0.0,
        span_bubble=found.span_bubble_ns / found.span_ns if found and found.span_ns else 0.0,
        exposed_ns=sum(ns for what, ns in waited.items() if what.startswith("in:") or what == "native"), waiting_ns=waited,
        energy_joules=view.watts * (computing + (1 - computing) * IDLE_SHARE) * simulation.step_ns / 1e9)


def _memory(peak: Peak, costs: PlanCosts, name: str) -> MemorySplit:
    resident = costs.resident(name)
    activations = sum(size_bytes for kind, size_bytes in peak.made_of.items() if kind in _ACTIVATIONS)
    return MemorySplit(peak_bytes=peak.total_bytes, weights_bytes=resident.weights_bytes,
                       gradients_bytes=resident.gradients_bytes, optimizer_bytes=resident.optimizer_bytes,
                       working_bytes=resident.working_bytes, activations_bytes=activations,
                       buffers_bytes=peak.buffer_bytes - activations, capacity_bytes=costs.view(name).memory_bytes)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
