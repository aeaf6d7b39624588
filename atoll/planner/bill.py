"""What a run comes to: days, energy and money to the tokens asked for."""

from __future__ import annotations

from atoll.plan.job import Job
from atoll.planner.predict import Prediction
from atoll.planner.times import Problem
from atoll.records import Record

__all__ = ["Bill", "bill"]

class Bill(Record):
    """``energy_joules``: devices only (hosts, cooling and networks not counted). ``money``: in the currency of the prices."""

    steps: int
    tokens: int
    duration_ns: int
    energy_joules: float
    device_money: float
    traffic_money: float


def bill(problem: Problem, job: Job, prediction: Prediction) -> Bill:
    """Cost: O(workers + links)."""
    steps = job.total_steps
    duration_ns = steps * prediction.step_ns
    energy = prediction.summary.energy_joules * steps
    money = sum(problem.devices[worker].price_per_hour for worker in prediction.summary.workers) * duration_ns / 3.6e12
    per_gb = {}
    for link in problem.cluster.links:
        first, second = link.between
        per_gb[f"{first}>{second}"] = per_gb[f"{second}>{first}"] = link.price_per_gb
    traffic = sum(size / 1e9 * per_gb.get(segment, 0.0) for segment, size in prediction.simulation.step_segment_bytes.items())
    return Bill(steps=steps, tokens=steps * job.step_tokens, duration_ns=duration_ns, energy_joules=energy,
                device_money=money, traffic_money=traffic * steps)
