"""Interleaved 1F1B: several stages a rank, depth first (Narayanan et al., 2021, the order of Megatron-LM)."""

from __future__ import annotations

from atoll.policies.schedules.shapes import ScheduleClaim, looped, refuse_counts
from atoll.program.instructions import Backward, Forward, Instruction
from atoll.records import Record

__all__ = ["Interleaved"]


class Interleaved(Record):
    """The bubble shrinks by the number of stages a rank (v), the messages grow by it.

    Microbatches go in groups: a rank runs one group through its first stage, then through its second, and so on. Megatron's
    group is p microbatches and it refuses m that are no multiple of p; PyTorch divides m into max(1, m // p) equal groups,
    which is the same where Megatron allows it. This is PyTorch's rule; where no equal groups exist, it is refused.

    Time beyond m(F+B), m a multiple of p, F and B of all v stages of a rank: (p-1)(F+B)/v. Peak on rank i:
    min((v-1)g + 2(p-1-i) + 1, vm), g the size of a group.
    """

    name: str = "interleaved-1f1b"
    source: str = "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (Narayanan et al., 2021)"
    splits_backward: bool = False

    def refuse(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        refusal = refuse_counts(self.name, ranks, microbatches, chunks, range(2, 2**31))
        if refusal:
            return f"{refusal}, or take 1f1b for one stage a rank" if chunks == 1 else refusal
        groups = max(1, microbatches // ranks)
        if microbatches % groups:
            fewer, more = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
            return (f"{self.name} on {ranks} ranks cannot cut {microbatches} microbatches into {groups} equal groups; "
                    f"take {fewer} or {more} microbatches")
        return None

    def placement(self, ranks: int, chunks: int) -> tuple[int, ...]:
        return looped(ranks, chunks)

    def order(self, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[Instruction, ...], ...]:
        return tuple(self._rank(rank, ranks, microbatches, chunks) for rank in range(ranks))

    def claim(self, ranks: int, microbatches: int, chunks: int) -> ScheduleClaim:
        return ScheduleClaim(peak_activations=tuple(
            min(self._warm(rank, ranks, microbatches, chunks) + 1, microbatches * chunks) for rank in range(ranks)))

    @staticmethod
    def _group(ranks: int, microbatches: int) -> int:
        return microbatches // max(1, microbatches // ranks)

    def _warm(self, rank: int, ranks: int, microbatches: int, chunks: int) -> int:
        warm = (chunks - 1) * self._group(ranks, microbatches) + 2 * (ranks - 1 - rank)
        return min(warm, microbatches * chunks)

    def _rank(self, rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[Instruction, ...]:
        group, total = self._group(ranks, microbatches), microbatches * chunks
        warm = self._warm(rank, ranks, microbatches, chunks)

        def place(number: int) -> tuple[int, int]:
            """(chunk, microbatch) of the number-th forward, counted from the first stage."""
            round_, within = divmod(number, group * chunks)
            chunk, member = divmod(within, group)
            return chunk, round_ * group + member

        def forward(number: int) -> Instruction:
            chunk, microbatch = place(number)
            return Forward(stage=chunk * ranks + rank, microbatch=microbatch)

        def backward(number: int) -> Instruction:
            chunk, microbatch = place(number)
            return Backward(stage=(chunks - 1 - chunk) * ranks + rank, microbatch=microbatch)

        order = [forward(number) for number in range(warm)]
        for number in range(total):
            if warm + number < total:
                order.append(forward(warm + number))
            order.append(backward(number))
        return tuple(order)
