"""A decision in sentences: what the plan is, what limits it, what was refused and why."""

from __future__ import annotations

from atoll.planner.advice import Advice
from atoll.planner.bill import Bill
from atoll.planner.predict import Prediction
from atoll.planner.search import Decision, Trial, describe
from atoll.planner.times import Problem
from atoll.simulator.summary import IDLE_SHARE
from atoll.units import format_bytes, format_count, format_duration

__all__ = ["explain", "explain_bill", "explain_plan", "overfull"]


def explain(problem: Problem, decision: Decision, advice: tuple[Advice, ...] = ()) -> tuple[str, ...]:
    """Sentences in the order in which a person would ask."""
    prediction = decision.prediction
    return (*explain_plan(problem, prediction), *_limits(problem, prediction), *_refused(decision), *_advice(advice))


def overfull(problem: Problem, prediction: Prediction) -> tuple[str, ...]:
    """A sentence for every worker that the plan would need more memory of than it has."""
    lines = []
    for worker, peak in prediction.simulation.peaks.items():
        held = problem.devices[worker].memory_bytes
        if peak.total_bytes > held:
            lines.append(f"{worker} would need {format_bytes(peak.total_bytes)} and has {format_bytes(held)}: it lacks "
                         f"{format_bytes(peak.total_bytes - held)}; give it fewer operators or smaller microbatches, or "
                         "let it recompute.")
    return tuple(lines)


def explain_plan(problem: Problem, prediction: Prediction, *, chosen: bool = True) -> tuple[str, ...]:
    """What runs where. ``chosen``: by the planner (else it was given)."""
    plan = prediction.plan
    lines = []
    used = {stage.worker for replica in plan.replicas for stage in replica.stages}
    for number, replica in enumerate(plan.replicas):
        by_worker: dict[str, list[str]] = {}
        for stage in replica.stages:
            by_worker.setdefault(stage.worker, []).append(f"{stage.first} to {stage.last}")
        parts = "; ".join(f"{worker} ({problem.network.island(worker)}) runs {' and '.join(ranges)}"
                          for worker, ranges in by_worker.items())
        name = f"Replica {number}" if len(plan.replicas) > 1 else "One replica"
        lines.append(f"{name} takes {_some(replica.microbatches, 'microbatch', 'microbatches')} of "
                     f"{_some(plan.microbatch_samples, 'sequence', 'sequences')} a step in the order {plan.schedule}"
                     f"{f' with {plan.chunks} stages a worker' if plan.chunks > 1 else ''}: {parts}.")
    idle = [worker for worker in problem.network.workers if worker not in used]
    if idle:
        why = ", because every plan that was tried with them is slower or does not fit" if chosen else ""
        lines.append(f"Left out{why}: {', '.join(idle)}.")
    if chosen and any(stage.recompute for replica in plan.replicas for stage in replica.stages):
        lines.append("Stages recompute their forward pass in the backward: without that their activations do not fit.")
    return tuple(lines)


def _some(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _limits(problem: Problem, prediction: Prediction) -> tuple[str, ...]:
    """The busiest thing, and how busy the rest is."""
    simulation = prediction.simulation
    compute = {worker: busy.get("compute", 0.0) for worker, busy in simulation.busy_share.items()}
    worker = max(compute, key=compute.__getitem__)
    lines = [f"A step takes {format_duration(prediction.step_ns)}: that is what the simulator predicts for this very program."]
    segments = {segment: size / problem.network.capacity[segment] * 1e9 / prediction.step_ns
                for segment, size in simulation.step_segment_bytes.items() if prediction.step_ns}
    busiest = max(segments, key=segments.__getitem__) if segments else ""
    summary = prediction.summary
    share = summary.critical_ns.get(summary.limit, 0) / max(1, sum(summary.critical_ns.values()))
    link = f"; the busiest link, {busiest}, {segments[busiest]:.0%}" if busiest and segments[busiest] >= 0.005 else ""
    lines.append(f"What limits it is {summary.limit}: {share:.0%} of the critical path is its doing. The busiest device, "
                 f"{worker}, computes {compute[worker]:.0%} of the step{link}.")
    if max(compute[worker], segments.get(busiest, 0.0)) < 0.75:
        lines.append("Nothing is busy all the time: what remains is waiting, for the pipeline to fill and drain and for the "
                     "latency of messages.")
    memory = {name: peak.total_bytes / problem.devices[name].memory_bytes for name, peak in simulation.peaks.items()}
    fullest = max(memory, key=memory.__getitem__)
    lines.append(f"Memory is fullest on {fullest}: {format_bytes(simulation.peaks[fullest].total_bytes)} of "
                 f"{format_bytes(problem.devices[fullest].memory_bytes)} ({memory[fullest]:.0%}).")
    return tuple(lines)


def _refused(decision: Decision) -> tuple[str, ...]:
    """The best trial of every other way to go, and why it lost; what did not fit."""
    chosen = decision.prediction
    lines = []
    best: dict[tuple[object, ...], Trial] = {}
    plan = chosen.plan
    own_shape = tuple(sorted(len({stage.worker for stage in replica.stages}) for replica in plan.replicas))
    chosen_ways = (("schedule", plan.schedule), ("shape", own_shape), ("microbatch", plan.microbatch_samples))
    for trial in decision.trials:
        candidate = trial.candidate
        shape = tuple(sorted(len(draft.ranks) for draft in candidate.replicas))
        ways = (("schedule", candidate.schedule), ("shape", shape), ("microbatch", candidate.samples))
        for way in ways:
            if way in chosen_ways:
                continue
            known = best.get(way)
            if known is None or (trial.step_ns or 1 << 62) < (known.step_ns or 1 << 62):
                best[way] = trial
    told: set[str] = set()
    for trial in sorted(best.values(), key=lambda trial: trial.step_ns or 1 << 62):
        name = describe(trial.candidate)
        if name in told:
            continue
        told.add(name)
        if trial.step_ns is None:
            lines.append(f"Refused: {name}: {trial.refused}.")
        else:
            slower = trial.step_ns / chosen.step_ns - 1
            verdict = f"{slower:.0%} slower" if slower >= 0.005 else "no faster"
            lines.append(f"Refused: {name}: {format_duration(trial.step_ns)} a step, {verdict}.")
    if decision.over_memory:
        lines.append(f"{decision.over_memory} of {decision.drafted} drafts did not fit into memory or had too few "
                     "microbatches.")
    lines.append(f"Simulated {_some(len(decision.trials), 'candidate', 'candidates')}, made of the best of {decision.drafted} "
                 f"drafts, in {decision.seconds:.1f} s.")
    return tuple(lines)


def _advice(advice: tuple[Advice, ...]) -> tuple[str, ...]:
    if not advice:
        return ()
    first, *rest = advice
    more = "; next: " + "; ".join(f"{other.change} ({other.gain:+.0%})" for other in rest[:2]) if rest else ""
    return (f"The one change that would help most: {first.change} ({first.gain:+.0%} speed){more}.",)


def explain_bill(figures: Bill) -> str:
    """ "10B tokens take 3.2 days, 52 kWh and about 120 (devices 110, traffic 10)." """
    money = figures.device_money + figures.traffic_money
    text = (f"{format_count(figures.tokens)} tokens ({figures.steps} steps) take {format_duration(figures.duration_ns)} and "
            f"{figures.energy_joules / 3.6e6:.3g} kWh on the devices (waiting ones counted at {IDLE_SHARE:.0%})")
    return text + (f", and about {money:,.0f} $ (devices {figures.device_money:,.0f}, traffic {figures.traffic_money:,.0f})."
                   if money else ".")
