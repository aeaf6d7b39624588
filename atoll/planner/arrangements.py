"""Which workers make up which replica, in which pipeline order.

Few workers (up to ``EXHAUSTIVE``): every way to put some of them into groups. More: groups that span the islands or stay inside
them, with all workers or without the slowest kinds or one island. Inside a group islands stay together, so that a pipeline
crosses each slow link once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from atoll.planner.times import Problem

__all__ = ["EXHAUSTIVE", "Arrangement", "arrangements"]

Arrangement = tuple[tuple[str, ...], ...]
"""Per replica its workers in pipeline order."""

EXHAUSTIVE = 5
_CHAINS = 24


def arrangements(problem: Problem, replicas: int | None = None, stages: int | None = None) -> Iterator[Arrangement]:
    """All arrangements worth a look, each once. ``replicas``/``stages`` (workers a replica): only those."""
    workers = tuple(problem.network.workers)
    found = _all_groupings(problem, workers) if len(workers) <= EXHAUSTIVE else _groupings(problem, workers)
    seen: set[Arrangement] = set()
    for arrangement in found:
        canonical = tuple(sorted(arrangement))
        if canonical in seen:
            continue
        seen.add(canonical)
        if replicas is not None and len(arrangement) != replicas:
            continue
        if stages is not None and any(len(group) != stages for group in arrangement):
            continue
        yield arrangement


def _all_groupings(problem: Problem, workers: tuple[str, ...]) -> Iterator[Arrangement]:
    for groups in _partial_partitions(workers):
        if groups:
            yield from _ordered(problem, groups)


def _partial_partitions(workers: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every set of disjoint groups of ``workers`` (a worker may be left out)."""
    if not workers:
        yield ()
        return
    first, rest = workers[0], workers[1:]
    for groups in _partial_partitions(rest):
        yield groups
        yield ((first,), *groups)
        for position, group in enumerate(groups):
            yield (*groups[:position], (first, *group), *groups[position + 1:])


def _ordered(problem: Problem, groups: tuple[tuple[str, ...], ...]) -> Iterator[Arrangement]:
    """The groups with their members in every sensible order (small groups) or the sorted one."""
    if not groups:
        yield ()
        return
    for rest in _ordered(problem, groups[1:]):
        for order in _orders(problem, groups[0]):
            yield (order, *rest)


def _orders(problem: Problem, group: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    by_island: dict[str, list[str]] = {}
    for worker in group:
        by_island.setdefault(problem.network.island(worker), []).append(worker)
    for chain in permutations(by_island):
        inner: list[tuple[str, ...]] = [()]
        for island in chain:
            members = by_island[island]
            orders = list(permutations(members)) if len(members) <= 3 else [tuple(_by_size(problem, members))]
            inner = [(*head, *tail) for head in inner for tail in orders]
        yield from inner


def _by_size(problem: Problem, members: list[str]) -> list[str]:
    """Large memory first (the first stages of 1F1B hold most activations), then fast, then by name."""
    views = problem.devices
    return sorted(members, key=lambda w: (-views[w].memory_bytes, -_rate(problem, w), w))


def _rate(problem: Problem, worker: str) -> float:
    view = problem.devices[worker]
    return view.rate(problem.precision.compute) * view.speed


def _groupings(problem: Problem, workers: tuple[str, ...]) -> Iterator[Arrangement]:
    for subset in _subsets(problem, workers):
        by_island: dict[str, list[str]] = {}
        for worker in subset:
            by_island.setdefault(problem.network.island(worker), []).append(worker)
        islands = {island: _by_size(problem, members) for island, members in by_island.items()}
        for chain in _chains(problem, tuple(islands)):
            for count in _divisors(len(subset)):
                yield from _both_ways(problem, _spanning(islands, chain, count))
            for count in range(2, len(islands) + 1):
                yield from _both_ways(problem, _inside(problem, islands, chain, count))


def _both_ways(problem: Problem, arrangement: Arrangement) -> Iterator[Arrangement]:
    """As it is, and with a large device of the last island at the very end: the last stage holds the output head and its
    logits, which a small device may not."""
    yield arrangement
    yield tuple(_large_last(problem, group) for group in arrangement)


def _large_last(problem: Problem, group: tuple[str, ...]) -> tuple[str, ...]:
    island = problem.network.island(group[-1])
    tail = [worker for worker in group if problem.network.island(worker) == island]
    largest = max(tail, key=lambda worker: problem.devices[worker].memory_bytes)
    return (*(worker for worker in group if worker != largest), largest)


def _divisors(number: int) -> list[int]:
    return [count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if count <= number]


def _subsets(problem: Problem, workers: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield workers
    rates = sorted({round(_rate(problem, worker)) for worker in workers})
    for slowest in rates[:-1]:
        kept = tuple(worker for worker in workers if _rate(problem, worker) > slowest * 1.01)
        if len(kept) >= max(1, len(workers) // 4):
            yield kept
    islands = {problem.network.island(worker) for worker in workers}
    kinds = {problem.devices[worker] for worker in workers}
    for island in sorted(islands) if len(islands) > 1 else ():
        yield tuple(worker for worker in workers if problem.network.island(worker) != island)
        own = tuple(worker for worker in workers if problem.network.island(worker) == island)
        yield own
        for kind in sorted(kinds, key=lambda view: view.memory_bytes):
            kept = tuple(worker for worker in own if problem.devices[worker].memory_bytes > kind.memory_bytes)
            if kept:
                yield kept


def _chains(problem: Problem, islands: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Orders of the islands along the pipeline: all of them while there are few, else nearest neighbour from each start."""
    if len(islands) <= 3:
        yield from permutations(islands)
        return
    some = {problem.network.island(worker): worker for worker in problem.network.workers}
    for start in islands[:_CHAINS]:
        chain = [start]
        while len(chain) < len(islands):
            rest = [island for island in islands if island not in chain]
            chain.append(min(rest, key=lambda island: (problem.link_ns(some[chain[-1]], some[island], 2**20)[0], island)))
        yield tuple(chain)


def _spanning(islands: dict[str, list[str]], chain: tuple[str, ...], count: int) -> Arrangement:
    """Deal each island's workers to ``count`` replicas back and forth, so that every replica spans the islands evenly."""
    groups: list[list[str]] = [[] for _ in range(count)]
    position = 0
    for island in chain:
        for worker in islands[island]:
            lap, place = divmod(position, count)
            groups[place if lap % 2 == 0 else count - 1 - place].append(worker)
            position += 1
    return tuple(tuple(group) for group in groups if group)


def _inside(problem: Problem, islands: dict[str, list[str]], chain: tuple[str, ...], count: int) -> Arrangement:
    """Give whole islands to ``count`` replicas, the fastest island first to the replica that has least."""
    groups: list[list[str]] = [[] for _ in range(count)]
    power = [0.0] * count
    for island in sorted(chain, key=lambda name: -sum(_rate(problem, worker) for worker in islands[name])):
        poorest = power.index(min(power))
        power[poorest] += sum(_rate(problem, worker) for worker in islands[island])
        groups[poorest].extend(islands[island])
    return tuple(tuple(group) for group in groups if group)
