"""Where everything of a plan lies: cuts, workers, samples. Shared by lowering, rules, costs and the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from atoll.errors import PlanError
from atoll.graph.graph import Edge, Graph, GraphIndex
from atoll.plan.plan import Plan, ReplicaPlan
from atoll.program.program import Stage

__all__ = ["Layout", "ReplicaLayout", "cuts_of", "evaluation_plan"]


def cuts_of(replica: ReplicaPlan, index: GraphIndex) -> tuple[int, ...]:
    """The cuts (0, ..., number of operators) that a replica's stages make.

    Raises ``PlanError`` when operators are missing, placed twice or out of order.
    """
    cuts = [0]
    for number, stage in enumerate(replica.stages):
        low, high = index.cut_before(stage.first), index.cut_after(stage.last)
        if low != cuts[-1] or high <= low:
            expected = index.graph.operators[cuts[-1]].name if cuts[-1] < len(index.graph.operators) else "nothing"
            raise PlanError(f"plan: stage {number} runs from {stage.first!r} to {stage.last!r}, but the next operator to "
                            f"place is {expected!r}: every operator belongs to exactly one stage, in order")
        cuts.append(high)
    if cuts[-1] != len(index.graph.operators):
        raise PlanError(f"plan: operators from {index.graph.operators[cuts[-1]].name!r} on are on no stage")
    return tuple(cuts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLayout:
    """``workers``: of each stage; ``ranks``: workers in pipeline order; ``first_microbatch``: global number of its first."""

    number: int
    cuts: tuple[int, ...]
    stages: tuple[Stage, ...]
    workers: tuple[str, ...]
    ranks: tuple[str, ...]
    edges: tuple[Edge, ...]
    recompute: tuple[bool, ...]
    microbatches: int
    first_microbatch: int

    def stages_of(self, worker: str) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.workers) if owner == worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan laid over its graph. ``replica_of`` maps a worker to its replica's number."""

    index: GraphIndex
    samples: int
    replicas: tuple[ReplicaLayout, ...]
    replica_of: Mapping[str, int]

    @classmethod
    def of(cls, plan: Plan, graph: Graph) -> Layout:
        """Raises ``PlanError`` when the plan does not cover the graph or a worker serves two replicas."""
        index = GraphIndex(graph)
        layouts: list[ReplicaLayout] = []
        replica_of: dict[str, int] = {}
        first = 0
        for number, replica in enumerate(plan.replicas):
            cuts = cuts_of(replica, index)
            workers = tuple(stage.worker for stage in replica.stages)
            for worker in set(workers):
                if replica_of.setdefault(worker, number) != number:
                    raise PlanError(f"plan: {worker!r} serves replicas {replica_of[worker]} and {number}; allowed: one")
            layouts.append(ReplicaLayout(
                number=number, cuts=cuts, workers=workers, ranks=tuple(dict.fromkeys(workers)), edges=index.edges(cuts),
                stages=tuple(Stage(index=i, first=s.first, last=s.last) for i, s in enumerate(replica.stages)),
                recompute=tuple(s.recompute for s in replica.stages), microbatches=replica.microbatches,
                first_microbatch=first))
            first += replica.microbatches
        return cls(index=index, samples=plan.microbatch_samples, replicas=tuple(layouts), replica_of=replica_of)

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(worker for replica in self.replicas for worker in replica.ranks)

    def replica(self, worker: str) -> ReplicaLayout:
        return self.replicas[self.replica_of[worker]]

    def first_sample(self, replica: int, microbatch: int) -> int:
        """Position in the step's global batch of the first sample of a replica's microbatch."""
        return (self.replicas[replica].first_microbatch + microbatch) * self.samples


def evaluation_plan(plan: Plan, samples: int) -> Plan:
    """The same placement with microbatches for ``samples`` held-out sequences, spread as evenly as possible.

    Raises ``PlanError`` when ``samples`` is not a multiple of the microbatch.
    """
    total, rest = divmod(samples, plan.microbatch_samples)
    if rest or total < 1:
        raise PlanError(f"job.evaluation.samples: found {samples}, expected a multiple of the microbatch "
                        f"({plan.microbatch_samples} sequences)")
    count = len(plan.replicas)
    replicas = tuple(ReplicaPlan(stages=replica.stages, microbatches=total // count + (number < total % count))
                     for number, replica in enumerate(plan.replicas))
    return Plan(**{field: getattr(plan, field) for field in Plan.__struct_fields__ if field != "replicas"}, replicas=replicas)
