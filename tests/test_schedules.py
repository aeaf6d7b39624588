"""Laws of the schedules family, its published figures to the last digit, and properties that need no data.

The evaluator here is on purpose not Atoll's: a few lines of longest path over exact fractions, so that two
implementations must agree.
"""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import DocumentError, PlanError, ProgramError
from atoll.policies.schedules.table import SCHEDULES, find
from atoll.policies.schedules.written import written
from atoll.policies.schedules.zb_v import ZbV
from atoll.program.bare import bare_program
from atoll.program.check import check, live_peak
from atoll.program.contracts import Schedule
from atoll.program.instructions import Backward, BackwardInput, BackwardWeight, Forward, Instruction, Recompute
from atoll.program.linked import link
from atoll.program.pytorch_csv import write_orders

DATA = Path(__file__).parent / "data"
Orders = Sequence[Sequence[Instruction]]
Time = Fraction | int
Duration = Callable[[Instruction], Time]


# ---- the independent evaluator -------------------------------------------------------------------------------------

class Figures:
    """Exact makespan, busy time and span (first start to last end) of each rank."""

    def __init__(self, orders: Orders, stages: int, duration: Duration) -> None:
        ends: dict[tuple[str, int, int], Time] = {}
        clock: list[Time] = [0] * len(orders)
        first: list[Time | None] = [None] * len(orders)
        self.busy: list[Time] = [0] * len(orders)
        positions = [0] * len(orders)
        moved = True
        while moved:
            moved = False
            for rank, order in enumerate(orders):
                while positions[rank] < len(order):
                    instruction = order[positions[rank]]
                    needed = _needed(instruction, stages)
                    if any(one not in ends for one in needed):
                        break
                    start = max([clock[rank], *(ends[one] for one in needed)])
                    if first[rank] is None:
                        first[rank] = start
                    clock[rank] = ends[_key(instruction)] = start + duration(instruction)
                    self.busy[rank] += duration(instruction)
                    positions[rank] += 1
                    moved = True
        assert positions == [len(order) for order in orders], "deadlock"
        self.makespan = max(clock)
        self.spans = [end - (begin or 0) for begin, end in zip(first, clock, strict=True)]


def _letter(instruction: Instruction) -> str:
    return {Forward: "F", Backward: "B", BackwardInput: "B", BackwardWeight: "W"}[type(instruction)]


def _key(instruction: Instruction) -> tuple[str, int, int]:
    return _letter(instruction), instruction.stage, instruction.microbatch


def _needed(instruction: Instruction, stages: int) -> list[tuple[str, int, int]]:
    letter, stage, microbatch = _key(instruction)
    if letter == "F":
        return [("F", stage - 1, microbatch)] if stage else []
    if letter == "W":
        return [("B", stage, microbatch)]
    return [("F", stage, microbatch), *([("B", stage + 1, microbatch)] if stage + 1 < stages else [])]


def _peak(order: Sequence[Instruction]) -> int:
    alive = peak = 0
    for instruction in order:
        alive += 1 if isinstance(instruction, Forward) else -1 if isinstance(instruction, Backward | BackwardWeight) else 0
        peak = max(peak, alive)
    return peak


def _even(forward: Time, backward_input: Time, backward_weight: Time) -> Duration:
    times = {Forward: forward, Backward: backward_input + backward_weight, BackwardInput: backward_input,
             BackwardWeight: backward_weight}
    return lambda instruction: times[type(instruction)]


# ---- laws, over the table ------------------------------------------------------------------------------------------

GRID = [(ranks, microbatches, chunks) for ranks in (1, 2, 3, 4, 5, 8) for microbatches in (1, 2, 3, 5, 8, 12)
        for chunks in (1, 2, 3)]


def _legal(name: str) -> list[tuple[int, int, int]]:
    return [numbers for numbers in GRID if SCHEDULES[name].refuse(*numbers) is None]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_runs_every_microbatch_once_on_its_own_rank(name: str) -> None:
    schedule = SCHEDULES[name]
    assert schedule.name == name and schedule.source
    for ranks, microbatches, chunks in _legal(name):
        placement = schedule.placement(ranks, chunks)
        assert sorted(placement) == sorted(list(range(ranks)) * chunks)
        orders = schedule.order(ranks, microbatches, chunks)
        assert len(orders) == ranks
        done = Counter((type(instruction), instruction.stage, instruction.microbatch, rank)
                       for rank, order in enumerate(orders) for instruction in order)
        kinds = (Forward, BackwardInput, BackwardWeight) if schedule.splits_backward else (Forward, Backward)
        wanted = {(kind, stage, microbatch, rank) for kind in kinds for stage, rank in enumerate(placement)
                  for microbatch in range(microbatches)}
        assert done == Counter(wanted)


@pytest.mark.parametrize("name", SCHEDULES)
def test_runs_to_its_end_and_holds_what_it_claims(name: str) -> None:
    schedule = SCHEDULES[name]
    for ranks, microbatches, chunks in _legal(name):
        orders = schedule.order(ranks, microbatches, chunks)
        claim = schedule.claim(ranks, microbatches, chunks).peak_activations
        assert tuple(map(_peak, orders)) == claim
        checked = check(bare_program(schedule.placement(ranks, chunks), orders))
        assert tuple(checked.saved_peak[str(rank)] for rank in range(ranks)) == claim
        if ranks == 3:
            assert tuple(map(live_peak, orders)) == claim, "bare orders are counted like programs"
        crossings = sum(a != b for a, b in itertools.pairwise(schedule.placement(ranks, chunks)))
        assert checked.messages == 2 * microbatches * crossings


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_never_waits(name: str) -> None:
    schedule = SCHEDULES[name]
    numbers = [one for one in _legal(name) if one[0] == 1]
    assert numbers
    for ranks, microbatches, chunks in numbers:
        figures = Figures(schedule.order(ranks, microbatches, chunks), chunks, _even(3, 4, 2))
        assert figures.makespan == figures.busy[0] == 9 * microbatches * chunks


@pytest.mark.parametrize("name", SCHEDULES)
def test_refusals_are_sentences(name: str) -> None:
    schedule = SCHEDULES[name]
    for numbers in [(0, 4, 2), (4, 0, 2), (4, 4, 0), (-1, 4, 1)]:
        refusal = schedule.refuse(*numbers)
        assert refusal is not None and name in refusal and len(refusal) > 40
    assert any(schedule.refuse(4, 8, chunks) is None for chunks in (1, 2))


def test_interleaved_refuses_unequal_groups_and_says_what_would_do() -> None:
    refusal = SCHEDULES["interleaved-1f1b"].refuse(2, 5, 2)
    assert refusal is not None and "4 or 6" in refusal
    assert SCHEDULES["interleaved-1f1b"].refuse(2, 4, 2) is None and SCHEDULES["interleaved-1f1b"].refuse(2, 6, 2) is None
    assert SCHEDULES["interleaved-1f1b"].refuse(4, 10, 2) is None, "two groups of five"


def test_an_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(PlanError, match=r"did you mean .*interleaved-1f1b"):
        find("interleaved_1f1b")
    assert find("zb-v") is SCHEDULES["zb-v"]


# ---- published figures ---------------------------------------------------------------------------------------------

def _rows(file: str) -> list[dict[str, str]]:
    with open(DATA / file, newline="") as opened:
        return list(csv.DictReader(opened))


def _exact(text: str) -> Fraction:
    """The rational a figure stands for: the file holds sums of floats (7.000000000000001), rationals lie 1e-4 apart."""
    value = Fraction(text).limit_denominator(100)
    assert abs(value - Fraction(text)) < Fraction(1, 10**10)
    return value


EXACT = _rows("schedule_exact.csv")
GOLDEN_NAMES = {"1f1b": "1f1b", "zb1p-heuristic": "zb-h1", "zbv": "zb-v"}
GOLDEN = [row for row in _rows("schedule_golden.csv") if row["schedule"] in GOLDEN_NAMES]


def _row_name(row: dict[str, str]) -> str:
    return "-".join(row[key] for key in ("schedule", "p", "m", "v", "tF", "tB", "tW"))


@pytest.mark.parametrize("row", EXACT, ids=_row_name)
def test_exact_figures(row: dict[str, str]) -> None:
    """Durations are of a whole stage: a chunk takes a v-th of it. Counted in units of 1/2v, in which all are whole."""
    schedule = SCHEDULES[row["schedule"]]
    ranks, microbatches, chunks = (int(row[key]) for key in "pmv")
    units = [2 * Fraction(row[key]) for key in ("tF", "tB", "tW")]
    assert all(unit.denominator == 1 for unit in units) and schedule.refuse(ranks, microbatches, chunks) is None
    orders = schedule.order(ranks, microbatches, chunks)
    figures = Figures(orders, ranks * chunks, _even(*map(int, units)))
    makespan, busy = (Fraction(value, 2 * chunks) for value in (figures.makespan, figures.busy[0]))
    assert makespan == _exact(row["makespan"]) == _exact(row["closed_form"])
    assert len(set(figures.busy)) == 1 and busy == _exact(row["ideal"])
    assert makespan - busy == _exact(row["bubble_time"])
    assert round(float(1 - busy / makespan), 9) == float(row["bubble_fraction"])
    assert Fraction(max(map(_peak, orders)), chunks) == _exact(row["peak_inflight_worst_device"])
    claim = schedule.claim(ranks, microbatches, chunks)
    assert Fraction(max(claim.peak_activations), chunks) == _exact(row["peak_closed_form"])


@pytest.mark.parametrize("row", GOLDEN, ids=_row_name)
def test_golden_figures(row: dict[str, str]) -> None:
    """Durations are of one chunk. ZB-V's order depends on them."""
    ranks, microbatches, chunks = (int(row[key]) for key in "pmv")
    times = [int(row[key]) for key in ("tF", "tB", "tW")]
    schedule = SCHEDULES[GOLDEN_NAMES[row["schedule"]]]
    if isinstance(schedule, ZbV):
        schedule = ZbV(forward=times[0], backward_input=times[1], backward_weight=times[2])
    orders = schedule.order(ranks, microbatches, chunks)
    figures = Figures(orders, ranks * chunks, _even(*times))
    assert figures.makespan == Fraction(row["makespan"])
    assert set(figures.busy) == {Fraction(row["busy_per_device"])}
    assert figures.makespan - figures.busy[0] == Fraction(row["bubble_makespan"])
    assert max(figures.spans) == Fraction(row["longest_device_span"])
    assert max(figures.spans) - figures.busy[0] == Fraction(row["bubble_longest_span"])
    assert list(map(_peak, orders)) == list(map(int, row["peak_chunks_per_device"].split()))
    assert Fraction(max(map(_peak, orders)), chunks) == Fraction(row["peak_in_full_stages"])


def test_the_files_hold_every_schedule_built_here() -> None:
    """Of the first ones; a new schedule may have none."""
    assert len(EXACT) == 342
    known = {row["schedule"] for row in EXACT}
    assert known == {"gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "zb-h1"} < SCHEDULES.keys()
    assert Counter(row["schedule"] for row in GOLDEN) == {"1f1b": 12, "zb1p-heuristic": 14, "zbv": 11}


@pytest.mark.parametrize(("forward", "backward_input", "backward_weight", "makespan", "span"),
                         [(1, 1, 1, 3, 0), (10, 11, 9, 33, 8), (2, 2, 1, 6, 5)])
def test_zb_v_bubbles_do_not_grow_with_microbatches(forward: int, backward_input: int, backward_weight: int, makespan: int,
                                                    span: int) -> None:
    schedule = ZbV(forward=forward, backward_input=backward_input, backward_weight=backward_weight)
    for microbatches in (8, 12, 17, 24, 40):
        figures = Figures(schedule.order(4, microbatches, 2), 8,
                          _even(forward, backward_input, backward_weight))
        assert figures.makespan - figures.busy[0] == makespan
        assert max(figures.spans) - figures.busy[0] == span


# ---- properties ----------------------------------------------------------------------------------------------------

@st.composite
def _pipelines(draw: st.DrawFn) -> tuple[str, int, int, int, Duration]:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks, microbatches, chunks = draw(st.sampled_from(_legal(name)))
    time = st.integers(0, 20)
    table = {stage: (draw(time), draw(time), draw(time)) for stage in range(ranks * chunks)}

    def duration(instruction: Instruction) -> Fraction:
        forward, inputs, weights = table[instruction.stage]
        return {Forward: forward, Backward: inputs + weights, BackwardInput: inputs, BackwardWeight: weights}[type(instruction)]
    return name, ranks, microbatches, chunks, duration


def _orders(pipeline: tuple[str, int, int, int, Duration]) -> Orders:
    name, ranks, microbatches, chunks, _ = pipeline
    return SCHEDULES[name].order(ranks, microbatches, chunks)


def _figures(pipeline: tuple[str, int, int, int, Duration], orders: Orders, duration: Duration | None = None) -> Figures:
    return Figures(orders, pipeline[1] * pipeline[3], duration or pipeline[4])


FAST = settings(max_examples=40, deadline=None)


@FAST
@given(_pipelines(), st.randoms(use_true_random=False))
def test_names_of_microbatches_do_not_matter(pipeline, random) -> None:
    new = list(range(pipeline[2]))
    random.shuffle(new)
    orders = _orders(pipeline)
    renamed = [[msgspec.structs.replace(one, microbatch=new[one.microbatch]) for one in order] for order in orders]
    before, after = _figures(pipeline, orders), _figures(pipeline, renamed)
    assert (before.makespan, before.spans) == (after.makespan, after.spans)


@FAST
@given(_pipelines(), st.integers(1, 9))
def test_scaling_all_durations_scales_the_makespan(pipeline, factor) -> None:
    orders = _orders(pipeline)
    slower = _figures(pipeline, orders, lambda one: factor * pipeline[4](one))
    assert slower.makespan == factor * _figures(pipeline, orders).makespan


@FAST
@given(_pipelines(), st.data())
def test_a_longer_instruction_never_shortens_a_fixed_order(pipeline, data) -> None:
    orders = _orders(pipeline)
    victim = data.draw(st.sampled_from([one for order in orders for one in order]))
    longer = _figures(pipeline, orders, lambda one: pipeline[4](one) + (5 if one == victim else 0))
    assert longer.makespan >= _figures(pipeline, orders).makespan


@FAST
@given(_pipelines())
def test_busy_time_is_the_work_and_the_makespan_is_at_least_that_of_the_busiest(pipeline) -> None:
    name, ranks, microbatches, chunks, duration = pipeline
    orders = _orders(pipeline)
    figures = _figures(pipeline, orders)
    forward = [duration(Forward(stage=stage, microbatch=0)) for stage in range(ranks * chunks)]
    backward = [duration(Backward(stage=stage, microbatch=0)) for stage in range(ranks * chunks)]
    assert sum(figures.busy) == microbatches * (sum(forward) + sum(backward))
    assert all(1 <= _peak(order) <= microbatches * chunks for order in orders)
    assert figures.makespan >= max(figures.spans) >= max(figures.busy)
    if chunks == 1:
        after = [0 if SCHEDULES[name].splits_backward else sum(backward[:rank]) for rank in range(ranks)]
        assert figures.makespan >= max(sum(forward[:rank]) + microbatches * (forward[rank] + backward[rank]) + after[rank]
                                       for rank in range(ranks))


@FAST
@given(_pipelines())
def test_the_program_of_the_order_says_the_same_as_the_longest_path(pipeline) -> None:
    name, ranks, _, chunks, duration = pipeline
    orders = _orders(pipeline)
    linked = link(bare_program(SCHEDULES[name].placement(ranks, chunks), orders))
    ends = [0] * len(linked.instructions)
    for node in linked.in_order():
        start = max((ends[earlier] for earlier in linked.before[node]), default=0)
        one = linked.instructions[node]
        ends[node] = start + (duration(one) if isinstance(one, Forward | Backward | BackwardInput | BackwardWeight) else 0)
    assert max(ends) == _figures(pipeline, orders).makespan


@FAST
@given(st.integers(1, 8), st.integers(1, 12), st.integers(2, 4), st.tuples(*[st.integers(1, 20).map(Fraction)] * 2))
def test_order_among_schedules_without_communication(ranks, rounds, chunks, times) -> None:
    microbatches = ranks * min(rounds, 24 // ranks)
    whole = _even(*times, 0)
    part = _even(times[0] / chunks, times[1] / chunks, 0)
    gpipe = Figures(SCHEDULES["gpipe"].order(ranks, microbatches, 1), ranks, whole).makespan
    flush = Figures(SCHEDULES["1f1b"].order(ranks, microbatches, 1), ranks, whole).makespan
    interleaved = Figures(SCHEDULES["interleaved-1f1b"].order(ranks, microbatches, chunks), ranks * chunks, part).makespan
    breadth = Figures(SCHEDULES["breadth-first"].order(ranks, microbatches, chunks), ranks * chunks, part).makespan
    assert gpipe == flush == microbatches * sum(times) + (ranks - 1) * sum(times)
    assert interleaved == breadth == microbatches * sum(times) + (ranks - 1) * sum(times) / chunks


@FAST
@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 20), st.integers(1, 20))
def test_a_split_backward_without_weights_is_its_unsplit_parent(ranks, microbatches, forward, backward) -> None:
    split = Figures(SCHEDULES["zb-h1"].order(ranks, microbatches, 1), ranks, _even(forward, backward, 0))
    whole = Figures(SCHEDULES["1f1b"].order(ranks, microbatches, 1), ranks, _even(forward, backward, 0))
    assert split.makespan == whole.makespan


def test_gpipe_reversed_in_time_is_gpipe() -> None:
    for ranks, microbatches in itertools.product((1, 2, 5), (1, 3, 8)):
        orders = SCHEDULES["gpipe"].order(ranks, microbatches, 1)
        swapped = tuple(tuple({Forward: Backward, Backward: Forward}[type(one)](
            stage=one.stage, microbatch=microbatches - 1 - one.microbatch) for one in reversed(order)) for order in orders)
        assert swapped == orders


# ---- schedules that somebody wrote down ------------------------------------------------------------------------------

@pytest.mark.parametrize("name", SCHEDULES)
def test_a_written_schedule_is_the_schedule_it_was_written_from(name: str) -> None:
    schedule = SCHEDULES[name]
    chunks = 1 if schedule.refuse(4, 8, 1) is None else 2
    read: Schedule = written(write_orders(schedule.order(4, 8, chunks)), source="mine.csv")
    assert read.refuse(4, 8, chunks) is None and read.splits_backward == schedule.splits_backward
    assert read.placement(4, chunks) == schedule.placement(4, chunks)
    assert read.order(4, 8, chunks) == schedule.order(4, 8, chunks)
    assert read.claim(4, 8, chunks).peak_activations == schedule.claim(4, 8, chunks).peak_activations
    refusal = read.refuse(4, 9, chunks)
    assert refusal is not None and "8 microbatches" in refusal and "asked for 4, 9" in refusal


@pytest.mark.parametrize(("text", "error", "sentence"), [
    ("0F0,0B0,0F1\n", DocumentError, "mine.csv: stage 0 does Forward for microbatch 1, expected F and either B or both"),
    ("0F0,0I0\n", DocumentError, "stage 0 does Forward, BackwardInput for microbatch 0"),
    ("0F1,0B1\n", DocumentError, "stage 0 does nothing for microbatch 0"),
    ("0F0,1F0,1B0,0B0\n2F0,2B0\n", DocumentError, "the ranks hold 2, 1 stages"),
    ("0B0,0F0\n", ProgramError, "0B0 reads"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", ProgramError, "deadlock"),
])
def test_a_schedule_written_wrongly_is_refused(text: str, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        written(text, source="mine.csv")


# ---- bare programs -------------------------------------------------------------------------------------------------

def test_a_bare_program_refuses_what_is_no_order() -> None:
    with pytest.raises(ProgramError, match="rank 0: its order runs stage 1, which lives on rank 1"):
        bare_program((0, 1), [[Forward(stage=1, microbatch=0)], []])
    with pytest.raises(ProgramError, match="stage 7, which does not exist"):
        bare_program((0, 1), [[Forward(stage=7, microbatch=0)], []])
    with pytest.raises(ProgramError, match="found Recompute"):
        bare_program((0,), [[Recompute(stage=0, microbatch=0)]])


def test_a_wrong_order_is_a_named_deadlock() -> None:
    orders = [[Forward(stage=0, microbatch=0), Backward(stage=0, microbatch=0), Forward(stage=0, microbatch=1),
               Backward(stage=0, microbatch=1)],
              [Forward(stage=1, microbatch=0), Forward(stage=1, microbatch=1), Backward(stage=1, microbatch=0),
               Backward(stage=1, microbatch=1)]]
    with pytest.raises(ProgramError, match=r"deadlock: .*worker 0: 0B0.*which waits for worker 0: 0RECV_B0 \(peer 1\)"):
        check(bare_program((0, 1), orders))
