"""A fast estimate of the step time of a candidate, to rank candidates before the best are simulated.

Per replica, with stage times t_k (forward + backward of a microbatch), message times c_k and latencies l_k across cut k, m
microbatches and room for a_k microbatches in flight at stage k:

    interval = max( max_k t_k, max_k c_k, max_k (sum of t and 2(c + l) from stage k on) / a_k )
    step     = sum of t and 2(c + l)  +  (m - 1) * interval          (fill, then one microbatch an interval)

then the sum of gradients 2 (R-1)/R * bytes over the slowest link of the ring, and one agreement; never less than the bytes on
any shared segment over its capacity. (FusionLLM, 2024, has the first term; the in-flight bound is what rules on slow links.)
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.planner.times import Problem

__all__ = ["Candidate", "ReplicaDraft", "estimate", "interval_ns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDraft:
    """``stage_workers``: of each stage in model order. ``live``: microbatches in flight per stage."""

    ranks: tuple[str, ...]
    stage_workers: tuple[str, ...]
    cuts: tuple[int, ...]
    live: tuple[int, ...]
    microbatches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    schedule: str
    chunks: int
    samples: int
    recompute: bool
    replicas: tuple[ReplicaDraft, ...]
    estimate_ns: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    stage_ns: tuple[float, ...]
    busy_ns: tuple[float, ...]
    latency_ns: tuple[float, ...]


def _chain(problem: Problem, draft: ReplicaDraft, samples: int, recompute: bool) -> _Chain:
    stage_ns, busy_ns, latency_ns = [], [], []
    for k, worker in enumerate(draft.stage_workers):
        low, high = draft.cuts[k], draft.cuts[k + 1]
        ranges = problem.ranges(worker, samples)
        forward = ranges.forward_ns[high] - ranges.forward_ns[low]
        backward = ranges.backward_ns[high] - ranges.backward_ns[low]
        stage_ns.append(float(forward * (2 if recompute else 1) + backward) + 2 * problem.devices[worker].launch_ns)
        if k and draft.stage_workers[k - 1] != worker:
            busy, latency = problem.link_ns(draft.stage_workers[k - 1], worker, problem.index.cut_bytes[low] * samples)
        else:
            busy, latency = 0.0, 0.0
        busy_ns.append(busy)
        latency_ns.append(latency)
    return _Chain(stage_ns=tuple(stage_ns), busy_ns=tuple(busy_ns), latency_ns=tuple(latency_ns))


def interval_ns(problem: Problem, draft: ReplicaDraft, samples: int, recompute: bool, chunks: int) -> tuple[float, float]:
    """(time between microbatches in the steady state, time of one microbatch through the whole pipeline and back)."""
    chain = _chain(problem, draft, samples, recompute)
    per_worker: dict[str, float] = {}
    for worker, duration in zip(draft.stage_workers, chain.stage_ns, strict=True):
        per_worker[worker] = per_worker.get(worker, 0.0) + duration
    interval = max(*per_worker.values(), *chain.busy_ns)
    through = 0.0
    for k in reversed(range(len(chain.stage_ns))):
        through += chain.stage_ns[k]
        interval = max(interval, through / draft.live[k])
        through += 2 * (chain.busy_ns[k] + chain.latency_ns[k])
    return interval, through


def estimate(problem: Problem, candidate: Candidate) -> float:
    """Nanoseconds of one step; see the head of this file."""
    pipelines = []
    load: dict[str, float] = {}
    for draft in candidate.replicas:
        interval, through = interval_ns(problem, draft, candidate.samples, candidate.recompute, candidate.chunks)
        fill = through / candidate.chunks if candidate.chunks > 1 else through
        pipelines.append(fill + (draft.microbatches - 1) * interval)
        for k in range(1, len(draft.stage_workers)):
            size = problem.index.cut_bytes[draft.cuts[k]] * candidate.samples * draft.microbatches
            _charge(problem, load, draft.stage_workers[k - 1], draft.stage_workers[k], size)
            _charge(problem, load, draft.stage_workers[k], draft.stage_workers[k - 1], size)
    exchange = _exchange(problem, candidate, load)
    bound = max((size / problem.network.capacity[segment] * 1e9 for segment, size in load.items()), default=0.0)
    return max(max(pipelines) + exchange, bound) + _agreement(problem, candidate)


def _charge(problem: Problem, load: dict[str, float], source: str, target: str, size: float) -> None:
    if source != target:
        for segment in problem.network.path(source, target).segments:
            load[segment] = load.get(segment, 0.0) + size


def _exchange(problem: Problem, candidate: Candidate, load: dict[str, float]) -> float:
    """Ring all-reduce of each stage's gradients over the replicas: the slowest shared segment, plus 2 (R-1) latencies."""
    count = len(candidate.replicas)
    if count == 1:
        return 0.0
    ring: dict[str, float] = {}
    latency = 0.0
    for position, draft in enumerate(candidate.replicas):
        following = candidate.replicas[(position + 1) % count]
        for k, worker in enumerate(draft.stage_workers):
            middle = (draft.cuts[k] + draft.cuts[k + 1]) / 2
            peer = following.stage_workers[_stage_at(following, middle)]
            elements = problem.element_sums[draft.cuts[k + 1]] - problem.element_sums[draft.cuts[k]]
            size = elements * problem.master_bytes * 2 * (count - 1) / count
            _charge(problem, ring, worker, peer, size)
            latency = max(latency, problem.link_ns(worker, peer, 0)[1])
    for segment, size in ring.items():
        load[segment] = load.get(segment, 0.0) + size
    slowest = max((size / problem.network.capacity[segment] * 1e9 for segment, size in ring.items()), default=0.0)
    return slowest + 2 * (count - 1) * latency


def _stage_at(draft: ReplicaDraft, position: float) -> int:
    return next(k for k in range(len(draft.stage_workers)) if draft.cuts[k] <= position <= draft.cuts[k + 1])


def _agreement(problem: Problem, candidate: Candidate) -> float:
    workers = [worker for draft in candidate.replicas for worker in draft.ranks]
    return max((problem.link_ns(workers[0], worker, 32)[1] for worker in workers[1:]), default=0.0)
