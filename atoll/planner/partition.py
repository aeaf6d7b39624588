"""Contiguous partition of a model over workers in a given order, exact for the candidate cuts.

Minimises the bottleneck: max over stages of (forward + backward time) and over cuts of the time the link is busy per
microbatch (PipeDream, 2019, for unlike devices and links), with memory as a constraint: a stage that does not fit is no
option. Time and memory of a stage only grow with its range, so a bottleneck T is reachable exactly when taking as much as T
and memory allow, stage after stage, reaches the end; the smallest such T is found by bisection. How far memory reaches from
each cut does not depend on T and is kept. Cost: O(stages log cuts) a probe, about 20 probes; equal to brute force by test.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from atoll.planner.times import Held, Problem

__all__ = ["Partition", "partition"]

_TOLERANCE = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """``cuts``: (0, ..., n). ``bottleneck_ns``: of the slowest stage or link. ``excess_bytes`` > 0: nothing fits, and this is
    by how much worker ``worst`` would be over."""

    cuts: tuple[int, ...]
    bottleneck_ns: float
    excess_bytes: float
    worst: str = ""


@dataclass(frozen=True, slots=True)
class _Chain:
    """Per stage: the time line at the candidate cuts, how far memory reaches from each cut, and link time at each cut (None:
    no link, as both ends are one worker)."""

    times: list[list[float]]
    reach: list[list[int]]
    busy: list[list[float] | None]

    def walk(self, limit: float) -> list[int] | None:
        """Positions of the cuts when no stage and no link may take longer than ``limit``; None when that is impossible."""
        last = len(self.times[0]) - 1
        stages = len(self.times)
        path = [0]
        for k in range(stages):
            low = path[-1]
            line, busy = self.times[k], self.busy[k + 1] if k + 1 < stages else None
            high = min(bisect_right(line, line[low] + limit) - 1, self.reach[k][low], last - (stages - 1 - k))
            while busy is not None and high > low and busy[high] > limit:
                high -= 1
            if high <= low:
                return None
            path.append(high)
        return path if path[-1] == last else None

    def bottleneck(self, path: list[int]) -> float:
        worst = max(self.times[k][high] - self.times[k][low] for k, (low, high) in enumerate(pairwise(path)))
        links = [busy[path[k]] for k, busy in enumerate(self.busy) if busy is not None]
        return max([worst, *links])


def partition(problem: Problem, workers: tuple[str, ...], samples: int, live: tuple[int, ...], recompute: bool, *,
              reserve_bytes: float = 0.0, nearest: bool = False) -> Partition | None:
    """Cut the model into ``len(workers)`` stages, stage k on ``workers[k]`` (a worker of several stages gives each an equal
    share of its memory).

    ``live``: per stage, of how many microbatches it holds activations. ``reserve_bytes``: memory to leave free on each
    worker. Returns None when there are more stages than cuts allow or memory forbids all; with ``nearest``, in the latter
    case the ``Partition`` that is least over (slow: for when nothing fits at all).
    """
    if len(workers) > len(problem.cuts) - 1:
        return None
    last = len(workers) - 1
    held = [Held(samples=samples, live=live[k], recompute=recompute, last=k == last) for k in range(len(workers))]
    shares = [workers.count(worker) for worker in workers]
    rooms = [(problem.memory_bytes(worker) - reserve_bytes) / share for worker, share in zip(workers, shares, strict=True)]
    chain = _Chain([problem.time_line(worker, samples) for worker in workers],
                   [problem.reach(kind, room) for kind, room in zip(held, rooms, strict=True)],
                   [None if k == 0 or workers[k - 1] == worker else problem.busy_line(workers[k - 1], worker, samples)
                    for k, worker in enumerate(workers)])
    path = _narrowest(chain)
    if path is None:
        return _nearest(problem, workers, held, rooms) if nearest else None
    return Partition(cuts=tuple(problem.cuts[position] for position in path), bottleneck_ns=chain.bottleneck(path),
                     excess_bytes=0.0)


def _narrowest(chain: _Chain) -> list[int] | None:
    """The path with the smallest bottleneck; None when memory alone forbids all."""
    best = chain.walk(float("inf"))
    if best is None:
        return None
    low, high = 0.0, chain.bottleneck(best)
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        found = chain.walk(middle)
        if found is None:
            low = middle
        else:
            best, high = found, chain.bottleneck(found)
    return best


def _nearest(problem: Problem, workers: tuple[str, ...], held: list[Held], rooms: list[float]) -> Partition:
    """The smallest equal addition to every stage's room with which something fits, by bisection."""
    free = [None] * len(workers)
    flat = [[0.0] * len(problem.cuts) for _ in workers]

    def attempt(more: float) -> list[int] | None:
        return _Chain(flat, [problem.reach(kind, room + more, keep=False) for kind, room in zip(held, rooms, strict=True)],
                      list(free)).walk(float("inf"))

    low, high = 0.0, problem.whole_bytes(held[-1])
    for _ in range(24):
        middle = (low + high) / 2
        if attempt(middle) is None:
            low = middle
        else:
            high = middle
    path = attempt(high) or [0, len(problem.cuts) - 1]
    over = [problem.held_bytes(held[k], a, b) - rooms[k] for k, (a, b) in enumerate(pairwise(path))]
    worst = max(range(len(over)), key=over.__getitem__)
    return Partition(cuts=tuple(problem.cuts[position] for position in path), bottleneck_ns=float("inf"),
                     excess_bytes=max(high, 1.0), worst=workers[worst])
