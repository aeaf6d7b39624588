"""Where the sums of gradients stand among the instructions: as early as the gradients allow, several buckets at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from atoll.plan.buckets import BucketPlan
from atoll.program.contracts import Collective
from atoll.program.instructions import Instruction, Native, Receive, Send

__all__ = ["exchange"]

_AHEAD = 4
"""So many buckets do one hop before the first of them does its next. More hide more waiting, and hold more partial sums in
memory: at most twice as many buckets' worth."""


def exchange(drafts: Mapping[str, list[Instruction]], buckets: Sequence[BucketPlan], collective: Collective,
             element_bytes: int) -> None:
    """Insert each bucket's sum right after the last backward that adds to it, never before the bucket ahead of it in the
    common order; ``late`` buckets after all compute.

    A lane keeps its order, so a hop that waits for a neighbour holds up what stands behind it, also what could go at once.
    Buckets that every holder has ready at the same place are therefore interleaved: bucket i does its hop h after bucket
    i + 4 - 1 did its hop h - 1. All workers follow this one order of all hops, hence no circle of waits.
    """
    summed = [plan for plan in buckets if plan.how != "alone"]
    places = {worker: _places(instructions, [plan for plan in summed if worker in plan.stages])
              for worker, instructions in drafts.items()}
    groups = _groups(summed, places)
    for worker, instructions in drafts.items():
        inserts: list[tuple[int, list[Instruction]]] = []
        for group in groups:
            hops = [(number + _AHEAD * hop, number, steps) for number, plan in enumerate(group) if worker in plan.stages
                    for hop, steps in enumerate(_hops(plan, worker, collective, element_bytes))]
            if hops:
                place = places[worker][group[hops[0][1]].bucket.index]
                inserts.append((place, [step for _, _, steps in sorted(hops, key=lambda one: one[:2]) for step in steps]))
        for at, extra in reversed(inserts):
            instructions[at:at] = extra


def _places(instructions: Sequence[Instruction], buckets: Sequence[BucketPlan]) -> dict[int, int]:
    """Position before which each bucket's sum is inserted."""
    ready: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        for buffer in instruction.writes:
            if buffer[0] == "gradient":
                ready[int(buffer[1])] = position + 1
    places: dict[int, int] = {}
    earliest = 0
    for plan in buckets:
        at = len(instructions) if plan.late else max(earliest, ready[plan.bucket.index])
        while at < len(instructions) and isinstance(instructions[at], Send):
            at += 1  # the delta of that backward goes out first: a pipeline neighbour waits for it
        places[plan.bucket.index] = earliest = at
    return places


def _groups(buckets: Sequence[BucketPlan], places: Mapping[str, Mapping[int, int]]) -> list[list[BucketPlan]]:
    """Runs of buckets of which no worker has two ready at different places."""
    groups: list[list[BucketPlan]] = []
    common: dict[str, int] = {}
    for plan in buckets:
        own = {worker: places[worker][plan.bucket.index] for worker in plan.stages}
        if groups and all(common.get(worker, place) == place for worker, place in own.items()):
            groups[-1].append(plan)
            common.update(own)
        else:
            groups.append([plan])
            common = own
    return groups


def _hops(plan: BucketPlan, worker: str, collective: Collective, element_bytes: int) -> list[list[Instruction]]:
    """The worker's part in the bucket's sum, cut where it waits for a peer; receives are woven in later."""
    bucket = plan.bucket
    if plan.how == "native":
        return [[Native(collective="all_reduce", group=bucket.holders, source=("gradient", bucket.index, 0),
                        target=("reduced", bucket.index, 0), size_bytes=bucket.elements * element_bytes)]]
    hops: list[list[Instruction]] = [[]]
    for waits, steps in groupby(collective.instructions(bucket, element_bytes, worker), lambda s: isinstance(s, Receive)):
        if waits:
            hops.append([])
        else:
            hops[-1].extend(steps)
    return hops
