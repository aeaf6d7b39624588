"""The protocols of the families: what one policy file must offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from atoll.program.instructions import Buffer, Instruction
from atoll.program.program import Bucket

__all__ = ["Claim", "Collective", "CostModel", "Schedule"]


class Claim(Protocol):
    """What a schedule states about itself, checked by the laws."""

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """Per rank: most ("saved", s, m) buffers alive at once (freed at the end of Backward or BackwardWeight)."""
        ...


class Schedule(Protocol):
    """The order of compute of a pipeline. A policy is a frozen record in ``policies/schedules`` and one line in its table.

    Ranks are positions in the pipeline of one replica (0..ranks-1). Stage numbers follow the model.
    """

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def splits_backward(self) -> bool: ...

    def refuse(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        """Why this schedule does not exist for these numbers (a sentence), or None. ``chunks``: stages a rank."""
        ...

    def placement(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """Rank of each stage, in stage order (length ranks * chunks)."""
        ...

    def order(self, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[Instruction, ...], ...]:
        """Per rank the bare compute instructions (Forward, Backward, BackwardInput, BackwardWeight with stage and
        microbatch only; lowering fills in the rest)."""
        ...

    def claim(self, ranks: int, microbatches: int, chunks: int) -> Claim: ...


class Collective(Protocol):
    """How a group sums a bucket. A policy is a frozen record in ``policies/collectives`` and one line in its table.

    Reads ("gradient", b, i) of every holder and leaves the sum, the same bits everywhere, in ("reduced", b, i).
    """

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str: ...

    def chunks(self, group_size: int) -> int:
        """In how many chunks the bucket is cut."""
        ...

    def instructions(self, bucket: Bucket, element_bytes: int, worker: str) -> tuple[Instruction, ...]:
        """What ``worker`` does, in order, its Receives included; every worker lists its sends to a peer in the order in
        which that peer lists its receives."""
        ...

    def bytes_sent(self, bucket: Bucket, element_bytes: int, worker: str) -> int:
        """Closed form of the bytes that ``worker`` sends."""
        ...


class CostModel(Protocol):
    """What the simulator must be told beyond the program: how long an instruction takes where, and how large a buffer is."""

    def duration_ns(self, worker: str, instruction: Instruction) -> int:
        """Time on its lane of anything but Send, Receive and Native (those are priced by the network)."""
        ...

    def buffer_bytes(self, worker: str, buffer: Buffer) -> int: ...

    def resident_bytes(self, worker: str) -> int:
        """What a worker holds all the time: weights, gradients, optimizer state, working space."""
        ...


Orders = Sequence[Sequence[Instruction]]
