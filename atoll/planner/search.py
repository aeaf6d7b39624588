"""The search: candidates by exact partition and a fast estimate, the best of them by simulation.

1. arrangements x microbatch sizes x recomputation, each cut by dynamic programming under memory (1F1B's activations);
2. the most promising with every schedule and number of chunks that their memory allows;
3. in the order of their estimates, simulate as many as the time allows; the fastest that fits is the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from atoll.errors import PlanError
from atoll.plan.job import Job
from atoll.plan.plan import Plan, ReplicaPlan, StagePlacement
from atoll.plan.rules import MOST_MICROBATCHES, check_plan
from atoll.planner.arrangements import Arrangement, arrangements
from atoll.planner.estimate import Candidate, ReplicaDraft, estimate, interval_ns
from atoll.planner.partition import partition
from atoll.planner.predict import Prediction, predict
from atoll.planner.times import Problem
from atoll.policies.schedules.table import SCHEDULES
from atoll.records import digest
from atoll.units import format_bytes

__all__ = ["Budget", "Decision", "Trial", "describe", "draft_candidates", "microbatches", "one_of_each",
           "refuse_impossible", "search", "to_plan"]

_BUCKET_BYTES = 25 * 2**20
_CHUNKS = (1, 2, 3, 4)
_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How hard to look. ``drafts``: candidates partitioned; ``kept``: of these expanded by schedule; ``simulated``: at
    most; ``seconds``: after which no further simulation starts."""

    drafts: int = 20_000
    kept: int = 12
    simulated: int = 48
    seconds: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate that was looked at: what came of it (``step_ns`` simulated) or why it was not (``refused``)."""

    candidate: Candidate
    step_ns: int | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The best plan with its prediction, and what was tried on the way."""

    prediction: Prediction
    trials: tuple[Trial, ...]
    drafted: int
    over_memory: int
    seconds: float


@dataclass(slots=True)
class _Shortfall:
    """The nearest miss while nothing fits."""

    excess_bytes: float = float("inf")
    worker: str = ""
    what: str = ""


def search(problem: Problem, job: Job, budget: Budget | None = None,
           clock: Callable[[], float] = time.monotonic) -> Decision:
    """Return the best plan for ``job``. Raises ``PlanError`` when none fits: by how much, and the nearest change that would."""
    budget = budget or Budget()
    started = clock()
    _refuse_wishes(problem, job)
    shortfall = _Shortfall()
    drafts, drafted, over = draft_candidates(problem, job, budget.drafts)
    if not drafts:
        _nearest_miss(problem, job, shortfall)
        raise PlanError(_no_plan(problem, job, shortfall))
    expanded = sorted(_expand(problem, job, drafts[:budget.kept]), key=lambda c: c.estimate_ns)[:budget.simulated]
    expanded += _expand(problem, job, one_of_each(drafts[budget.kept:], expanded), own_schedule=True)
    trials: list[Trial] = []
    best: Prediction | None = None
    for candidate in expanded:
        if best is not None and clock() - started > budget.seconds:
            break
        prediction = predict(problem, to_plan(problem, job, candidate))
        misfit = _misfit(problem, prediction)
        if misfit:
            worker, excess = misfit
            if excess < shortfall.excess_bytes:
                shortfall.excess_bytes, shortfall.worker, shortfall.what = excess, worker, describe(candidate)
            trials.append(Trial(candidate=candidate, refused=f"{worker} would lack {format_bytes(excess)} of memory"))
            continue
        trials.append(Trial(candidate=candidate, step_ns=prediction.step_ns))
        if best is None or prediction.step_ns < best.step_ns:
            best = prediction
    if best is None:
        raise PlanError(_no_plan(problem, job, shortfall))
    check_plan(best.plan, job, problem.graph, problem.network.workers)
    return Decision(prediction=best, trials=tuple(trials), drafted=drafted, over_memory=over, seconds=clock() - started)


def refuse_impossible(problem: Problem, job: Job) -> None:
    """Raise ``PlanError`` as ``search`` would when no plan exists or none fits, without looking for the best one."""
    _refuse_wishes(problem, job)
    for arrangement in arrangements(problem, job.plan.replicas, job.plan.stages):
        for samples in microbatches(job):
            if _draft(problem, job, arrangement, samples, job.plan.recompute != "never") is not None:
                return
    shortfall = _Shortfall()
    _nearest_miss(problem, job, shortfall)
    raise PlanError(_no_plan(problem, job, shortfall))


def _refuse_wishes(problem: Problem, job: Job) -> None:
    """Raise ``PlanError`` for wishes of the job that no plan can meet."""
    wishes, workers = job.plan, len(problem.network.workers)
    size = wishes.microbatch
    if size is not None and job.global_batch % size:
        raise PlanError(f"job.plan.microbatch: found {size}, which does not divide job.global_batch ({job.global_batch}); "
                        "change one of them")
    if size is not None and job.data.validation > 0 and job.evaluation.samples % size:
        raise PlanError(f"job.plan.microbatch: found {size}, which does not divide job.evaluation.samples "
                        f"({job.evaluation.samples}); set that to a multiple of {size}, or job.data.validation to 0")
    needed = (wishes.replicas or 1) * (wishes.stages or 1)
    if needed > workers:
        raise PlanError(f"job.plan: {wishes.replicas or 1} replicas of {wishes.stages or 1} stages take {needed} workers, and "
                        f"the cluster has {workers}; ask for fewer or add machines")
    if job.compile and wishes.schedule is not None and SCHEDULES[wishes.schedule].splits_backward:
        raise PlanError(f"job.plan.schedule: {wishes.schedule} splits the backward, which a compiled stage cannot; set "
                        "job.compile to false or choose another schedule")
    if job.global_batch // max(microbatches(job)) > MOST_MICROBATCHES:
        raise PlanError(f"job.global_batch: found {job.global_batch}, which is {job.global_batch // max(microbatches(job))} "
                        f"microbatches of {max(microbatches(job))} a step, and more than {MOST_MICROBATCHES} are not planned; "
                        "lower it or ask for larger ones with job.plan.microbatch")


def _misfit(problem: Problem, prediction: Prediction) -> tuple[str, float] | None:
    """The worker that the simulated high-water overfills most, and by how many bytes."""
    over = {name: peak.total_bytes - problem.memory_bytes(name) for name, peak in prediction.simulation.peaks.items()}
    worst = max(over, key=over.__getitem__)
    return (worst, over[worst]) if over[worst] > 0 else None


def describe(candidate: Candidate) -> str:
    """ "2 replicas x 3 stages, 1f1b, microbatches of 4 sequences". """
    stages = "/".join(dict.fromkeys(str(len(draft.stage_workers)) for draft in candidate.replicas))
    count = len(candidate.replicas)
    text = (f"{count} replica{'s' if count > 1 else ''} x {stages} stage{'s' if stages != '1' else ''}, {candidate.schedule}, "
            f"microbatches of {candidate.samples}")
    return text + (", recomputing" if candidate.recompute else "")


def draft_candidates(problem: Problem, job: Job, limit: int = 20_000,
                     among: Iterable[Arrangement] | None = None) -> tuple[list[Candidate], int, int]:
    """All arrangements (or those of ``among``), microbatch sizes and recomputation choices, partitioned for 1F1B and sorted
    by estimate. Returns (those that fit, how many were tried, how many of these did not fit).
    """
    found: list[Candidate] = []
    tried = over = 0
    for arrangement in arrangements(problem, job.plan.replicas, job.plan.stages) if among is None else among:
        for samples in microbatches(job):
            for recompute in {"auto": (False, True), "always": (True,), "never": (False,)}[job.plan.recompute]:
                if tried >= limit:
                    break
                tried += 1
                candidate = _draft(problem, job, arrangement, samples, recompute)
                if candidate is None:
                    over += 1
                    continue
                found.append(candidate)
                if not recompute:
                    break  # recomputation only ever buys memory
    found.sort(key=lambda candidate: candidate.estimate_ns)
    return found, tried, over


def microbatches(job: Job) -> list[int]:
    """Sizes worth trying: the one asked for, or the small powers of two that divide the global batch and what is evaluated."""
    if job.plan.microbatch is not None:
        return [job.plan.microbatch]
    held_out = job.evaluation.samples if job.data.validation > 0 else 0
    return [size for size in _SIZES if job.global_batch % size == 0 and held_out % size == 0]


def _draft(problem: Problem, job: Job, arrangement: Arrangement, samples: int, recompute: bool) -> Candidate | None:
    total = job.global_batch // samples
    if not len(arrangement) <= total <= MOST_MICROBATCHES or job.global_batch % samples:
        return None
    state = problem.element_sums[-1] * problem.state_bytes
    if any(sum(problem.memory_bytes(worker) for worker in ranks) < state for ranks in arrangement):
        return None  # not even the weights and their state fit: no need to cut it up
    drafts = []
    for ranks in arrangement:
        live = tuple(min(len(ranks) - k, max(1, total // len(arrangement))) for k in range(len(ranks)))
        cut = partition(problem, ranks, samples, live, recompute)
        if cut is None:
            return None
        drafts.append(ReplicaDraft(ranks=ranks, stage_workers=ranks, cuts=cut.cuts, live=live))
    candidate = Candidate(schedule="1f1b", chunks=1, samples=samples, recompute=recompute, replicas=tuple(drafts))
    return _priced(problem, _share_out(problem, candidate, total))


def _nearest_miss(problem: Problem, job: Job, shortfall: _Shortfall, attempts: int = 8) -> None:
    """When nothing fits: of the arrangements with most memory a replica, the one that is least over."""
    room = {worker: problem.memory_bytes(worker) for worker in problem.network.workers}
    found = sorted(arrangements(problem, job.plan.replicas, job.plan.stages),
                   key=lambda groups: -min(sum(room[worker] for worker in group) for group in groups))
    samples = min(microbatches(job), default=1)
    recompute = job.plan.recompute != "never"
    for arrangement in found[:attempts]:
        for ranks in arrangement:
            live = tuple(min(len(ranks) - k, max(1, job.global_batch // samples)) for k in range(len(ranks)))
            cut = partition(problem, ranks, samples, live, recompute, nearest=True)
            if cut is not None and 0 < cut.excess_bytes < shortfall.excess_bytes:
                stages = len(ranks)
                shortfall.excess_bytes, shortfall.worker = cut.excess_bytes, cut.worst
                shortfall.what = (f"{stages} stage{'s' if stages > 1 else ''} with microbatches of {samples}"
                                  + (", recomputing" if recompute else ""))


def _priced(problem: Problem, candidate: Candidate) -> Candidate:
    return replace(candidate, estimate_ns=estimate(problem, candidate))


def _share_out(problem: Problem, candidate: Candidate, total: int) -> Candidate:
    """Deal ``total`` microbatches one by one to the replica that would finish first with one more."""
    figures = [interval_ns(problem, draft, candidate.samples, candidate.recompute, candidate.chunks)
               for draft in candidate.replicas]
    counts = [1] * len(figures)
    for _ in range(total - len(figures)):
        ends = [through + counts[r] * interval for r, (interval, through) in enumerate(figures)]
        counts[ends.index(min(ends))] += 1
    return replace(candidate, replicas=tuple(replace(draft, microbatches=count)
                                             for draft, count in zip(candidate.replicas, counts, strict=True)))


def _shape(candidate: Candidate) -> tuple[int, ...]:
    """Workers of each replica: what a person means by another way to lay the model out."""
    return tuple(sorted(len(draft.ranks) for draft in candidate.replicas))


def one_of_each(drafts: list[Candidate], known: list[Candidate]) -> list[Candidate]:
    """The best draft of every shape (workers of each replica) that ``known`` lacks."""
    found: dict[tuple[int, ...], Candidate] = {}
    shapes = {_shape(candidate) for candidate in known}
    for draft in drafts:
        if _shape(draft) not in shapes:
            found.setdefault(_shape(draft), draft)
    return list(found.values())


def _expand(problem: Problem, job: Job, drafts: list[Candidate], *,
            own_schedule: bool = False) -> Iterator[Candidate]:
    """Each draft with every schedule and number of chunks that exists for it (``own_schedule``: with its own only)."""
    for draft in drafts:
        if own_schedule and job.plan.schedule is None and job.plan.chunks is None:
            yield draft
            continue
        single = all(len(replica.ranks) == 1 for replica in draft.replicas)
        for name in SCHEDULES:
            if job.plan.schedule is not None and name != job.plan.schedule:
                continue
            if job.compile and SCHEDULES[name].splits_backward:
                continue
            if single and name not in ("1f1b", "breadth-first") and job.plan.schedule is None:
                continue  # on one worker the order hardly matters; chunks only serve to overlap the sum of gradients
            for chunks in _CHUNKS if job.plan.chunks is None else (job.plan.chunks,):
                candidate = _with_schedule(problem, draft, name, chunks)
                if candidate is not None:
                    yield candidate


def _with_schedule(problem: Problem, draft: Candidate, name: str, chunks: int) -> Candidate | None:
    schedule = SCHEDULES[name]
    replicas = []
    for replica in draft.replicas:
        ranks = len(replica.ranks)
        if ranks * chunks > len(problem.graph.operators) or schedule.refuse(ranks, replica.microbatches, chunks):
            return None
        placement = schedule.placement(ranks, chunks)
        peaks = schedule.claim(ranks, replica.microbatches, chunks).peak_activations
        workers = tuple(replica.ranks[rank] for rank in placement)
        live = tuple(max(1, -(-peaks[rank] // chunks)) for rank in placement)
        cut = partition(problem, workers, draft.samples, live, draft.recompute)
        if cut is None:
            return None
        replicas.append(replace(replica, stage_workers=workers, cuts=cut.cuts, live=live))
    return _priced(problem, replace(draft, schedule=name, chunks=chunks, replicas=tuple(replicas)))


def to_plan(problem: Problem, job: Job, candidate: Candidate) -> Plan:
    operators = problem.graph.operators
    replicas = tuple(
        ReplicaPlan(microbatches=draft.microbatches, stages=tuple(
            StagePlacement(first=operators[low].name, last=operators[high - 1].name, worker=worker,
                           recompute=candidate.recompute)
            for (low, high), worker in zip(pairwise(draft.cuts), draft.stage_workers, strict=True)))
        for draft in candidate.replicas)
    return Plan(job=digest(job), cluster=digest(problem.cluster), graph=problem.graph.name, schedule=candidate.schedule,
                chunks=candidate.chunks, microbatch_samples=candidate.samples, replicas=replicas, bucket_bytes=_BUCKET_BYTES,
                collective="ring", native=True)


def _no_plan(problem: Problem, job: Job, shortfall: _Shortfall) -> str:
    workers = problem.network.workers
    wishes = job.plan
    if shortfall.excess_bytes == float("inf"):
        return (f"no plan exists for a global batch of {job.global_batch} on {len(workers)} workers with what job.plan asks "
                f"(replicas {wishes.replicas or 'any'}, stages {wishes.stages or 'any'}, microbatch "
                f"{wishes.microbatch or 'any'}, schedule {wishes.schedule or 'any'}): the microbatch must divide the global "
                "batch, and every replica needs a microbatch and enough operators for its stages; loosen one of them")
    needed = problem.element_sums[-1] * problem.state_bytes
    held = sum(problem.memory_bytes(worker) for worker in workers)
    machine = workers[shortfall.worker].machine
    lacking = format_bytes(shortfall.excess_bytes)
    return (f"the model fits no plan: nearest is {shortfall.what}, where {shortfall.worker} (machine {machine}) lacks "
            f"{lacking}; weights, gradients and optimizer state alone take {format_bytes(needed)} and all devices together "
            f"offer {format_bytes(held)}; the nearest change that would fit: {lacking} more memory on {shortfall.worker}, a "
            "shorter sequence, or a smaller model")
