"""1F1B, also PipeDream-Flush and DAPPLE: one forward, one backward (Narayanan et al., 2019; Fan et al., 2021)."""

from __future__ import annotations

from atoll.policies.schedules.shapes import ScheduleClaim, looped, refuse_counts
from atoll.program.instructions import Backward, Forward, Instruction
from atoll.records import Record

__all__ = ["OneFOneB"]


class OneFOneB(Record):
    """As fast as GPipe and far less memory: a rank warms up with one forward for each rank behind it, then alternates.

    Time beyond m(F+B): (p-1)(F+B) for p even stages. Peak: min(p-i, m) on rank i.
    """

    name: str = "1f1b"
    source: str = "DAPPLE (Fan et al., 2021); PipeDream-Flush in Memory-Efficient Pipeline-Parallel DNN Training (2021)"
    splits_backward: bool = False

    def refuse(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        return refuse_counts(self.name, ranks, microbatches, chunks, range(1, 2))

    def placement(self, ranks: int, chunks: int) -> tuple[int, ...]:
        return looped(ranks, chunks)

    def order(self, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[Instruction, ...], ...]:
        return tuple(self._rank(rank, ranks, microbatches) for rank in range(ranks))

    def claim(self, ranks: int, microbatches: int, chunks: int) -> ScheduleClaim:
        return ScheduleClaim(peak_activations=tuple(min(ranks - rank, microbatches) for rank in range(ranks)))

    @staticmethod
    def _rank(rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
        warm = min(ranks - 1 - rank, microbatches)
        order: list[Instruction] = [Forward(stage=rank, microbatch=m) for m in range(warm)]
        for m in range(microbatches):
            if warm + m < microbatches:
                order.append(Forward(stage=rank, microbatch=warm + m))
            order.append(Backward(stage=rank, microbatch=m))
        return tuple(order)
