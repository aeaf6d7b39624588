"""The program ring: checker, notation, grid, PyTorch's CSV, and the rule that links workers."""

from __future__ import annotations

import msgspec
import pytest

from atoll.errors import DocumentError, ProgramError
from atoll.policies.schedules.table import SCHEDULES
from atoll.program.bare import bare_program
from atoll.program.check import check, live_peak
from atoll.program.grid import grid
from atoll.program.instructions import (
    INSTRUCTIONS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Commit,
    Forward,
    Instruction,
    Load,
    Native,
    Receive,
    Recompute,
    Reduce,
    Save,
    Send,
    Update,
    Vote,
)
from atoll.program.linked import link
from atoll.program.notation import NOTATIONS, notation
from atoll.program.program import Program, WorkerProgram
from atoll.program.pytorch_csv import read_orders, write_orders


def program(**workers: list[Instruction]) -> Program:
    return Program(kind="train", microbatch_samples=1, workers=tuple(
        WorkerProgram(worker=name, replica=0, stages=(), buckets=(), instructions=tuple(instructions))
        for name, instructions in workers.items()))


def load(number: int) -> Load:
    return Load(stage=number, microbatch=0, size_bytes=8)


def send(number: int, peer: str, size_bytes: int = 8) -> Send:
    return Send(buffer=("input", number, 0), peer=peer, size_bytes=size_bytes)


def receive(number: int, peer: str, size_bytes: int = 8) -> Receive:
    return Receive(buffer=("input", number, 0), peer=peer, size_bytes=size_bytes)


def native(collective: str = "all_reduce", group: tuple[str, ...] = ("a", "b"), bucket: int = 0, size_bytes: int = 8) -> Native:
    return Native(collective=collective, group=group, source=("gradient", bucket, 0), target=("reduced", bucket, 0),
                  size_bytes=size_bytes)


# ---- the checker ---------------------------------------------------------------------------------------------------

def test_a_sound_program_is_counted() -> None:
    checked = check(program(a=[load(0), load(1), send(0, "b"), send(1, "b"), native()],
                            b=[native(), receive(0, "a"), receive(1, "a")]))
    assert (checked.instructions, checked.messages, checked.saved_peak) == (8, 2, {"a": 0, "b": 0})


@pytest.mark.parametrize(("workers", "sentence"), [
    ({"a": [load(0), send(0, "b")], "b": []}, r"worker a: SEND input\[0\.0\] to b is unmatched: it is message 1 .* lists 0"),
    ({"a": [], "b": [receive(0, "a")]}, r"worker b: RECV input\[0\.0\] from a is unmatched.* a lists 0 sends to b"),
    ({"a": [load(0), load(1), send(0, "b"), send(1, "b")], "b": [receive(1, "a"), receive(0, "a")]},
     r"message 1 from a to b: sent is input\[0\.0\] of 8 bytes, expected at the receiver is input\[1\.0\]"),
    ({"a": [load(0), send(0, "b", 9)], "b": [receive(0, "a")]}, r"of 9 bytes, expected .* of 8 bytes"),
    ({"a": [load(0), send(0, "c")], "b": []}, r"worker a: .* names c, which is not in the program as its peer"),
    ({"a": [load(0), send(0, "a")]}, r"worker a: .* names itself as its peer"),
    ({"a": [native()], "b": []}, r"worker a: ALL_REDUCE 0\.0 would wait for ever: b lists only 0 collectives of group a, b"),
    ({"a": [native(size_bytes=8)], "b": [native(size_bytes=16)]}, r"a brings ALL_REDUCE 0\.0 of 8 bytes .* b .* 16 bytes"),
    ({"a": [native("all_reduce")], "b": [native("broadcast")]}, r"a brings ALL_REDUCE .* b brings BROADCAST"),
    ({"a": [native(group=("a", "c"))], "b": []}, r"worker a: ALL_REDUCE 0\.0 names c, which is not in the program"),
    ({"a": [native(group=("b",))], "b": [native(group=("b",))]}, r"worker a: ALL_REDUCE 0\.0 is not in its group b"),
    ({"a": [native(group=("a", "a"))]}, r"worker a: ALL_REDUCE 0\.0 names a member twice"),
    ({"a": [send(0, "b"), load(0)], "b": [receive(0, "a")]},
     r"worker a: SEND input\[0\.0\] reads input\[0\.0\] before anything has written it"),
    ({"a": [Backward(stage=0, microbatch=0)]}, r"worker a: 0B0 reads saved\[0\.0\] before anything"),
    ({"a": [load(0), load(0)]}, r"worker a: LOAD 0\.0 writes input\[0\.0\] again, which LOAD 0\.0 has written"),
    ({"a": [Update(rule="adamw", stages=(0,), gradients=())]}, r"worker a: UPDATE adamw 0 has no Commit before it"),
])
def test_the_culprit_is_named(workers: dict[str, list[Instruction]], sentence: str) -> None:
    with pytest.raises(ProgramError, match=sentence):
        check(program(**workers))


def test_two_programs_of_one_name_are_refused() -> None:
    twice = Program(kind="train", microbatch_samples=1, workers=program(a=[]).workers * 2)
    with pytest.raises(ProgramError, match="worker a has 2 programs"):
        check(twice)


def test_a_circle_of_waiting_is_told_whole() -> None:
    """Each forwards what it has not got yet: a waits for b and b for a."""
    relay = Reduce(target=("input", 8, 0), sources=(("input", 0, 0),), size_bytes=8)
    back = Reduce(target=("input", 0, 0), sources=(("input", 8, 0),), size_bytes=8)
    with pytest.raises(ProgramError) as caught:
        check(program(a=[receive(0, "b"), relay, send(8, "b")], b=[receive(8, "a"), back, send(0, "a")]))
    message = str(caught.value)
    assert message.startswith("deadlock: worker a: RECV input[0.0] (peer b), which waits for worker b: SEND input[0.0] (peer a)"
                              ", which waits for worker b: REDUCE input[0.0]")
    assert "worker b: RECV input[8.0] (peer a)" in message and message.endswith("worker a: RECV input[0.0] (peer b)")


def test_collectives_in_two_orders_deadlock() -> None:
    """Groups overlap in a and b; each enters the one the other is not in yet."""
    one, other = native(group=("a", "b"), bucket=0), native(group=("b", "a"), bucket=1)
    check(program(a=[one, other], b=[one, other]))
    with pytest.raises(ProgramError, match="deadlock: worker a: ALL_REDUCE"):
        check(program(a=[one, other], b=[other, one]))


def test_accumulators_and_persistent_buffers_may_be_read_first() -> None:
    gradients = (("gradient", 0, 0),)
    forward = [Forward(stage=0, microbatch=m, gives_loss=True) for m in range(2)]
    backward = [Backward(stage=0, microbatch=m, gradients=gradients) for m in range(2)]
    checked = check(program(a=[*forward, *backward, Reduce(target=("total",), sources=(("loss",),), size_bytes=8),
                               Commit(group=("a",)), Update(rule="adamw", stages=(0,), gradients=gradients)]))
    assert checked.saved_peak == {"a": 2}


def test_live_peak_counts_until_the_last_reader() -> None:
    split = [Forward(stage=0, microbatch=0), BackwardInput(stage=0, microbatch=0), Forward(stage=0, microbatch=1),
             BackwardWeight(stage=0, microbatch=0), BackwardInput(stage=0, microbatch=1), BackwardWeight(stage=0, microbatch=1)]
    assert live_peak(split) == 2
    assert live_peak(split, ("deferred",)) == 1
    assert live_peak(split, ("saved", "deferred")) == 3
    recomputed = [Forward(stage=0, microbatch=0, keep="kept"), Forward(stage=0, microbatch=1, keep="kept"),
                  Recompute(stage=0, microbatch=0), Backward(stage=0, microbatch=0), Recompute(stage=0, microbatch=1),
                  Backward(stage=0, microbatch=1)]
    assert live_peak(recomputed) == 1 and live_peak(recomputed, ("kept",)) == 2
    assert live_peak([Forward(stage=0, microbatch=m) for m in range(3)]) == 3, "what nobody reads stays"


def test_members_of_a_collective_start_together() -> None:
    linked = link(program(a=[load(0), load(1), native()], b=[native(), load(2)]))
    both = [node for node, one in enumerate(linked.instructions) if isinstance(one, Native)]
    assert len({linked.before[node] for node in both}) == 1
    assert linked.offsets == (0, 3) and linked.owners == ("a", "a", "a", "b", "b")


def test_a_break_in_any_message_of_a_real_program_is_found() -> None:
    """Mutations of a sound program: dropping or doubling any one message never passes."""
    sound = bare_program(SCHEDULES["zb-v"].placement(3, 2), SCHEDULES["zb-v"].order(3, 4, 2))
    check(sound)
    broken = 0
    for number, part in enumerate(sound.workers):
        for index, instruction in enumerate(part.instructions):
            if not isinstance(instruction, Send | Receive):
                continue
            for replacement in ((), (instruction, instruction)):
                new = msgspec.structs.replace(part, instructions=part.instructions[:index] + replacement
                                              + part.instructions[index + 1:])
                workers = (*sound.workers[:number], new, *sound.workers[number + 1:])
                with pytest.raises(ProgramError):
                    check(msgspec.structs.replace(sound, workers=workers))
                broken += 1
    assert broken == 4 * check(sound).messages


# ---- notation ------------------------------------------------------------------------------------------------------

EXAMPLES: dict[str, Instruction] = {
    "2F0": Forward(stage=2, microbatch=0),
    "2B13": Backward(stage=2, microbatch=13),
    "2I0": BackwardInput(stage=2, microbatch=0),
    "2W0": BackwardWeight(stage=2, microbatch=0),
    "2R0": Recompute(stage=2, microbatch=0),
    "2SEND_F0": Send(buffer=("activation", 2, 3, 0), peer="b", size_bytes=1),
    "3RECV_F0": Receive(buffer=("activation", 2, 3, 0), peer="a", size_bytes=1),
    "3SEND_B0": Send(buffer=("delta", 2, 3, 0), peer="a", size_bytes=1),
    "2RECV_B0": Receive(buffer=("delta", 2, 3, 0), peer="b", size_bytes=1),
    "2SEND_F0>5": Send(buffer=("activation", 2, 5, 0), peer="b", size_bytes=1),
    "5RECV_F0<2": Receive(buffer=("activation", 2, 5, 0), peer="a", size_bytes=1),
    "5SEND_B0>2": Send(buffer=("delta", 2, 5, 0), peer="a", size_bytes=1),
    "2RECV_B0<5": Receive(buffer=("delta", 2, 5, 0), peer="b", size_bytes=1),
    "SEND reduced[3.1]": Send(buffer=("reduced", 3, 1), peer="b", size_bytes=1),
    "RECV partial[3.1.a]": Receive(buffer=("partial", 3, 1, "a"), peer="a", size_bytes=1),
    "SEND total": Send(buffer=("total",), peer="b", size_bytes=1),
    "ALL_REDUCE 3.0": native(bucket=3),
    "REDUCE reduced[3.1]": Reduce(target=("reduced", 3, 1), sources=(), size_bytes=1),
    "LOAD 0.3": Load(stage=0, microbatch=3, size_bytes=1),
    "SAVE 0.2": Save(worker="a", stages=(0, 2), size_bytes=1),
    "UPDATE adamw 0.2": Update(rule="adamw", stages=(0, 2), gradients=()),
    "VOTE": Vote(worker="a", counted=(), evidence=()),
    "COMMIT": Commit(group=("a",)),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_notation(name: str) -> None:
    assert notation(EXAMPLES[name]) == name


def test_every_instruction_has_a_notation_and_an_example() -> None:
    assert set(NOTATIONS) == set(INSTRUCTIONS)
    assert {type(instruction) for instruction in EXAMPLES.values()} == set(INSTRUCTIONS)


@pytest.mark.parametrize("name", SCHEDULES)
def test_names_are_unique_in_a_worker(name: str) -> None:
    schedule = SCHEDULES[name]
    chunks = 1 if schedule.refuse(4, 8, 1) is None else 2
    for part in bare_program(schedule.placement(4, chunks), schedule.order(4, 8, chunks)).workers:
        names = [notation(instruction) for instruction in part.instructions]
        assert len(set(names)) == len(names)


# ---- the grid ------------------------------------------------------------------------------------------------------

def test_grid_of_1f1b() -> None:
    schedule = SCHEDULES["1f1b"]
    assert grid(bare_program(schedule.placement(3, 1), schedule.order(3, 4, 1))) == """\
0 | 0F0 0F1 0F2 .   .   .   .   0B0 --- 0F3 0B1 --- .   0B2 --- .   0B3 ---
1 | .   1F0 1F1 .   .   1B0 --- 1F2 1B1 --- 1F3 1B2 --- .   1B3 ---
2 | .   .   2F0 2B0 --- 2F1 2B1 --- 2F2 2B2 --- 2F3 2B3 ---
"""


def test_grid_of_a_split_backward_with_other_units() -> None:
    schedule = SCHEDULES["zb-h1"]
    text = grid(bare_program(schedule.placement(2, 1), schedule.order(2, 2, 1)),
                {Forward: 2, BackwardInput: 2, BackwardWeight: 1})
    assert text == """\
0 | 0F0 --- 0F1 --- .   .   0I0 --- 0W0 .   0I1 --- 0W1
1 | .   .   1F0 --- 1I0 --- 1F1 --- 1I1 --- 1W0 1W1
"""


def test_a_deadlock_is_not_drawn() -> None:
    with pytest.raises(ProgramError, match="deadlocks"):
        grid(bare_program((0, 1), [[Backward(stage=0, microbatch=0), Forward(stage=0, microbatch=0)],
                                   [Forward(stage=1, microbatch=0), Backward(stage=1, microbatch=0)]]))


# ---- PyTorch's CSV -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_there_and_back(name: str) -> None:
    schedule = SCHEDULES[name]
    chunks = 1 if schedule.refuse(4, 8, 1) is None else 2
    placement, orders = schedule.placement(4, chunks), schedule.order(4, 8, chunks)
    assert read_orders(write_orders(orders)) == (placement, orders)
    with_messages = write_orders([part.instructions for part in bare_program(placement, orders).workers])
    assert "SEND_F" in with_messages and read_orders(with_messages) == (placement, orders)


def test_csv_of_pairs_blanks_and_sharding() -> None:
    placement, orders = read_orders("0UNSHARD,0F0,,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2,0REDUCE_GRAD,0RESHARD\n")
    assert placement == (0,)
    assert [notation(one) for one in orders[0]] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]


def test_csv_of_the_older_letters() -> None:
    """B was the gradient of the inputs alone, BW both."""
    _, (order,) = read_orders("0F0,0F1,0B0,0W0,0BW1\n")
    assert [type(one) for one in order] == [Forward, Forward, BackwardInput, BackwardWeight, Backward]
    _, (order,) = read_orders("0F0,0F1,0I0,0W0,0B1\n")
    assert [type(one) for one in order] == [Forward, Forward, BackwardInput, BackwardWeight, Backward]


@pytest.mark.parametrize(("text", "sentence"), [
    ("0F0,0X0\n", r"mine\.csv: line 1, cell 2: found '0X0', expected"),
    ("0F0,0F\n", r"line 1, cell 2: found '0F', which names no microbatch"),
    ("0F0\n0F1\n", r"line 2: stage 0 is also in the row of rank 0"),
    ("0F0\n2F0\n", r"no row runs stage 1"),
    ("0F0,0F0\n", r"line 1: 0F0 is listed twice"),
    ("\n", r"no row runs stage 0"),
    ("0F0,(0F1;0B0\n", r"line 1, cell 2: found '\(0F1;0B0'"),
])
def test_csv_errors_name_the_place(text: str, sentence: str) -> None:
    with pytest.raises(DocumentError, match=sentence):
        read_orders(text, source="mine.csv")
