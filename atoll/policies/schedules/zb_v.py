"""ZB-V: two stages a rank laid out as a V, split backward, gradients of weights in every gap (Qi et al., 2023, section 6).

Ranks pass the model down on one *leg* and back up on the other, so the last stage is on rank 0 and backwards start where
forwards do. Leg 0 of forwards and of backwards runs from rank 0 to p-1, leg 1 from p-1 to 0.

The order is planned greedily on a clock of its own, for the durations the record names (the paper's automatic schedule):
one input gradient and one forward of each rank in turn; a weight gradient goes where the rank would wait at least as long
as it takes, or where waiting would make this rank the one that has waited most. Planning is repeated as long as that worst
wait falls, each rank being granted what it waited the time before, and the best of four variants is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from atoll.policies.schedules.shapes import ScheduleClaim, refuse_counts, v_shaped
from atoll.program.instructions import BackwardInput, BackwardWeight, Forward, Instruction
from atoll.records import Record

__all__ = ["ZbV"]

_F, _B, _W = range(3)
_UNITS = (2, -1, -1)
"""What each kind adds to the memory counted while planning: half of an activation goes with B, the rest with W."""


class ZbV(Record):
    """No bubble within a rank's own span when F = B = W, at the peak memory of 1F1B's first rank on every rank.

    ``forward``, ``backward_input``, ``backward_weight``: relative durations the order is planned for, each of one stage;
    raise one when a profile shows gaps. The order stays legal for any durations.

    Time beyond 2m(F+B+W) when F = B = W and m at least 2p: (p-1)F, all before a rank's first or after its last instruction.
    Peak: min(2p, 2m) stages of a microbatch.
    """

    name: str = "zb-v"
    source: str = "Zero Bubble Pipeline Parallelism (Qi et al., 2023), section 6"
    splits_backward: bool = True
    forward: int = 1
    backward_input: int = 1
    backward_weight: int = 1

    def refuse(self, ranks: int, microbatches: int, chunks: int) -> str | None:
        return refuse_counts(self.name, ranks, microbatches, chunks, range(2, 3))

    def placement(self, ranks: int, chunks: int) -> tuple[int, ...]:
        return v_shaped(ranks)

    def order(self, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[Instruction, ...], ...]:
        durations = (self.forward, self.backward_input, self.backward_weight)
        return tuple(tuple(_instruction(step, rank, ranks) for step in row)
                     for rank, row in enumerate(_best_plan(ranks, microbatches, durations)))

    def claim(self, ranks: int, microbatches: int, chunks: int) -> ScheduleClaim:
        return ScheduleClaim(peak_activations=(2 * min(ranks, microbatches),) * ranks)


_Step = tuple[int, int, int]
"""(kind, leg, microbatch)"""


def _instruction(step: _Step, rank: int, ranks: int) -> Instruction:
    kind, leg, microbatch = step
    down = leg == 0 if kind == _F else leg == 1
    stage = rank if down else 2 * ranks - 1 - rank
    return (Forward, BackwardInput, BackwardWeight)[kind](stage=stage, microbatch=microbatch)


def _best_plan(ranks: int, microbatches: int, durations: tuple[int, int, int]) -> list[list[_Step]]:
    best: _Draft | None = None
    for before_backward in (True, False):
        for before_forward in (True, False):
            draft = _improved(ranks, microbatches, durations, before_backward, before_forward)
            if best is None or max(draft.waited) < max(best.waited):
                best = draft
    assert best is not None
    return best.rows


def _improved(ranks: int, microbatches: int, durations: tuple[int, int, int], before_backward: bool,
              before_forward: bool) -> _Draft:
    """Plan again with the waits of the last draft as grants, as long as the worst wait falls."""
    granted: list[int] | None = None
    best: _Draft | None = None
    while True:
        draft = _Draft(ranks, microbatches, durations, granted)
        draft.fill(before_backward, before_forward)
        if best is not None and max(draft.waited) >= max(best.waited):
            return best
        best, granted = draft, draft.waited


class _Draft:
    """One attempt: the rows so far, each rank's clock, what it has waited since its first forward, and what it owes."""

    def __init__(self, ranks: int, microbatches: int, durations: tuple[int, int, int], granted: Sequence[int] | None) -> None:
        self.ranks, self.microbatches, self.durations = ranks, microbatches, durations
        self.rows: list[list[_Step]] = [[] for _ in range(ranks)]
        self.waited = [0] * ranks
        self._clock = [0] * ranks
        self._memory = [0] * ranks
        self._limit = 4 * ranks
        self._count = [[[0, 0] for _ in range(3)] for _ in range(ranks)]
        self._end: dict[tuple[int, int, int, int], int] = {}
        self._owed: list[deque[int]] = [deque() for _ in range(ranks)]
        self._spare = [max(granted) - one for one in granted] if granted else [0] * ranks

    def fill(self, before_backward: bool, before_forward: bool) -> None:
        self._first_forwards()
        self._more_forwards()
        for _ in range(2 * self.microbatches):
            self._round_of_backwards(before_backward)
            self._round_of_forwards(before_forward)
        for rank, owed in enumerate(self._owed):
            while owed:
                self._pay(rank)

    def _arrival(self, kind: int, leg: int, rank: int) -> int | None:
        """When the neighbour's part of the rank's next F or B of this leg ends (None: the leg starts here, or not planned)."""
        return self._end.get((kind, leg, rank - 1 if leg == 0 else rank + 1, self._count[rank][kind][leg]))

    def _put(self, kind: int, leg: int, rank: int) -> None:
        start = self._clock[rank]
        if kind != _W:
            start = max(start, self._arrival(kind, leg, rank) or 0)
        if self._count[rank][_F][0]:
            self.waited[rank] += start - self._clock[rank]
        microbatch = self._count[rank][kind][leg]
        self._clock[rank] = self._end[kind, leg, rank, microbatch] = start + self.durations[kind]
        self._memory[rank] += _UNITS[kind]
        self._count[rank][kind][leg] += 1
        self.rows[rank].append((kind, leg, microbatch))
        if kind == _B:
            self._owed[rank].append(leg)

    def _pay(self, rank: int) -> None:
        self._put(_W, self._owed[rank].popleft(), rank)

    def _first_forwards(self) -> None:
        """Microbatch 0 down and up the V, with as many more down as fit before it returns and in memory."""
        for rank in range(self.ranks):
            self._put(_F, 0, rank)
        for rank in reversed(range(self.ranks)):
            returns = self._arrival(_F, 1, rank)
            while (returns is not None and self._count[rank][_F][0] < self.microbatches
                   and self._clock[rank] + self.durations[_F] <= returns
                   and self._memory[rank] + _UNITS[_F] * (2 + 2 * rank) <= self._limit):
                for above in range(rank + 1):
                    self._put(_F, 0, above)
            self._put(_F, 1, rank)

    def _more_forwards(self) -> None:
        """Both legs in turn, until every rank has as many forwards as the one before it."""
        leg = 0
        for rank in range(1, self.ranks):
            here, before = self._count[rank][_F], self._count[rank - 1][_F]
            while sum(here) < sum(before) or here[1] <= before[1] < self.microbatches:
                for below in reversed(range(rank, self.ranks)):
                    if self._count[below][_F][leg] < self.microbatches:
                        self._put(_F, leg, below)
                leg = 1 - leg

    def _round_of_backwards(self, fill: bool) -> None:
        legs = [self._next_backward(rank) for rank in range(self.ranks)]
        upward = [(rank, 1) for rank in reversed(range(self.ranks)) if legs[rank] == 1]
        for rank, leg in upward + [(rank, 0) for rank in range(self.ranks) if legs[rank] == 0]:
            self._use_gap(_B, leg, rank, fill or leg == 1)
            self._put(_B, leg, rank)

    def _next_backward(self, rank: int) -> int:
        done = self._count[rank][_B]
        if done[1] >= done[0]:
            return 0
        at_turn = rank == self.ranks - 1
        return int(at_turn or self._arrival(_B, 1, rank) is not None or done[0] >= self.microbatches)

    def _round_of_forwards(self, fill: bool) -> None:
        for rank in range(self.ranks):
            leg = self._next_forward(rank)
            if leg is None:
                continue
            while self._memory[rank] + _UNITS[_F] > self._limit:
                self._pay(rank)
            self._use_gap(_F, leg, rank, fill)
            self._put(_F, leg, rank)

    def _next_forward(self, rank: int) -> int | None:
        done = self._count[rank][_F]
        if done[1] >= self.microbatches:
            return None
        if done[1] >= done[0]:
            return 0
        if rank == self.ranks - 1 or self._arrival(_F, 1, rank) is not None:
            return 1
        started = rank == 0 or self._arrival(_F, 0, rank) is not None
        return 0 if done[0] < self.microbatches and started else None

    def _use_gap(self, kind: int, leg: int, rank: int, fill: bool) -> None:
        """Weight gradients that fit before the neighbour's result arrives; one more if the rest of the wait is too long."""
        arrival = self._arrival(kind, leg, rank)
        owed = self._owed[rank]
        if arrival is None:
            return
        while owed and self._clock[rank] + self.durations[_W] <= arrival:
            self._pay(rank)
        allowed = max(*self.waited, self._spare[rank], 0) - self.waited[rank]
        if fill and owed and arrival - self._clock[rank] > allowed:
            self._pay(rank)
