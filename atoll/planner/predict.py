"""A plan's prediction: lowered, checked, simulated. What is predicted is read off the program that would run."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.plan.lower import lower
from atoll.plan.plan import Plan
from atoll.planner.times import Problem
from atoll.program.program import Program
from atoll.simulator.costs import PlanCosts
from atoll.simulator.simulate import Simulation, simulate
from atoll.simulator.summary import Summary, summarise

__all__ = ["Prediction", "predict", "program_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    plan: Plan
    program: Program
    simulation: Simulation
    summary: Summary

    @property
    def step_ns(self) -> int:
        return self.simulation.step_ns


def program_of(problem: Problem, plan: Plan, kind: str = "train") -> Program:
    islands = {name: worker.island for name, worker in problem.network.workers.items()}
    return lower(plan, problem.graph, islands, problem.precision, kind)


def predict(problem: Problem, plan: Plan, steps: int = 2) -> Prediction:
    """Simulate ``steps`` steps of ``plan``. Raises ``PlanError`` when the plan does not cover the graph."""
    program = program_of(problem, plan)
    costs = PlanCosts(graph=problem.graph, plan=plan, cluster=problem.cluster, precision=problem.precision,
                      profile=problem.profile)
    simulation = simulate(program, costs, problem.network, steps=steps)
    return Prediction(plan=plan, program=program, simulation=simulation, summary=summarise(program, simulation, costs,
                                                                                           problem.network))
