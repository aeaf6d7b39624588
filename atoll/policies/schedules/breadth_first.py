"""Breadth-first: each stage of a rank runs all microbatches before the next one does (Lamy-Poirier, 2022)."""

from __future__ import annotations

from atoll.policies.schedules.shapes import ScheduleClaim, looped, refuse_counts
from atoll.program.instructions import Backward, Forward, Instruction
from atoll.records import Record

__all__ = ["BreadthFirst"]


class BreadthFirst(Record):
    """The bubble of interleaved 1F1B, the memory of GPipe; a stage's gradients are complete early, one stage after another,
    so that their sums over replicas hide behind the backwards that are left.

    Backwards take the microbatches last first, as PyTorch's LoopedBFS does.

    Time beyond m(F+B), F and B of all v stages of a rank, m at least p: (p-1)(F+B)/v. Peak: vm on every rank.
    """

    name: str = "breadth-first"
    source: str = "Breadth-First Pipeline Parallelism (Lamy-Poirier, 2022)"
    splits_backward: bool = False

    def refuse(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        return refuse_counts(self.name, ranks, microbatches, chunks, range(1, 2**31))

    def placement(self, ranks: int, chunks: int) -> tuple[int, ...]:
        return looped(ranks, chunks)

    def order(self, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[Instruction, ...], ...]:
        def rank_order(rank: int) -> tuple[Instruction, ...]:
            stages = range(rank, ranks * chunks, ranks)
            return (*(Forward(stage=stage, microbatch=m) for stage in stages for m in range(microbatches)),
                    *(Backward(stage=stage, microbatch=m) for stage in reversed(stages)
                      for m in reversed(range(microbatches))))
        return tuple(rank_order(rank) for rank in range(ranks))

    def claim(self, ranks: int, microbatches: int, chunks: int) -> ScheduleClaim:
        return ScheduleClaim(peak_activations=(microbatches * chunks,) * ranks)
