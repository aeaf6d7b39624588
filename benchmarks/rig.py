"""What the benchmarks of whole runs share: plans by hand, and ``atoll train`` emulated in processes or in the lab."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll import records
from atoll.cluster.cluster import Cluster
from atoll.lab.lab import Lab
from atoll.lab.training import ATOLL, train_in_lab
from atoll.plan.job import Job
from atoll.plan.plan import Plan
from atoll.planner.estimate import Candidate, ReplicaDraft
from atoll.planner.partition import partition
from atoll.planner.problem import problem_of, with_vocabulary
from atoll.planner.search import to_plan
from atoll.policies.schedules.table import SCHEDULES

__all__ = ["Combo", "emulated", "in_lab", "median_step_ns", "plan_for"]


@dataclass(frozen=True, slots=True)
class Combo:
    """``replicas``: the machines of each, in the order of the pipeline. ``microbatches``: of a step, over all replicas."""

    schedule: str
    replicas: tuple[tuple[str, ...], ...]
    microbatches: int
    chunks: int = 1
    samples: int = 4

    @property
    def name(self) -> str:
        stages = len(self.replicas[0]) * self.chunks
        copies = f"{len(self.replicas)} x " if len(self.replicas) > 1 else ""
        return f"{self.schedule}, {copies}{stages} stages, {self.microbatches} microbatches"

    def job(self, base: Job, steps: int) -> Job:
        """``base`` with this combination's global batch."""
        return msgspec.structs.replace(base, global_batch=self.samples * self.microbatches, steps=steps)


def plan_for(job: Job, cluster: Cluster, combo: Combo) -> Plan:
    """The combination as a plan, its stages cut by the planner's partition. Needs no torch and no profile."""
    problem = problem_of(with_vocabulary(job), cluster)
    rule = SCHEDULES[combo.schedule]
    drafts = []
    for ranks in combo.replicas:
        refusal = rule.refuse(len(ranks), combo.microbatches // len(combo.replicas), combo.chunks)
        if refusal:
            raise ValueError(f"{combo.name}: {refusal}")
        workers = tuple(ranks[rank] for rank in rule.placement(len(ranks), combo.chunks))
        live = (1,) * len(workers)
        cut = partition(problem, workers, combo.samples, live, False)
        if cut is None or cut.excess_bytes > 0:
            raise ValueError(f"{combo.name}: the model has too few operators for {len(workers)} stages, or does not fit")
        drafts.append(ReplicaDraft(ranks=ranks, stage_workers=workers, cuts=cut.cuts, live=live,
                                   microbatches=combo.microbatches // len(combo.replicas)))
    return to_plan(problem, job, Candidate(schedule=combo.schedule, chunks=combo.chunks, samples=combo.samples,
                                           recompute=False, replicas=tuple(drafts)))


def _written(folder: Path, **documents: Any) -> dict[str, Path]:
    paths = {name: folder / f"{name}.yaml" for name in documents}
    for name, document in documents.items():
        records.save(paths[name], document)
    return paths


def emulated(job: Job, cluster: Cluster, plan: Plan, folder: Path, run: str = "run") -> dict[str, Any]:
    """``atoll train --json``, all machines as processes; the object that it printed."""
    paths = _written(folder, job=job, cluster=cluster, plan=plan)
    done = subprocess.run([*ATOLL, "train", str(paths["job"]), "--cluster", str(paths["cluster"]), "--plan", str(paths["plan"]),
                           "--run", str(folder / run), "--json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"atoll train ended with exit code {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def in_lab(job: Job, cluster: Cluster, plan: Plan, folder: Path, run: str = "run") -> dict[str, Any]:
    """The same through ``atoll train`` and ``atoll worker``, one network namespace a machine (root); also ``bytes``: what the
    interface counters saw leave into each directed segment."""
    paths = _written(folder, job=job, plan=plan)
    with Lab(cluster) as lab:
        result = train_in_lab(lab, paths["job"], folder, plan=paths["plan"], run=run)
        result["bytes"] = {segment: lab.bytes(segment) for segment in lab.network.capacity}
    return result


def median_step_ns(result: dict[str, Any]) -> int:
    """Measured length of a step, as the report has it: the median of those after the first two."""
    return int(result["comparison"]["step"]["measured_ns"])


