"""Rules between decisions: what a plan must obey before it is lowered. Each rule is a small function that yields sentences.

A plan of the planner obeys them all (the search asserts it); a plan.yaml that a person wrote or brought from elsewhere may
not. That replicas in several islands never share a library's collective needs no rule: lowering chooses it per bucket.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from atoll.errors import GraphError, PlanError
from atoll.graph.graph import DTYPE_BYTES, Graph, GraphIndex
from atoll.plan.job import PRECISIONS, Job
from atoll.plan.layout import cuts_of
from atoll.plan.plan import Plan, ReplicaPlan
from atoll.policies.collectives.table import COLLECTIVES
from atoll.policies.schedules.table import SCHEDULES
from atoll.records import digest

__all__ = ["MOST_MICROBATCHES", "RULES", "Case", "check_plan", "made_for_others"]

MOST_MICROBATCHES = 4096
"""Of a step: more take longer to simulate than anybody waits, and no pipeline gains from them."""


@dataclass(frozen=True, slots=True)
class Case:
    """A plan beside what it is for. ``workers``: names of all that the cluster has."""

    plan: Plan
    job: Job
    graph: Graph
    workers: Collection[str]


Rule = Callable[[Case], Iterator[str]]


def check_plan(plan: Plan, job: Job, graph: Graph, workers: Collection[str]) -> None:
    """Raise ``PlanError`` with the first rule that ``plan`` breaks: the culprit, what was found, what to change.

    ``workers``: names of the cluster's workers. Cost: O(stages + operators).
    """
    case = Case(plan, job, graph, workers)
    for rule in RULES:
        for sentence in rule(case):
            raise PlanError(f"plan: {sentence}")


def made_for_others(plan: Plan, job: Job, cluster: object) -> tuple[str, ...]:
    """Sentences for a plan whose job or cluster is not this one: it may still be legal, but was not chosen for it."""
    found = [noun for noun, known, own in (("job", plan.job, digest(job)), ("cluster", plan.cluster, digest(cluster)))
             if known != own]
    if not found:
        return ()
    return (f"Beware: the plan was made for another {' and another '.join(found)}; it is taken as it is, but one made anew "
            "may be better.",)


def _numbers(case: Case) -> Iterator[str]:
    plan = case.plan
    for field in ("chunks", "microbatch_samples"):
        if getattr(plan, field) < 1:
            yield f"{field}: found {getattr(plan, field)}, expected at least 1"
    size = DTYPE_BYTES[PRECISIONS[case.job.precision].master]
    if plan.bucket_bytes < size:
        yield (f"bucket_bytes: found {plan.bucket_bytes}, and one gradient takes {size} bytes; 26214400 (25 MiB) suits most "
               "networks")
    if not plan.replicas:
        yield "replicas: found none, expected at least one copy of the model"
    for number, replica in enumerate(plan.replicas):
        if not replica.stages:
            yield f"replicas[{number}].stages: found none, expected at least one"
        if replica.microbatches < 1:
            yield (f"replicas[{number}].microbatches: found {replica.microbatches}, expected at least 1 (or leave the replica "
                   "out)")


def _graph(case: Case) -> Iterator[str]:
    if case.plan.graph != case.graph.name:
        yield (f"graph: the plan is for model {case.plan.graph!r}, the job's is {case.graph.name!r}; make a plan for this job "
               "(atoll plan JOB --out plan.yaml)")


def _operators(case: Case) -> Iterator[str]:
    """Every operator is placed exactly once in each replica, in order."""
    index = GraphIndex(case.graph)
    for number, replica in enumerate(case.plan.replicas):
        for stage, placed in enumerate(replica.stages):
            for name in (placed.first, placed.last):
                if name not in index.position:
                    yield (f"replicas[{number}].stages[{stage}]: model {case.graph.name} has no operator {name!r}; "
                           f"{_near(name, index.position)}")
        try:
            cuts_of(replica, index)
        except (PlanError, GraphError) as error:
            yield f"replicas[{number}]: {str(error).removeprefix('plan: ')}"


def _workers(case: Case) -> Iterator[str]:
    """Every worker exists and serves one replica."""
    home: dict[str, int] = {}
    for number, replica in enumerate(case.plan.replicas):
        for stage, placed in enumerate(replica.stages):
            place = f"replicas[{number}].stages[{stage}].worker"
            if placed.worker not in case.workers:
                yield f"{place}: the cluster has no worker {placed.worker!r}; {_near(placed.worker, case.workers)}"
            if home.setdefault(placed.worker, number) != number:
                yield f"{place}: {placed.worker!r} also serves replica {home[placed.worker]}; a worker serves one"


def _schedule(case: Case) -> Iterator[str]:
    """The schedule exists, and exists for these ranks, microbatches and chunks."""
    plan = case.plan
    if plan.schedule not in SCHEDULES:
        yield f"schedule: found {plan.schedule!r}; {_near(plan.schedule, SCHEDULES)}"
        return
    for number, replica in enumerate(plan.replicas):
        refusal = SCHEDULES[plan.schedule].refuse(len(_ranks(replica)), replica.microbatches, plan.chunks)
        if refusal:
            yield f"replicas[{number}]: {refusal}"


def _placement(case: Case) -> Iterator[str]:
    """Stages lie on the ranks that the schedule puts them on."""
    plan = case.plan
    if plan.schedule not in SCHEDULES:
        return
    for number, replica in enumerate(plan.replicas):
        ranks = _ranks(replica)
        if len(replica.stages) != len(ranks) * plan.chunks:
            yield (f"replicas[{number}].stages: found {len(replica.stages)} on {len(ranks)} workers; {plan.schedule} with "
                   f"chunks {plan.chunks} has {len(ranks) * plan.chunks}")
            continue
        wanted = SCHEDULES[plan.schedule].placement(len(ranks), plan.chunks)
        for stage, (placed, rank) in enumerate(zip(replica.stages, wanted, strict=True)):
            if placed.worker != ranks[rank]:
                yield (f"replicas[{number}].stages[{stage}].worker: found {placed.worker!r}; {plan.schedule} with chunks "
                       f"{plan.chunks} runs this stage on {ranks[rank]!r}")


def _batch(case: Case) -> Iterator[str]:
    """The microbatches of all replicas are the job's global batch, and not too many."""
    plan = case.plan
    count = sum(replica.microbatches for replica in plan.replicas)
    if count > MOST_MICROBATCHES:
        yield f"{count} microbatches a step are more than the {MOST_MICROBATCHES} that can be handled; make them larger"
    if count * plan.microbatch_samples != case.job.global_batch:
        yield (f"{count} microbatches of {plan.microbatch_samples} are {count * plan.microbatch_samples} sequences a step, and "
               f"job.global_batch is {case.job.global_batch}; change microbatches or microbatch_samples")


def _evaluation(case: Case) -> Iterator[str]:
    """What is held out is looked at in whole microbatches."""
    job, samples = case.job, case.plan.microbatch_samples
    if job.data.validation > 0 and job.evaluation.samples % samples:
        more = -(-job.evaluation.samples // samples) * samples
        yield (f"microbatch_samples: found {samples}, which does not divide the {job.evaluation.samples} sequences of "
               f"job.evaluation.samples; set that to {more}, or job.data.validation to 0")


def _collective(case: Case) -> Iterator[str]:
    if case.plan.collective not in COLLECTIVES:
        yield f"collective: found {case.plan.collective!r}; {_near(case.plan.collective, COLLECTIVES)}"


def _compiled(case: Case) -> Iterator[str]:
    schedule = SCHEDULES.get(case.plan.schedule)
    if case.job.compile and schedule is not None and schedule.splits_backward:
        whole = ", ".join(name for name, other in SCHEDULES.items() if not other.splits_backward)
        yield (f"schedule: {case.plan.schedule} splits the backward, which a compiled stage cannot; set job.compile to false "
               f"or take one of {whole}")


def _ranks(replica: ReplicaPlan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(placed.worker for placed in replica.stages))


def _near(name: str, known: Collection[str] | Mapping[str, object]) -> str:
    names = list(known)
    matches = difflib.get_close_matches(name, names, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(repr(match) for match in matches)}? " if matches else ""
    return f"{hint}known: {', '.join(names[:12])}" + (f" and {len(names) - 12} more" if len(names) > 12 else "")


RULES: tuple[Rule, ...] = (_numbers, _graph, _operators, _workers, _batch, _schedule, _placement, _evaluation, _collective,
                           _compiled)
