"""``plan.yaml``: what was decided. Nothing in it is defaulted: two equal plans give the same program."""

from __future__ import annotations

from atoll.records import Record
from atoll.units import Positive

__all__ = ["Plan", "ReplicaPlan", "StagePlacement"]


class StagePlacement(Record):
    """Operators ``first`` to ``last`` (names, inclusive) run on ``worker``."""

    first: str
    last: str
    worker: str
    recompute: bool


class ReplicaPlan(Record):
    """One copy of the model: its stages in model order, and how many microbatches of each step it takes."""

    stages: tuple[StagePlacement, ...]
    microbatches: Positive


class Plan(Record):
    """``schedule`` and ``chunks`` (stages a worker) as in ``policies.schedules``. Rank r of a replica is the worker of
    stage r (placement of the schedule gives the others). ``microbatch_samples`` x all microbatches = the global batch.
    ``collective``: how replicas that are not all in one island sum gradients; inside an island the library does it
    when ``native``."""

    job: str
    cluster: str
    graph: str
    schedule: str
    chunks: Positive
    microbatch_samples: Positive
    replicas: tuple[ReplicaPlan, ...]
    bucket_bytes: Positive
    collective: str
    native: bool

    @property
    def workers(self) -> tuple[str, ...]:
        """All that take part, in the order of replicas and stages."""
        return tuple(dict.fromkeys(stage.worker for replica in self.replicas for stage in replica.stages))
