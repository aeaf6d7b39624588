"""Gradient buckets: which parameters are summed together, over which workers.

A parameter's *holders* are all workers that have it: one per replica, more when a weight is tied across stages. Replicas
may be cut differently, so a bucket is a set of parameters with the same holders that the same stages of each touch.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.graph.graph import DTYPE_BYTES
from atoll.plan.layout import Layout
from atoll.plan.plan import Plan
from atoll.program.contracts import Collective
from atoll.program.program import Bucket

__all__ = ["BucketPlan", "plan_buckets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """``stages``: per holder, the stages whose backward adds to the bucket. ``how``: "alone", "native" or "collective".

    ``late``: a holder's partner is also its pipeline neighbour, so the exchange must not stand in the way of the pipeline.
    """

    bucket: Bucket
    stages: dict[str, tuple[int, ...]]
    how: str
    late: bool


def plan_buckets(plan: Plan, layout: Layout, islands: dict[str, str], master: str,
                 collective: Collective) -> tuple[BucketPlan, ...]:
    """All buckets in the one order in which every worker exchanges them: end of the model first, ``late`` ones last."""
    touched: dict[str, dict[str, list[int]]] = {}
    for replica in layout.replicas:
        for stage, worker in enumerate(replica.workers):
            for parameter in layout.index.parameters_of(replica.cuts[stage], replica.cuts[stage + 1]):
                touched.setdefault(parameter.name, {}).setdefault(worker, []).append(stage)
    groups: dict[tuple[tuple[str, tuple[int, ...]], ...], list[str]] = {}
    for parameter in reversed(layout.index.graph.parameters):
        if parameter.name in touched:
            key = tuple((worker, tuple(stages)) for worker, stages in touched[parameter.name].items())
            groups.setdefault(key, []).append(parameter.name)
    size = DTYPE_BYTES[master]
    drafts: list[tuple[bool, str, dict[str, tuple[int, ...]], tuple[str, ...]]] = []
    for key, names in groups.items():
        holders = tuple(worker for worker, _ in key)
        one_replica_twice = len({layout.replica_of[worker] for worker in holders}) < len(holders)
        how = "alone" if len(holders) == 1 else (
            "native" if plan.native and len({islands[worker] for worker in holders}) == 1 else "collective")
        limit = plan.bucket_bytes // size if how != "alone" else 0
        drafts.extend((one_replica_twice, how, dict(key), part) for part in _split(names, layout, limit))
    drafts.sort(key=lambda draft: draft[0])
    return tuple(BucketPlan(bucket=_bucket(number, draft, layout, collective), stages=draft[2], how=draft[1], late=draft[0])
                 for number, draft in enumerate(drafts))


def _bucket(number: int, draft: tuple[bool, str, dict[str, tuple[int, ...]], tuple[str, ...]], layout: Layout,
            collective: Collective) -> Bucket:
    _, how, stages, names = draft
    elements = sum(layout.index.parameter[name].elements for name in names)
    return Bucket(index=number, parameters=names, elements=elements, holders=tuple(stages),
                  chunks=collective.chunks(len(stages)) if how == "collective" else 1)


def _split(names: list[str], layout: Layout, limit: int) -> list[tuple[str, ...]]:
    """Cut a list of parameters into parts of at most ``limit`` elements (0: no limit); a larger parameter stands alone."""
    if not limit:
        return [tuple(names)]
    parts: list[list[str]] = [[]]
    filled = 0
    for name in names:
        elements = layout.index.parameter[name].elements
        if parts[-1] and filled + elements > limit:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += elements
    return [tuple(part) for part in parts]
