"""GPipe: all forwards, then all backwards (Huang et al., 2019)."""

from __future__ import annotations

from atoll.policies.schedules.shapes import ScheduleClaim, looped, refuse_counts
from atoll.program.instructions import Backward, Forward, Instruction
from atoll.records import Record

__all__ = ["GPipe"]


class GPipe(Record):
    """Simple, and every activation waits for the whole forward phase.

    Time beyond m(F+B): (p-1)(F+B) for p even stages. Peak: m on every rank.
    """

    name: str = "gpipe"
    source: str = "GPipe: Easy Scaling with Micro-Batch Pipeline Parallelism (Huang et al., 2019)"
    splits_backward: bool = False

    def refuse(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        return refuse_counts(self.name, ranks, microbatches, chunks, range(1, 2))

    def placement(self, ranks: int, chunks: int) -> tuple[int, ...]:
        return looped(ranks, chunks)

    def order(self, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[Instruction, ...], ...]:
        return tuple((*(Forward(stage=rank, microbatch=m) for m in range(microbatches)),
                      *(Backward(stage=rank, microbatch=m) for m in range(microbatches))) for rank in range(ranks))

    def claim(self, ranks: int, microbatches: int, chunks: int) -> ScheduleClaim:
        return ScheduleClaim(peak_activations=(microbatches,) * ranks)
