"""The closed instruction set. Each instruction says what it reads, what it writes and on which lane it runs.

A *buffer* is a tuple (kind, *ids), written at most once per step (accumulators: by several instructions of one
worker in order). Kinds:

=============================  ============================================================================
("parameters", s)              weights of stage s                                              (persistent)
("gradient", b, i)             chunk i of gradient bucket b, accumulated over microbatches      (persistent)
("partial", b, i, w)           the same chunk, summed over some holders, worker w the last of them
("reduced", b, i)              the same chunk, summed over all holders
("input", s, m)                what the data set supplies to stage s for microbatch m
("activation", s, t, m)        all tensors stage s hands to stage t
("delta", s, t, m)             the gradient of ("activation", s, t, m), handed back by t to s
("saved", s, m)                what autograd keeps between forward and backward
("kept", s, m)                 the inputs kept instead, when the stage recomputes
("deferred", s, m)             what BackwardWeight needs from BackwardInput
("loss",)                      sum of the losses of this worker's microbatches (accumulated)
("vote", w), ("tally", island), ("total",), ("commit",)   the agreement that ends a step
("snapshot", w)                a worker's state on disk
=============================  ============================================================================

Microbatches are numbered within a replica; a worker serves one replica. Dependencies are never listed: they follow
from reads, writes and lanes (``program.dependencies``).
"""

from __future__ import annotations

from typing import ClassVar, dataclass_transform

import msgspec

__all__ = [
    "ACCUMULATED",
    "COMPUTE",
    "COPY",
    "DISK",
    "INSTRUCTIONS",
    "NATIVE",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Buffer",
    "Commit",
    "Forward",
    "Instruction",
    "Load",
    "Native",
    "Receive",
    "Recompute",
    "Reduce",
    "Save",
    "Send",
    "Update",
    "Vote",
]

Buffer = tuple[str | int, ...]

COMPUTE = "compute"
COPY = "copy"
DISK = "disk"
NATIVE = "native"

ACCUMULATED = frozenset({"gradient", "loss"})
"""Buffer kinds that several instructions of one worker add to; all others have one writer per step."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Instruction(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of the closed set. ``lane``, ``reads`` and ``writes`` are all the rest of the house knows of it."""

    lane: ClassVar[str] = COMPUTE

    @property
    def reads(self) -> tuple[Buffer, ...]:
        raise NotImplementedError

    @property
    def writes(self) -> tuple[Buffer, ...]:
        raise NotImplementedError


class _Stage(Instruction):
    """``sources``: stages that hand activations to this one; ``targets``: stages it hands activations to."""

    stage: int
    microbatch: int
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()

    def _inbound(self, kind: str) -> tuple[Buffer, ...]:
        if len(self.sources) == 1:  # nearly always, and this is asked of every instruction of every candidate plan
            return ((kind, self.sources[0], self.stage, self.microbatch),)
        return tuple([(kind, source, self.stage, self.microbatch) for source in self.sources])

    def _outbound(self, kind: str) -> tuple[Buffer, ...]:
        if len(self.targets) == 1:
            return ((kind, self.stage, self.targets[0], self.microbatch),)
        return tuple([(kind, self.stage, target, self.microbatch) for target in self.targets])


class Forward(_Stage):
    """Run a stage on one microbatch. ``keep``: "saved" (for autograd), "kept" (inputs only, to recompute) or "" (nothing)."""

    keep: str = "saved"
    takes_input: bool = False
    gives_loss: bool = False

    @property
    def reads(self) -> tuple[Buffer, ...]:
        own: tuple[Buffer, ...] = (("parameters", self.stage),)
        if self.takes_input:
            own += (("input", self.stage, self.microbatch),)
        if self.gives_loss:
            own += (("loss",),)
        return own + self._inbound("activation")

    @property
    def writes(self) -> tuple[Buffer, ...]:
        own: tuple[Buffer, ...] = ((self.keep, self.stage, self.microbatch),) if self.keep else ()
        if self.gives_loss:
            own += (("loss",),)
        return own + self._outbound("activation")


class Recompute(_Stage):
    """Run the forward of a stage again from its kept inputs, this time saving for autograd."""

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return (("parameters", self.stage), ("kept", self.stage, self.microbatch))

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return (("saved", self.stage, self.microbatch),)


class Backward(_Stage):
    """Full backward of a stage: gradients of its inputs and of its weights (added into ``gradients``)."""

    gradients: tuple[Buffer, ...] = ()

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return (("parameters", self.stage), ("saved", self.stage, self.microbatch), *self._outbound("delta"), *self.gradients)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return (*self._inbound("delta"), *self.gradients)


class BackwardInput(_Stage):
    """First half of a split backward: gradients of the inputs only. (Small weights whose gradient is cheap may be
    added here too, hence ``gradients``.)"""

    gradients: tuple[Buffer, ...] = ()

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return (("parameters", self.stage), ("saved", self.stage, self.microbatch), *self._outbound("delta"), *self.gradients)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return (("deferred", self.stage, self.microbatch), *self._inbound("delta"), *self.gradients)


class BackwardWeight(_Stage):
    """Second half of a split backward: gradients of the weights. Reads ``saved``: an activation is freed only here."""

    gradients: tuple[Buffer, ...] = ()

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return (("deferred", self.stage, self.microbatch), ("saved", self.stage, self.microbatch), *self.gradients)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return self.gradients


class Update(Instruction):
    """One optimizer step over all parameters of the worker; not reached without ``Commit``."""

    rule: str
    stages: tuple[int, ...]
    gradients: tuple[Buffer, ...]

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return (("commit",), *self.gradients)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return tuple(("parameters", stage) for stage in self.stages)


class _Message(Instruction):
    """The k-th Send of a worker to a peer meets the k-th Receive of that peer from it (one ordered channel a pair)."""

    buffer: Buffer
    peer: str
    size_bytes: int


class Send(_Message):
    @property
    def lane(self) -> str:  # type: ignore[override]
        return f"out:{self.peer}"

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return (self.buffer,)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return ()


class Receive(_Message):
    @property
    def lane(self) -> str:  # type: ignore[override]
        return f"in:{self.peer}"

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return ()

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return (self.buffer,)


class Native(Instruction):
    """A collective that a library does whole (``torch.distributed`` inside an island). All of ``group`` meet in it."""

    lane: ClassVar[str] = NATIVE
    collective: str
    group: tuple[str, ...]
    source: Buffer
    target: Buffer
    size_bytes: int

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return (self.target,)


class Reduce(Instruction):
    """``target`` = sum of ``sources`` in the order given (so that every worker that sums the same gets the same bits)."""

    lane: ClassVar[str] = COPY
    target: Buffer
    sources: tuple[Buffer, ...]
    size_bytes: int

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return self.sources

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return (self.target,)


class Load(Instruction):
    """Fetch what the data set supplies to a stage for one microbatch."""

    lane: ClassVar[str] = DISK
    stage: int
    microbatch: int
    size_bytes: int

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return ()

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return (("input", self.stage, self.microbatch),)


class Save(Instruction):
    """Write the worker's parameters and optimizer state of ``stages`` to the checkpoint store."""

    lane: ClassVar[str] = DISK
    worker: str
    stages: tuple[int, ...]
    size_bytes: int

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return tuple(("parameters", stage) for stage in self.stages)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return (("snapshot", self.worker),)


class Vote(Instruction):
    """What this worker knows at the end of its step: the sum of squares of the gradient buckets in ``counted`` (each
    bucket is counted by one of its holders), its loss, its tokens, whether all is finite."""

    worker: str
    counted: tuple[int, ...]
    evidence: tuple[Buffer, ...]

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return self.evidence

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return (("vote", self.worker),)


class Commit(Instruction):
    """The step counts: everyone's vote is in ``total``. ``group``: all workers of the program."""

    group: tuple[str, ...]

    @property
    def reads(self) -> tuple[Buffer, ...]:
        return (("total",),)

    @property
    def writes(self) -> tuple[Buffer, ...]:
        return (("commit",),)


INSTRUCTIONS: tuple[type[Instruction], ...] = (
    Forward, Recompute, Backward, BackwardInput, BackwardWeight, Update, Send, Receive, Native, Reduce, Load, Save,
    Vote, Commit,
)
