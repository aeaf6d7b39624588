"""How many instructions a second the simulator executes on one core, everything included: compiling the program, deriving its
dependencies, pricing, the event loop, memory high-water. Time is CPU time of this process, the least of several runs: what is
added to it is the neighbours' use of the same caches.

The program: a GPT of 48 layers on 16 stages x 2 replicas, 64 microbatches each, 1F1B, gradients summed by a ring, lowered from
a plan as always. Two networks: islands hold whole replicas; or every message between neighbours of the pipeline crosses the
same link. The goal is for one call that simulates four steps; what one step costs by itself, where compiling the program is
not yet spread over anything, is printed beside it.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from contract import finish, quick

from atoll.cluster.cluster import Cluster, Device, Island, Link, Machine
from atoll.cluster.network import Network, workers
from atoll.graph.build import build_graph
from atoll.graph.graph import Graph
from atoll.graph.spec import ModelSpec
from atoll.plan.job import PRECISIONS
from atoll.plan.lower import lower
from atoll.plan.plan import Plan, ReplicaPlan, StagePlacement
from atoll.simulator.costs import PlanCosts
from atoll.simulator.simulate import simulate
from atoll.units import Bandwidth, Duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES, MICROBATCHES, GOAL = 16, 64, 150_000


def two_islands() -> Cluster:
    island = Island(bandwidth=Bandwidth.parse("100 Gbit/s"), latency=Duration.parse("10 us"))
    islands = dict.fromkeys(("east", "west"), island)
    machines = tuple(Machine(name=f"{name}{i}", island=name, devices=(Device(kind="A100-80"),))
                     for name in islands for i in range(STAGES))
    link = Link(between=("east", "west"), bandwidth=Bandwidth.parse("10 Gbit/s"), latency=Duration.parse("20 ms"))
    return Cluster(name="two-islands", islands=islands, machines=machines, links=(link,))


def plan_of(graph: Graph, cluster: Cluster, across: bool) -> Plan:
    """``across``: neighbours in the pipeline are always on different islands."""
    names = [worker.name for worker in workers(cluster)]
    total = len(graph.operators)
    cuts = [round(total * stage / STAGES) for stage in range(STAGES + 1)]
    replicas = []
    for replica in range(2):
        place = [names[(stage + replica) % 2 * STAGES + stage] if across else names[replica * STAGES + stage]
                 for stage in range(STAGES)]
        stages = tuple(StagePlacement(first=graph.operators[cuts[stage]].name, last=graph.operators[cuts[stage + 1] - 1].name,
                                      worker=place[stage], recompute=False) for stage in range(STAGES))
        replicas.append(ReplicaPlan(stages=stages, microbatches=MICROBATCHES))
    return Plan(job="", cluster=cluster.name, graph=graph.name, schedule="1f1b", chunks=1, microbatch_samples=1,
                replicas=tuple(replicas), bucket_bytes=100 * 2**20, collective="ring", native=False)


def measure(graph: Graph, cluster: Cluster, across: bool, steps: int, repeats: int) -> tuple[float, int, float]:
    """Return (instructions/s in the fastest of ``repeats``, instructions, predicted step in s)."""
    precision = PRECISIONS["bf16"]
    plan = plan_of(graph, cluster, across)
    network = Network(cluster)
    program = lower(plan, graph, {worker.name: worker.island for worker in workers(cluster)}, precision)
    costs = PlanCosts(graph, plan, cluster, precision)
    rates = []
    for _ in range(repeats):
        start = time.process_time()
        simulation = simulate(program, costs, network, steps=steps)
        assert simulation.peak_bytes
        rates.append(simulation.instructions / (time.process_time() - start))
    return max(rates), simulation.instructions, simulation.step_ns / 1e9


def main() -> int:
    repeats = 5 if quick(__doc__ or "") else 15
    graph = build_graph(ModelSpec(preset="gpt2-xl"), 1024, "bfloat16")
    assert graph is not None
    cluster = two_islands()
    figures: dict[str, float] = {}
    for name, across in (("islands", False), ("contended", True)):
        for steps in (1, 4):
            rate, instructions, step_s = measure(graph, cluster, across, steps, repeats)
            figures[f"{name}_{steps}_steps_per_s"] = round(rate)
            figures[f"{name}_{steps}_instructions"] = instructions
            figures[f"{name}_step_s"] = step_s
            print(f"{name}, {steps} steps: {instructions} instructions, {rate:,.0f} a second")
    goals = {f"{name}_4_steps_per_s": (">=", float(GOAL)) for name in ("islands", "contended")}

    def picture(figure: Figure) -> None:
        axes = figure.subplots()
        names = [name for name in figures if name.endswith("steps_per_s")]
        axes.barh([name.removesuffix("_per_s").replace("_", " ") for name in names], [figures[name] for name in names])
        axes.axvline(GOAL, color="black", linestyle="--")
        axes.set_xlabel("instructions simulated a second on one core (dashed: the goal)")
        axes.set_title("simulator speed, 32 workers, 64 microbatches")

    return finish("simulator", figures, goals, picture)


if __name__ == "__main__":
    sys.exit(main())
