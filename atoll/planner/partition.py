"""Contiguous partition of a model over workers in a given order, by dynamic programming over cut points.

Minimises the bottleneck: max over stages of (forward + backward time) and over cuts of the time the link is busy per
microbatch. A stage that does not fit its worker's memory is no option. Exact for the candidate cuts (PipeDream, 2019, for
unlike devices and links; memory as a constraint). Cost: O(stages * cuts^2), vectorised.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from atoll.planner.times import Problem

__all__ = ["Partition", "partition"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """``cuts``: (0, ..., n). ``bottleneck_ns``: of the slowest stage or link. ``excess_bytes``: > 0 when nothing fits, by
    how much the worst worker would be over."""

    cuts: tuple[int, ...]
    bottleneck_ns: float
    excess_bytes: float
    worst: str = ""


def partition(problem: Problem, workers: tuple[str, ...], samples: int, live: tuple[int, ...],
              recompute: bool) -> Partition | None:
    """Cut the model into ``len(workers)`` stages, stage k on ``workers[k]`` (a worker may come more than once).

    ``live``: per stage, how many microbatches it holds activations of. Returns None when there are more stages than cuts
    allow; a ``Partition`` with ``excess_bytes`` > 0 when memory forbids all.
    """
    import numpy

    cuts = problem.cuts
    if len(workers) > len(cuts) - 1:
        return None
    shares = {worker: workers.count(worker) for worker in workers}
    over = numpy.array([_over(problem, worker, samples, live[k], recompute, shares[worker], k == len(workers) - 1)
                        for k, worker in enumerate(workers)])
    for relaxed in (False, True):
        found = _solve(problem, workers, samples, over, relaxed)
        if found is not None:
            return found
    return None


def _over(problem: Problem, worker: str, samples: int, live: int, recompute: bool, share: int, last: bool) -> Any:
    """Bytes over the worker's memory for every (low cut, high cut), as a matrix; a worker of several stages gives each an
    equal share of its memory."""
    cuts = problem.cuts
    elements = problem.element_sums[cuts]
    saved = problem.saved_sums[cuts]
    boundary = problem.index.cut_bytes
    state = (elements[None, :] - elements[:, None]) * problem.state_bytes
    if last:
        state = state + problem.tied_elements_at_end * problem.state_bytes
    per_microbatch = (saved[None, :] - saved[:, None]) * samples
    if recompute:
        import numpy

        kept = numpy.array([boundary[cut] for cut in cuts], dtype=float)[:, None] * samples
        per_microbatch = per_microbatch + kept * live
    else:
        per_microbatch = per_microbatch * live
    working = 2 * problem.largest_output * samples if last else 0
    return state + per_microbatch + working - problem.memory_bytes(worker) / share


def _solve(problem: Problem, workers: tuple[str, ...], samples: int, over: Any, relaxed: bool) -> Partition | None:
    """Forward dynamic programming; ``relaxed`` minimises the worst excess of memory instead of time."""
    import numpy

    cuts = problem.cuts
    count = len(cuts)
    best = numpy.full(count, numpy.inf)
    best[0] = 0.0 if not relaxed else -numpy.inf
    choices = []
    upper = numpy.triu(numpy.ones((count, count), dtype=bool), 1)
    for k, worker in enumerate(workers):
        if relaxed:
            cost = numpy.where(upper, over[k], numpy.inf)
        else:
            ranges = problem.ranges(worker, samples)
            line = (ranges.forward_ns + ranges.backward_ns)[cuts]
            cost = numpy.where(upper & (over[k] <= 0), line[None, :] - line[:, None], numpy.inf)
            if k:
                busy = numpy.array([problem.link_ns(workers[k - 1], worker, problem.index.cut_bytes[cut] * samples)[0]
                                    for cut in cuts])
                cost = numpy.maximum(cost, busy[:, None])
        table = numpy.maximum(best[:, None], cost)
        choice = table.argmin(axis=0)
        best = table[choice, numpy.arange(count)]
        choices.append(choice)
    if not numpy.isfinite(best[-1]):
        return None
    path = [count - 1]
    for choice in reversed(choices):
        path.append(int(choice[path[-1]]))
    path.reverse()
    excess = [float(over[k][low, high]) for k, (low, high) in enumerate(pairwise(path))]
    worst = max(range(len(excess)), key=excess.__getitem__)
    return Partition(cuts=tuple(int(cuts[i]) for i in path), bottleneck_ns=float(best[-1]) if not relaxed else numpy.inf,
                     excess_bytes=max(0.0, excess[worst]), worst=workers[worst])
