"""Rules between decisions: each broken on its own by one change to a sound plan, with the place, the find and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import msgspec
import pytest

from atoll.errors import PlanError
from atoll.plan.job import EvaluationSpec, Job, Wishes
from atoll.plan.plan import Plan, ReplicaPlan, StagePlacement
from atoll.plan.rules import MOST_MICROBATCHES, RULES, Case, check_plan, made_for_others
from atoll.planner.search import search
from atoll.policies.data.spec import DataSpec
from tests.test_planner import cluster, job, problem

replace = msgspec.structs.replace


@cache
def wanted() -> Job:
    return job(data=DataSpec(validation=0.1), evaluation=EvaluationSpec(samples=16),
               plan=Wishes(schedule="1f1b", stages=2, replicas=2))


@cache
def sound() -> Plan:
    return search(problem(), wanted()).prediction.plan


def stages(change: Callable[[tuple[StagePlacement, ...]], tuple[StagePlacement, ...]]) -> Callable[[Plan], Plan]:
    """A change to the stages of the first replica."""
    def changed(plan: Plan) -> Plan:
        first, *others = plan.replicas
        return replace(plan, replicas=(replace(first, stages=change(first.stages)), *others))
    return changed


def first_stage(**fields: object) -> Callable[[Plan], Plan]:
    return stages(lambda found: (replace(found[0], **fields), *found[1:]))


BREACHES: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "no chunks": (lambda plan: replace(plan, chunks=0), r"chunks: found 0, expected at least 1"),
    "small bucket": (lambda plan: replace(plan, bucket_bytes=3), r"bucket_bytes: found 3, and one gradient takes 4 bytes"),
    "no replica": (lambda plan: replace(plan, replicas=()), r"replicas: found none"),
    "no stage": (stages(lambda found: ()), r"replicas\[0\].stages: found none"),
    "idle replica": (lambda plan: replace(plan, replicas=(replace(plan.replicas[0], microbatches=0), *plan.replicas[1:])),
                     r"replicas\[0\].microbatches: found 0"),
    "other model": (lambda plan: replace(plan, graph="llama"), r"the plan is for model 'llama', the job's is 'chain'"),
    "unknown operator": (first_stage(last="block.99"), r"stages\[0\]: model chain has no operator 'block.99'; did you mean"),
    "gap": (first_stage(first="block.0"), r"replicas\[0\]: "),
    "overlap": (stages(lambda found: (replace(found[0], last=found[1].first), *found[1:])), r"replicas\[0\]: "),
    "end missing": (stages(lambda found: (*found[:-1], replace(found[-1], last="block.7"))), r"replicas\[0\]: "),
    "unknown worker": (first_stage(worker="m00x"), r"stages\[0\].worker: the cluster has no worker 'm00x'; did you mean 'm00'"),
    "two masters": (lambda plan: replace(plan, replicas=(plan.replicas[0], plan.replicas[0])), r"a worker serves one"),
    "unknown schedule": (lambda plan: replace(plan, schedule="1f2b"), r"schedule: found '1f2b'; did you mean '1f1b'"),
    "schedule of other shape": (lambda plan: replace(plan, schedule="zb-v"), r"replicas\[0\]: "),
    "stages on the wrong rank": (lambda plan: replace(plan, schedule="interleaved-1f1b", chunks=2), r"replicas\[0\]"),
    "other batch": (lambda plan: replace(plan, microbatch_samples=3 * plan.microbatch_samples),
                    r"sequences a step, and job.global_batch is 16; change microbatches or microbatch_samples"),
    "too many microbatches": (lambda plan: replace(plan, replicas=(
        replace(plan.replicas[0], microbatches=MOST_MICROBATCHES), *plan.replicas[1:])), r"make them larger"),
    "unknown collective": (lambda plan: replace(plan, collective="rings"), r"collective: found 'rings'; did you mean 'ring'"),
}


def test_what_the_planner_makes_breaks_no_rule() -> None:
    check_plan(sound(), wanted(), problem().graph, problem().network.workers)
    assert len(sound().replicas) == 2 and sound().workers == tuple(dict.fromkeys(
        stage.worker for replica in sound().replicas for stage in replica.stages))


@pytest.mark.parametrize("breach", BREACHES)
def test_each_breach_is_found(breach: str) -> None:
    change, sentence = BREACHES[breach]
    plan = change(sound())
    assert plan != sound()
    with pytest.raises(PlanError, match="^plan: .*" + sentence):
        check_plan(plan, wanted(), problem().graph, problem().network.workers)


def test_rules_that_depend_on_the_job() -> None:
    workers = problem().network.workers
    uneven = replace(wanted(), evaluation=EvaluationSpec(samples=sound().microbatch_samples + 1))
    if sound().microbatch_samples > 1:
        with pytest.raises(PlanError, match=r"does not divide the \d+ sequences of job.evaluation.samples; set that to"):
            check_plan(sound(), uneven, problem().graph, workers)
    split = replace(sound(), schedule="zb-h1")
    check_plan(split, wanted(), problem().graph, workers)
    with pytest.raises(PlanError, match=r"zb-h1 splits the backward, which a compiled stage cannot; .* one of gpipe, 1f1b"):
        check_plan(split, replace(wanted(), compile=True), problem().graph, workers)


def test_every_rule_finds_something() -> None:
    """A rule that no breach above triggers would be one that nobody has seen work."""
    cases = [Case(change(sound()), wanted(), problem().graph, problem().network.workers) for change, _ in BREACHES.values()]
    cases += [Case(replace(sound(), schedule="zb-h1"), replace(wanted(), compile=True), problem().graph, ()),
              Case(replace(sound(), microbatch_samples=5), wanted(), problem().graph, ())]
    for rule in RULES:
        found = []
        for case in cases:
            try:
                found += list(rule(case))
            except (KeyError, IndexError, ValueError):  # earlier rules keep such plans away from this one
                continue
        assert found, rule.__name__


def test_a_plan_for_something_else_is_used_with_a_warning() -> None:
    own = cluster()
    plan = search(problem(), wanted()).prediction.plan
    assert made_for_others(plan, wanted(), own) == ()
    assert "another cluster;" in made_for_others(plan, wanted(), cluster(between="10 Mbit/s"))[0]
    assert "another job and another cluster;" in made_for_others(plan, replace(wanted(), seed=9), cluster(memory=1))[0]


def test_a_worker_alone_is_a_plan() -> None:
    whole = StagePlacement(first="embed", last="loss", worker="m00", recompute=False)
    plan = replace(sound(), replicas=(ReplicaPlan(stages=(whole,), microbatches=16),), microbatch_samples=1)
    check_plan(plan, wanted(), problem().graph, problem().network.workers)
