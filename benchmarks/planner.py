"""Plan a 70B Llama on 64 unlike GPUs: seconds, peak memory of the process, nothing of torch loaded, no weights allocated."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from contract import finish, quick
from matplotlib.figure import Figure

from atoll.cluster.network import load_cluster
from atoll.graph.spec import ModelSpec
from atoll.plan.job import Job
from atoll.planner.problem import problem_of
from atoll.planner.search import Budget, Decision, describe, search
from atoll.units import Count

CLUSTER = Path(__file__).resolve().parent.parent / "examples" / "clusters" / "unlike-64.yaml"
GOALS = {"seconds": ("<=", 10.0), "peak_gib": ("<=", 2.0), "torch_loaded": ("<=", 0.0)}


def main() -> int:
    quick(__doc__ or "")
    started = time.perf_counter()
    job = Job(name="llama-70b", model=ModelSpec(preset="llama-3-70b"), sequence_length=4096, global_batch=128,
              tokens=Count(10**10), precision="bf16")
    problem = problem_of(job, load_cluster(CLUSTER))
    decision = search(problem, job, Budget(seconds=4.0))
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(describe_decision(decision))
    figures = {"seconds": seconds, "peak_gib": peak, "torch_loaded": float("torch" in sys.modules),
               "step_seconds": decision.prediction.step_ns / 1e9, "drafted": float(decision.drafted),
               "simulated": float(len(decision.trials))}
    return finish("planner", figures, GOALS, lambda figure: draw(figure, decision))


def describe_decision(decision: Decision) -> str:
    best = [trial for trial in decision.trials if trial.step_ns == decision.prediction.step_ns]
    return f"best of {len(decision.trials)} simulated, {decision.drafted} drafted: {describe(best[0].candidate)}"


def draw(figure: Figure, decision: Decision) -> None:
    """Simulated step time of every candidate tried, against its estimate."""
    axes = figure.subplots()
    tried = [trial for trial in decision.trials if trial.step_ns is not None]
    axes.scatter([trial.candidate.estimate_ns / 1e9 for trial in tried], [(trial.step_ns or 0) / 1e9 for trial in tried], s=14)
    axes.set_xlabel("estimated step (s)")
    axes.set_ylabel("simulated step (s)")
    axes.set_title("Candidates for a 70B Llama on 64 unlike GPUs")


if __name__ == "__main__":
    sys.exit(main())
