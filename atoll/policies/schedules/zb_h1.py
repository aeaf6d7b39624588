"""ZB-H1: 1F1B whose backward is split, so that gradients of weights fill the bubble (Qi et al., 2023)."""

from __future__ import annotations

from atoll.policies.schedules.shapes import ScheduleClaim, looped, refuse_counts
from atoll.program.instructions import BackwardInput, BackwardWeight, Forward, Instruction
from atoll.records import Record

__all__ = ["ZbH1"]


class ZbH1(Record):
    """1F1B's order of forwards and input gradients; rank i runs a weight gradient i microbatches after its input gradient.

    Time beyond m(F+B+W) for p even stages, m at least p, W at most B: (p-1) max(B, F+B-W). Peak: min(p, m) on every rank,
    for an activation is freed only by BackwardWeight.
    """

    name: str = "zb-h1"
    source: str = "Zero Bubble Pipeline Parallelism (Qi et al., 2023)"
    splits_backward: bool = True

    def refuse(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        return refuse_counts(self.name, ranks, microbatches, chunks, range(1, 2))

    def placement(self, ranks: int, chunks: int) -> tuple[int, ...]:
        return looped(ranks, chunks)

    def order(self, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[Instruction, ...], ...]:
        return tuple(self._rank(rank, ranks, microbatches) for rank in range(ranks))

    def claim(self, ranks: int, microbatches: int, chunks: int) -> ScheduleClaim:
        return ScheduleClaim(peak_activations=(min(ranks, microbatches),) * ranks)

    @staticmethod
    def _rank(rank: int, ranks: int, microbatches: int) -> tuple[Instruction, ...]:
        warm = min(ranks - 1 - rank, microbatches)
        order: list[Instruction] = [Forward(stage=rank, microbatch=m) for m in range(warm)]
        for m in range(microbatches):
            if warm + m < microbatches:
                order.append(Forward(stage=rank, microbatch=warm + m))
            order.append(BackwardInput(stage=rank, microbatch=m))
            if m >= rank:
                order.append(BackwardWeight(stage=rank, microbatch=m - rank))
        order.extend(BackwardWeight(stage=rank, microbatch=m) for m in range(max(0, microbatches - rank), microbatches))
        return tuple(order)
