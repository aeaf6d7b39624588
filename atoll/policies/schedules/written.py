"""A schedule that somebody wrote down, for example as PyTorch's pipeline CSV: it exists for its own numbers only."""

from __future__ import annotations

from collections import Counter

from atoll.errors import DocumentError
from atoll.policies.schedules.shapes import ScheduleClaim
from atoll.program.bare import bare_program
from atoll.program.check import check, live_peak
from atoll.program.instructions import Backward, BackwardInput, BackwardWeight, Forward, Instruction
from atoll.program.pytorch_csv import read_orders
from atoll.records import Record

__all__ = ["Written", "written"]


class Written(Record):
    """``homes``: rank of each stage. Peak: counted on the order itself, there is no closed form."""

    name: str
    source: str
    splits_backward: bool
    microbatches: int
    homes: tuple[int, ...]
    orders: tuple[tuple[Forward | Backward | BackwardInput | BackwardWeight, ...], ...]

    def refuse(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        own = (len(self.orders), self.microbatches, len(self.homes) // len(self.orders))
        if (ranks, microbatches, chunks) == own:
            return None
        return (f"{self.name} is written for {own[0]} ranks, {own[1]} microbatches and {own[2]} stages a rank, and was "
                f"asked for {ranks}, {microbatches} and {chunks}; ask for its own numbers or write another file")

    def placement(self, ranks: int, chunks: int) -> tuple[int, ...]:
        return self.homes

    def order(self, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[Instruction, ...], ...]:
        return self.orders

    def claim(self, ranks: int, microbatches: int, chunks: int) -> ScheduleClaim:
        return ScheduleClaim(peak_activations=tuple(live_peak(order) for order in self.orders))


def written(text: str, *, source: str = "schedule.csv") -> Written:
    """Return the schedule in PyTorch's pipeline CSV ``text``.

    Raises ``DocumentError`` naming ``source`` and what is wrong, also when a stage skips a microbatch or half of a backward or
    the ranks hold unlike numbers of stages, and ``ProgramError`` when the order deadlocks.
    """
    homes, orders = read_orders(text, source=source)
    done = Counter((type(one), one.stage, one.microbatch) for order in orders for one in order)  # type: ignore[attr-defined]
    microbatches = 1 + max(microbatch for _, _, microbatch in done)
    for stage in range(len(homes)):
        for microbatch in range(microbatches):
            kinds = tuple(kind for kind in (Forward, Backward, BackwardInput, BackwardWeight) if done[kind, stage, microbatch])
            if kinds not in ((Forward, Backward), (Forward, BackwardInput, BackwardWeight)):
                found = ", ".join(kind.__name__ for kind in kinds) or "nothing"
                raise DocumentError(f"{source}: stage {stage} does {found} for microbatch {microbatch}, expected F and either "
                                    "B or both I and W")
    stages = [homes.count(rank) for rank in range(len(orders))]
    if len(set(stages)) > 1:
        raise DocumentError(f"{source}: the ranks hold {', '.join(map(str, stages))} stages; every rank holds the same number")
    check(bare_program(homes, orders))
    return Written(name=source, source=source, splits_backward=any(kind is BackwardInput for kind, _, _ in done),
                   microbatches=microbatches, homes=homes, orders=orders)  # type: ignore[arg-type]
