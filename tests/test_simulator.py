"""The simulator: figures known in closed form, laws that hold for any program, programs that must be refused."""

from __future__ import annotations

import csv
import random
from fractions import Fraction
from itertools import pairwise, permutations
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_cluster import (
    GIGA,
    PaperCosts,
    PaperPath,
    PaperRoads,
    backward,
    forward,
    program,
    random_program,
    receive,
    send,
    star,
    wire,
)

from atoll.errors import ProgramError
from atoll.policies.schedules.table import find
from atoll.policies.schedules.zb_v import ZbV
from atoll.program.bare import bare_program
from atoll.program.contracts import Schedule
from atoll.program.dependencies import dependencies
from atoll.program.instructions import Instruction, Load, Native, Receive, Send
from atoll.program.notation import notation
from atoll.program.program import Program
from atoll.simulator.fabric import AMOUNT, Fabric, fair_rates, prune
from atoll.simulator.simulate import Simulation, simulate
from atoll.trace.diff import diff

pytestmark = pytest.mark.null

SECOND = GIGA


def spans(simulation: Simulation, worker: str, step: int = 0) -> list[tuple[int, int]]:
    return [(span.start_ns, span.end_ns) for span in simulation.trace().spans if (span.worker, span.step) == (worker, step)]


def fixed(**times: int) -> PaperCosts:
    """Duration by the name of the instruction's type."""
    return PaperCosts(duration=lambda worker, instruction: times.get(type(instruction).__name__, 0))


def ring(size_bytes: int, group: tuple[str, ...], collective: str = "all_reduce") -> Native:
    return Native(collective=collective, group=group, source=("gradient", 0, 0), target=("reduced", 0, 0),
                  size_bytes=size_bytes)


# --- closed forms ---------------------------------------------------------------------------------------------------------


def test_one_message_costs_bytes_latency_and_message():
    roads = star(("a", "b"), 1000, latency_ns=50, message_ns=7)
    found = simulate(program(a=[forward(0), send(0, "b", 500)], b=[receive(0, "a", 500), backward(0)]),
                     fixed(Forward=100, Backward=30), roads)
    sent = 100 + SECOND // 2
    assert spans(found, "a") == [(0, 100), (100, sent)]
    assert spans(found, "b") == [(100, sent + 57), (sent + 57, sent + 87)]
    assert found.makespan_ns == found.step_ns == sent + 87


def test_an_empty_message_costs_latency_and_message_only():
    roads = star(("a", "b"), 1, latency_ns=50, message_ns=7)
    found = simulate(program(a=[send(0, "b", 0)], b=[receive(0, "a", 0)]), PaperCosts(), roads)
    assert spans(found, "a") == [(0, 0)]
    assert spans(found, "b") == [(0, 57)]


def test_inside_a_machine_a_message_is_a_copy():
    roads = PaperRoads(("a", "b"), default=PaperPath((), 0, 3), local_bytes_per_s=2000)
    found = simulate(program(a=[send(0, "b", 1000)], b=[receive(0, "a", 1000)]), PaperCosts(), roads)
    assert spans(found, "a") == [(0, SECOND // 2)]
    assert spans(found, "b") == [(0, SECOND // 2 + 3)]
    assert found.step_segment_bytes == {}
    assert found.pair_bytes == {("a", "b"): 1000}


def test_a_time_that_is_no_whole_nanosecond_is_rounded_up():
    found = simulate(program(a=[send(0, "b", 1)], b=[receive(0, "a", 1)]), PaperCosts(), wire(("a", "b"), 3))
    assert found.makespan_ns == 333_333_334


def test_messages_of_a_pair_follow_each_other_while_compute_goes_on():
    roads = wire(("a", "b"), 1000)
    found = simulate(program(a=[forward(0), send(0, "b", 1000), forward(1), send(1, "b", 1000)],
                             b=[receive(0, "a", 1000), receive(1, "a", 1000)]), fixed(Forward=SECOND // 4), roads)
    assert [end / SECOND for _, end in spans(found, "a")] == [0.25, 1.25, 0.5, 2.25]
    assert [start / SECOND for start, _ in spans(found, "b")] == [0.25, 1.25]


def test_a_receive_waits_for_its_lane_and_its_own_past():
    """The second message is there long before the first receive ends: its receive takes no time."""
    roads = PaperRoads(("a", "b"), {"x": 1000}, {("a", "b"): PaperPath(("x",), SECOND)})
    found = simulate(program(a=[send(0, "b", 1000), send(1, "b", 0)], b=[receive(0, "a", 1000), receive(1, "a", 0)]),
                     PaperCosts(), roads)
    assert spans(found, "b") == [(0, 2 * SECOND), (2 * SECOND, 2 * SECOND)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("collective", "rounds"), [("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)])
def test_a_ring_costs_its_closed_form(n, collective, rounds):
    names = tuple("abcdefg"[:n])
    size_bytes, rate, latency = 7 * 12 * 1000, 1000, 5_000
    native = ring(size_bytes, names, collective)
    found = simulate(program(**{name: [native] for name in names}), PaperCosts(), star(names, rate, latency_ns=latency))
    expected = Fraction(rounds * (n - 1) * size_bytes * SECOND, n * rate) + rounds * (n - 1) * latency
    assert found.makespan_ns == expected
    assert found.pair_bytes == {(names[i], names[(i + 1) % n]): rounds * (n - 1) * size_bytes // n for i in range(n) if n > 1}


def test_the_members_of_a_collective_meet():
    names = ("a", "b", "c")
    native = ring(3000, names)
    found = simulate(program(a=[native], b=[Load(stage=0, microbatch=0, size_bytes=0), native], c=[native]),
                     fixed(Load=SECOND), star(names, 1000))
    assert spans(found, "a") == [(0, 4 * SECOND)]
    late = program(a=[native], c=[native], b=[forward(0), Native(collective="all_reduce", group=names, source=("saved", 0, 0),
                                                                 target=("reduced", 0, 0), size_bytes=3000)])
    found = simulate(late, fixed(Forward=SECOND), star(names, 1000))
    assert spans(found, "a") == [(0, 5 * SECOND)]
    assert spans(found, "b") == [(0, SECOND), (SECOND, 5 * SECOND)]
    assert found.idle_ns["a"] == {"b": SECOND, "native": 4 * SECOND}


# --- fair sharing ---------------------------------------------------------------------------------------------------------


def flows(rate: int, *sizes: int, starts: tuple[int, ...] | None = None) -> list[int]:
    """Ends of flows of ``sizes`` from as many sources over one segment, each starting at its time."""
    names = tuple("abcd"[:len(sizes)])
    begin = dict(zip(names, starts or (0,) * len(sizes), strict=True))
    parts: dict[str, list[Instruction]] = {name: [forward(i), send(i, "z", size)]
                                           for i, (name, size) in enumerate(zip(names, sizes, strict=True))}
    parts["z"] = [receive(i, name, size) for i, (name, size) in enumerate(zip(names, sizes, strict=True))]
    found = simulate(program(**parts), PaperCosts(duration=lambda worker, _: begin[worker]), wire((*names, "z"), rate))
    return [spans(found, name)[1][1] for name in names]


def test_two_flows_share_a_segment():
    assert flows(1000, 1000, 1000) == [2 * SECOND, 2 * SECOND]
    assert flows(1000, 1000, 2000) == [2 * SECOND, 3 * SECOND]


def test_three_flows_share_a_segment():
    assert flows(1000, 1000, 2000, 3000) == [3 * SECOND, 5 * SECOND, 6 * SECOND]


def test_a_late_flow_slows_the_one_in_flight():
    assert flows(1000, 2000, 1000, starts=(0, SECOND)) == [3 * SECOND, 3 * SECOND]
    assert flows(1000, 2000, 400, starts=(0, SECOND)) == [2 * SECOND + 400_000_000, SECOND + 800_000_000]


def test_what_one_flow_cannot_use_the_others_get():
    """Max-min: b is held to 200 by its own segment, so a has 800 of the shared 1000; c elsewhere has all."""
    paths = {("a", "z"): PaperPath(("x",)), ("b", "z"): PaperPath(("x", "y")), ("c", "z"): PaperPath(("w",))}
    roads = PaperRoads(("a", "b", "c", "z"), {"x": 1000, "y": 200, "w": 500}, paths)
    sizes = {"a": 800, "b": 200, "c": 500}
    found = simulate(program(z=[receive(i, name, sizes[name]) for i, name in enumerate("abc")],
                             **{name: [send(i, "z", sizes[name])] for i, name in enumerate("abc")}), PaperCosts(), roads)
    assert [spans(found, name)[0][1] for name in "abc"] == [SECOND] * 3


def test_a_flow_over_two_segments_is_bound_by_the_fuller_one():
    assert dict(fair_rates([0, 1, 2], [(0, 1), (0,), (1,)], [900, 300], [900] * 3)) == {0: 150, 1: 750, 2: 150}
    assert dict(fair_rates([0, 1, 2], [(0, 1), (0,), (1,)], [900, 300], [100, 900, 900])) == {0: 100, 1: 800, 2: 200}


def test_segments_that_are_never_short_are_left_out():
    routes, capacity = [(0, 1, 2), (0, 1), (2,)], [10, 40, 15]
    top = [10, 10, 15]
    assert prune(routes, capacity, top) == [(0, 2), (0,), (2,)]


def test_a_collective_and_a_message_share_a_port():
    """The ring's edge a>b and the message a>c leave through one port of a."""
    names = ("a", "b", "c")
    native = ring(1000, ("a", "b"))
    found = simulate(program(a=[native, send(0, "c", 1000)], b=[native], c=[receive(0, "a", 1000)]), PaperCosts(),
                     star(names, 1000))
    assert spans(found, "a") == [(0, 2 * SECOND), (0, 2 * SECOND)]
    assert found.step_segment_bytes == {"a>": 2000, ">a": 1000, "b>": 1000, ">b": 1000, "c>": 0, ">c": 1000}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_fluid_flows_agree_with_a_slow_exact_model(seed):
    """Fractions instead of integers, everything worked out anew at every event."""
    dice = random.Random(seed)
    capacity = [dice.choice((500, 1000, dice.randrange(500, 2000))) for _ in range(dice.randrange(1, 5))]
    routes = [tuple(dice.sample(range(len(capacity)), dice.randrange(1, len(capacity) + 1))) for _ in range(8)]
    starts = [dice.choice((0, 0, dice.randrange(5 * SECOND))) for _ in routes]
    sizes = [dice.randrange(1, 5000) for _ in routes]
    heap = sorted((start, len(routes) + lane) for lane, start in enumerate(starts))
    top = [min(capacity[segment] for segment in route) for route in routes]
    fabric = Fabric(routes, capacity, top, heap)
    ends = {}
    while heap:
        heap.sort()
        now, lane = heap.pop(0)
        if lane >= len(routes):
            fabric.start(lane - len(routes), sizes[lane - len(routes)] * AMOUNT, now)
        elif fabric.due[lane] == now:
            fabric.end(lane, now)
            ends[lane] = now
    for lane, end in exact_ends(capacity, routes, starts, sizes).items():
        # each of the events rounds by 1 ns at most, of a flow at most so many times as fast as the slowest
        assert abs(ends[lane] - end) <= 2 * len(routes) * max(capacity) * len(routes) / min(capacity)


def exact_ends(capacity: list[int], routes: list[tuple[int, ...]], starts: list[int], sizes: list[int]) -> dict[int, Fraction]:
    left = {lane: Fraction(size) * SECOND for lane, size in enumerate(sizes)}
    now, ends = Fraction(0), {}
    while left:
        active = [lane for lane in left if starts[lane] <= now]
        rates: dict[int, Fraction] = {}
        while len(rates) < len(active):
            shares = {}
            for segment, rate in enumerate(capacity):
                open_lanes = [lane for lane in active if lane not in rates and segment in routes[lane]]
                if open_lanes:
                    used = sum(rates[lane] for lane in rates if segment in routes[lane])
                    shares[segment] = (rate - used) / len(open_lanes)
            tightest = min(shares, key=lambda segment: shares[segment])
            for lane in active:
                if lane not in rates and tightest in routes[lane]:
                    rates[lane] = Fraction(shares[tightest])
        events = [now + left[lane] / rates[lane] for lane in active] + [
            Fraction(starts[lane]) for lane in left if starts[lane] > now]
        later = min(events)
        for lane in active:
            left[lane] -= rates[lane] * (later - now)
            if left[lane] <= 0:
                del left[lane]
                ends[lane] = later
        now = later
    return ends


# --- the network matters, names do not ------------------------------------------------------------------------------------


def test_another_topology_changes_the_answer():
    names = ("a", "b", "c", "d")
    exchange = program(a=[send(0, "b", 1000)], b=[receive(0, "a", 1000)], c=[send(1, "d", 1000)], d=[receive(1, "c", 1000)])
    assert simulate(exchange, PaperCosts(), star(names, 1000)).makespan_ns == SECOND
    assert simulate(exchange, PaperCosts(), wire(names, 1000)).makespan_ns == 2 * SECOND
    slow_port = star(names, 1000, rates={"d": 250})
    assert simulate(exchange, PaperCosts(), slow_port).makespan_ns == 4 * SECOND


def test_permuted_workers_on_a_symmetric_cluster_change_nothing():
    names = ("a", "b", "c", "d")
    original = random_program(11, names, 80)
    costs = fixed(Forward=700, Backward=900, Reduce=300, Load=100)
    expected = simulate(original, costs, star(names, 10**9, latency_ns=100), steps=2)
    for order in list(permutations(names))[::5]:
        renamed = rename(original, dict(zip(names, order, strict=True)))
        found = simulate(renamed, costs, star(names, 10**9, latency_ns=100), steps=2)
        assert found.step_ns == expected.step_ns
        for old, new in zip(names, order, strict=True):
            assert spans(found, new, 1) == spans(expected, old, 1)


def rename(original: Program, names: dict[str, str]) -> Program:
    import msgspec

    def instruction(one: Instruction) -> Instruction:
        if isinstance(one, Send | Receive):
            return msgspec.structs.replace(one, peer=names[one.peer])
        if isinstance(one, Native):
            return msgspec.structs.replace(one, group=tuple(names[name] for name in one.group))
        return one

    parts = {names[part.worker]: [instruction(one) for one in part.instructions] for part in original.workers}
    return program(**{name: parts[name] for name in sorted(parts)})


def test_the_order_in_which_workers_are_listed_changes_nothing():
    names = ("a", "b", "c")
    original = random_program(5, names, 60)
    backwards = Program(kind="train", microbatch_samples=1, workers=tuple(reversed(original.workers)))
    costs, roads = fixed(Forward=70, Reduce=10), star(names, 10**8, 50)
    assert diff(simulate(original, costs, roads).trace(), simulate(backwards, costs, roads).trace()).same
    for name in names:
        assert spans(simulate(original, costs, roads), name) == spans(simulate(backwards, costs, roads), name)


def test_slowdown_of_one_device():
    chain = program(a=[forward(0), send(0, "b", 0)], b=[receive(0, "a", 0), backward(0)])
    costs, roads = fixed(Forward=100, Backward=1000), wire(("a", "b"), 1)
    assert simulate(chain, costs, roads).makespan_ns == 1100
    assert simulate(chain, costs, roads, slowdown={"a": 3.0}).makespan_ns == 1300
    assert simulate(chain, costs, roads, slowdown={"b": 1.5}).makespan_ns == 1600


# --- steps ----------------------------------------------------------------------------------------------------------------


def test_steps_follow_each_other_for_each_worker_by_itself():
    """a runs ahead: it does not wait for b, who needs three times as long."""
    chain = program(a=[forward(0), send(0, "b", 0)], b=[receive(0, "a", 0), backward(0)])
    found = simulate(chain, fixed(Forward=100, Backward=300), wire(("a", "b"), 1), steps=3)
    assert [spans(found, "a", step)[0] for step in range(3)] == [(0, 100), (100, 200), (200, 300)]
    assert [spans(found, "b", step)[1] for step in range(3)] == [(100, 400), (400, 700), (700, 1000)]
    assert (found.makespan_ns, found.step_ns, found.instructions) == (1000, 300, 12)


def test_thousands_of_steps_need_no_deep_stack():
    found = simulate(program(a=[forward(0)]), fixed(Forward=2), wire(("a",), 1), steps=5000)
    assert found.makespan_ns == 10_000


def test_a_worker_with_nothing_to_do_is_done():
    found = simulate(program(a=[forward(0)], b=[]), fixed(Forward=2), wire(("a", "b"), 1), steps=2)
    assert found.makespan_ns == 4
    assert found.peaks["b"].total_bytes == 0


# --- what is refused ------------------------------------------------------------------------------------------------------

AB = ("a", "b")


@pytest.mark.parametrize(("workers", "said"), [
    ({"a": [send(0, "b", 1)], "b": []}, r"0SEND_F|SEND saved\[0.0\].* of a has no counterpart.*1 messages.*receives 0"),
    ({"a": [], "b": [receive(0, "a", 1)]}, "of b receives from a, which sends it nothing"),
    ({"a": [send(0, "b", 1)], "b": [receive(0, "a", 2)]}, "of b meets .* of a.* of 1 bytes; it expects .* of 2"),
    ({"a": [send(0, "b", 1)], "b": [receive(1, "a", 1)]}, "of b meets"),
    ({"a": [send(0, "a", 1)], "b": []}, "of a sends to itself"),
    ({"a": [send(0, "c", 1)], "b": []}, "of a sends to c, which has no program"),
    ({"a": [ring(1, AB)], "b": []}, "of a waits for b forever"),
    ({"a": [ring(1, AB)], "b": [ring(1, AB), ring(1, AB)]}, "instruction 1 .* of b waits for a forever.*2 times, a 1 times"),
    ({"a": [ring(1, AB)], "b": [ring(2, AB)]}, "of b does all_reduce of 2 bytes where .* of 1"),
    ({"a": [ring(1, ("a", "c"))], "b": []}, "has c in its group, which has no program"),
    ({"a": [ring(1, ("a", "a", "b"))], "b": [ring(1, ("a", "a", "b"))]}, "has a in its group 2 times"),
    ({"a": [ring(1, ("b",))], "b": [ring(1, ("b",))]}, "runs on a, which is not in its group b"),
    ({"a": [ring(1, AB, "gossip")], "b": [ring(1, AB, "gossip")]}, "'gossip'; known: all_reduce"),
    ({"a": [receive(0, "b", 1), send(1, "b", 1)], "b": [receive(1, "a", 1), send(0, "a", 1)]}, None),
    ({"z": [forward(0)]}, "worker 'z' is not in the cluster"),
])
def test_malformed_programs_are_refused(workers, said):
    if said is None:  # out-lanes do not wait for in-lanes: this one runs
        assert simulate(program(**workers), PaperCosts(), wire(AB, 1)).makespan_ns > 0
        return
    with pytest.raises(ProgramError, match=said):
        simulate(program(**workers), PaperCosts(), wire(AB, 1))


def test_a_circle_of_messages_is_refused_and_named():
    """Each sends on what it has yet to receive."""
    circle = program(a=[receive(0, "b", 1), send(0, "b", 1)], b=[receive(0, "a", 1), send(0, "a", 1)])
    with pytest.raises(ProgramError, match=r"waits for itself: .* of a, which waits for .* of b.* of a"):
        simulate(circle, PaperCosts(), wire(AB, 1))


def test_collectives_in_opposite_order_are_refused_not_hung():
    one, other = ring(1, AB), ring(1, ("b", "a"))
    with pytest.raises(ProgramError, match="waits for itself"):
        simulate(program(a=[one, other], b=[other, one]), PaperCosts(), wire(AB, 1))


@pytest.mark.parametrize(("arguments", "said"), [
    ({"steps": 0}, "0 steps"),
    ({"slowdown": {"c": 2.0}}, "no worker 'c'"),
    ({"slowdown": {"a": 0.0}}, "slowdown of a: found 0"),
])
def test_impossible_wishes_are_refused(arguments, said):
    with pytest.raises(ProgramError, match=said):
        simulate(program(a=[forward(0)]), PaperCosts(), wire(("a",), 1), **arguments)


def test_one_worker_twice_and_a_dead_segment_are_refused():
    part = program(a=[forward(0)]).workers[0]
    with pytest.raises(ProgramError, match="'a' appears 2 times"):
        simulate(Program(kind="train", microbatch_samples=1, workers=(part, part)), PaperCosts(), wire(("a",), 1))
    with pytest.raises(ProgramError, match="'wire': found 0 bytes/s"):
        simulate(program(a=[forward(0)]), PaperCosts(), wire(("a",), 0))
    with pytest.raises(ProgramError, match=r"0F0.*of a: the cost model says -1 ns"):
        simulate(program(a=[forward(0)]), fixed(Forward=-1), wire(("a",), 1))


# --- laws for any program -------------------------------------------------------------------------------------------------

NAMES = ("a", "b", "c")


def random_case(seed: int) -> tuple[Program, PaperCosts, PaperRoads]:
    dice = random.Random(seed)
    made = random_program(seed, NAMES, dice.randrange(1, 60))
    factor = dice.choice((0, 1, 1000, 10**6))
    costs = PaperCosts(duration=lambda worker, instruction: factor * (len(notation(instruction)) % 5),
                       size=lambda worker, buffer: {"saved": 100, "input": 3}.get(str(buffer[0]), 0), resident=1000)
    roads = dice.choice((star(NAMES, 10**7, 1000, 10), wire(NAMES, 10**6, 5), star(NAMES, 10**9, rates={"b": 10**5})))
    return made, costs, roads


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6))
def test_time_is_at_least_compute_and_at_least_communication(seed):
    made, costs, roads = random_case(seed)
    found = simulate(made, costs, roads)
    for part in made.workers:
        lanes: dict[str, int] = {}
        for instruction in part.instructions:
            if not isinstance(instruction, Send | Receive | Native):
                lanes[instruction.lane] = lanes.get(instruction.lane, 0) + costs.duration_ns(part.worker, instruction)
        assert all(taken <= found.makespan_ns for taken in lanes.values())
    rounded = sum(isinstance(one, Native) for part in made.workers for one in part.instructions)  # a byte up for each edge
    for segment, size_bytes in found.step_segment_bytes.items():
        assert (size_bytes - rounded) * SECOND <= found.makespan_ns * roads.capacity[segment]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_every_rule_of_time_holds(seed, steps):
    """Order on each lane, dependencies, arrival after sending, steps in order; checked on the trace, not on the loop."""
    made, costs, roads = random_case(seed)
    found = simulate(made, costs, roads, steps=steps)
    times = {(span.worker, span.step, span.instruction): (span.start_ns, span.end_ns) for span in found.trace().spans}
    assert len(times) == steps * sum(len(part.instructions) for part in made.workers)
    for step in range(steps):
        sent: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for part in made.workers:
            began = max((times[part.worker, step - 1, i][1] for i in range(len(part.instructions))), default=0) if step else 0
            for index, earlier in enumerate(dependencies(part.instructions)):
                start, end = times[part.worker, step, index]
                assert began <= start <= end
                assert all(times[part.worker, step, one][1] <= start for one in earlier)
                instruction = part.instructions[index]
                if isinstance(instruction, Send):
                    sent.setdefault((part.worker, instruction.peer), []).append((start, end))
                elif not isinstance(instruction, Receive | Native):
                    assert end - start == costs.duration_ns(part.worker, instruction)
        for part in made.workers:
            for index, instruction in enumerate(part.instructions):
                if isinstance(instruction, Receive):
                    began, gone = sent[instruction.peer, part.worker].pop(0)
                    path = roads.path(instruction.peer, part.worker)
                    start, end = times[part.worker, step, index]
                    assert start >= began
                    assert end == max(start, gone + path.latency_ns + path.message_ns)
        assert not any(sent.values())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_bytes_are_conserved(seed):
    made, costs, roads = random_case(seed)
    found = simulate(made, costs, roads)
    out = {name: sum(size for (source, _), size in found.pair_bytes.items() if source == name) for name in NAMES}
    messages = {part.worker: sum(i.size_bytes for i in part.instructions if isinstance(i, Send)) for part in made.workers}
    rings = {part.worker: sum(-(-2 * (len(i.group) - 1) * i.size_bytes // len(i.group)) for i in part.instructions
                              if isinstance(i, Native)) for part in made.workers}
    assert out == {name: messages[name] + rings[name] for name in NAMES}
    crossed = sum(size * len(roads.path(*pair).segments) for pair, size in found.pair_bytes.items())
    assert sum(found.step_segment_bytes.values()) == crossed
    assert {name: sum(span.size_bytes for span in found.trace().spans if span.worker == name and span.lane.startswith("out:"))
            for name in NAMES} == messages


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2))
def test_memory_agrees_with_counting_at_every_instant(seed, steps):
    made, costs, roads = random_case(seed)
    found = simulate(made, costs, roads, steps=steps)
    times = {(span.worker, span.step, span.instruction): (span.start_ns, span.end_ns) for span in found.trace().spans}
    for part in made.workers:
        most = 0
        for step in range(steps):
            lives: dict[tuple[str | int, ...], list[int]] = {}
            for kind in ("writes", "reads"):
                for index, instruction in enumerate(part.instructions):
                    for buffer in getattr(instruction, kind):
                        start, end = times[part.worker, step, index]
                        if buffer in lives:
                            lives[buffer][1] = max(lives[buffer][1], end)
                        elif kind == "writes":
                            lives[buffer] = [start, end]
            sizes = {buffer: costs.buffer_bytes(part.worker, buffer) for buffer in lives if buffer[0] != "gradient"}
            for instruction in part.instructions:
                for buffer in instruction.writes:
                    if buffer[0] == "partial":
                        sizes[buffer] = instruction.size_bytes // len(getattr(instruction, "sources", "x"))
            for now in {start for start, _ in lives.values()}:
                held = sum(size for buffer, size in sizes.items() if lives[buffer][0] <= now < lives[buffer][1])
                most = max(most, held)
        peak = found.peaks[part.worker]
        assert (peak.total_bytes, peak.resident_bytes, peak.buffer_bytes) == (1000 + most, 1000, most)
        assert sum(peak.made_of.values()) == most
        assert max(held for _, held in found.memory_curves()[part.worker]) <= 1000 + most


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_the_critical_path_and_the_waits_add_up(seed, steps):
    made, costs, roads = random_case(seed)
    found = simulate(made, costs, roads, steps=steps)
    assert sum(found.critical_path.by_resource.values()) == found.step_ns
    for worker, name in enumerate(NAMES):
        ends = [timeline.ends[found.compiled.size + worker] for timeline in found.timelines]
        whole = ends[-1] - ends[-2] if steps > 1 else found.makespan_ns
        assert sum(found.idle_ns[name].values()) + found.lane_ns[name].get("compute", 0) == whole


def test_more_time_for_one_instruction_never_shortens_a_step():
    """For a fixed order on each lane and links that are not shared (list schedulers know Graham's anomaly; this is none)."""
    made = random_program(3, NAMES, 70)
    roads = PaperRoads(NAMES, {f"{a}{b}": 10**6 for a in NAMES for b in NAMES},
                       {(a, b): PaperPath((f"{a}{b}",), 100) for a in NAMES for b in NAMES})
    ends = [simulate(made, fixed(Forward=forward_ns, Reduce=500), roads).makespan_ns for forward_ns in range(0, 5000, 250)]
    assert all(one <= other for one, other in pairwise(ends))


def test_the_trace_has_the_form_of_the_runtime():
    made = random_program(1, NAMES, 40)
    trace = simulate(made, fixed(Forward=5), star(NAMES, 1000), steps=2).trace()
    assert trace.header.clock == "simulated"
    assert trace.header.program == made.digest
    assert trace.header.workers == NAMES
    for span in trace.spans:
        instruction = made.part(span.worker).instructions[span.instruction]
        assert (span.name, span.lane) == (notation(instruction), instruction.lane)
        assert span.size_bytes == getattr(instruction, "size_bytes", 0)


# --- where the time went --------------------------------------------------------------------------------------------------


def test_waits_are_told_apart():
    """b waits 100 for a to compute, 1 s for the bytes, 57 for latency and message; then computes."""
    roads = star(("a", "b"), 1000, latency_ns=50, message_ns=7)
    found = simulate(program(a=[forward(0), send(0, "b", 1000)], b=[receive(0, "a", 1000), backward(0)]),
                     fixed(Forward=100, Backward=30), roads)
    assert found.idle_ns["b"] == {"a": 100, "in:a": SECOND + 57}
    assert found.idle_ns["a"] == {"out:b": SECOND, "others": 87}
    assert found.critical_path.by_resource == {"link a>": SECOND, "compute a": 100, "latency a>": 57, "compute b": 30}
    assert found.critical_path.limit == "link a>"
    assert found.busy_share["b"]["compute"] == pytest.approx(30 / found.step_ns)


def test_both_bubbles():
    chain = program(a=[forward(0), send(0, "b", 0)], b=[receive(0, "a", 0), backward(0)])
    found = simulate(chain, fixed(Forward=100, Backward=300), wire(("a", "b"), 1))
    assert (found.bubbles["b"].makespan_bubble_ns, found.bubbles["b"].span_bubble_ns) == (100, 0)
    assert (found.bubbles["a"].makespan_bubble_ns, found.bubbles["a"].span_bubble_ns) == (300, 0)


# --- schedules: figures of others, to the last digit ----------------------------------------------------------------------

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[dict[str, str]]:
    with open(DATA / name, newline="") as file:
        return list(csv.DictReader(file))


def shape(row: dict[str, str]) -> tuple[int, int, int]:
    return int(row["p"]), int(row["m"]), int(row["v"])


def bare(schedule: Schedule, row: dict[str, str]) -> Program:
    p, m, v = shape(row)
    return bare_program(schedule.placement(p, v), schedule.order(p, m, v))


def run_schedule(made: Program, row: dict[str, str], unit: int) -> Simulation:
    """No communication; one time unit of the table is ``unit`` ns, and a saved activation weighs 1."""
    kinds = {kind: Fraction(row[field]) * unit for kind, field in
             (("Forward", "tF"), ("BackwardInput", "tB"), ("BackwardWeight", "tW"))}
    kinds["Backward"] = kinds["BackwardInput"] + kinds["BackwardWeight"]
    assert all(time.denominator == 1 for time in kinds.values())
    costs = PaperCosts(duration=lambda worker, instruction: int(kinds[type(instruction).__name__]),
                       size=lambda worker, buffer: int(buffer[0] == "saved"))
    roads = PaperRoads(tuple(part.worker for part in made.workers), local_bytes_per_s=1)
    return simulate(made, costs, roads)


def busy_units(simulation: Simulation, unit: int) -> set[Fraction]:
    return {Fraction(bubble.busy_ns, unit) for bubble in simulation.bubbles.values()}


LARGE = 2048
"""Rows with as many chunks of work (p m v) or more are tried in test_simulator_large.py: they take seconds each."""


def exact_rows(name: str, *, large: bool) -> list[dict[str, str]]:
    own = [row for row in rows("schedule_exact.csv") if row["schedule"] == name]
    return sorted((row for row in own if (prod(shape(row)) >= LARGE) == large), key=shape)


@pytest.mark.parametrize("name", sorted({row["schedule"] for row in rows("schedule_exact.csv")}))
def test_exact_schedules(name):
    found = exact_rows(name, large=False)
    check_exact(name, found)
    assert found


def check_exact(name: str, found: list[dict[str, str]]) -> None:
    """Times are those of a full stage, so a chunk of one of v takes a v-th. The table's floats carry the rounding of sums;
    what they stand for are multiples of 1/(2v), and these must be met exactly."""
    schedule = find(name)
    made, last = None, None
    for row in found:
        v = int(row["v"])
        if made is None or shape(row) != last:
            made, last = bare(schedule, row), shape(row)

        def exact(field: str, row: dict[str, str] = row, v: int = v) -> Fraction:
            return Fraction(row[field]).limit_denominator(2 * v)

        half_unit = 1000
        simulation = run_schedule(made, row, 2 * half_unit)
        stage = 2 * half_unit * v  # ns of one unit of a full stage
        makespan = Fraction(simulation.makespan_ns, stage)
        assert makespan == exact("closed_form") == exact("makespan"), row
        assert busy_units(simulation, stage) == {exact("ideal")}, row
        bubbles = {Fraction(bubble.makespan_bubble_ns, stage) for bubble in simulation.bubbles.values()}
        assert bubbles == {exact("bubble_time")}, row
        assert round(float(1 - exact("ideal") / makespan), 9) == float(row["bubble_fraction"]), row
        worst = Fraction(max(peak.buffer_bytes for peak in simulation.peaks.values()), v)
        assert worst == exact("peak_closed_form") == exact("peak_inflight_worst_device"), row


GOLDEN = {"1f1b": lambda row: find("1f1b"), "zb1p-heuristic": lambda row: find("zb-h1"),
          "zbv": lambda row: ZbV(forward=int(row["tF"]), backward_input=int(row["tB"]), backward_weight=int(row["tW"]))}


@pytest.mark.parametrize("row", [row for row in rows("schedule_golden.csv") if row["schedule"] in GOLDEN],
                         ids=lambda row: "-".join(row[field] for field in ("schedule", "p", "m", "tF", "tB", "tW")))
def test_golden_schedules(row):
    unit = 1000
    simulation = run_schedule(bare(GOLDEN[row["schedule"]](row), row), row, unit)
    assert simulation.makespan_ns == Fraction(row["makespan"]) * unit
    assert busy_units(simulation, unit) == {Fraction(row["busy_per_device"])}
    bubbles = simulation.bubbles.values()
    assert {bubble.makespan_bubble_ns for bubble in bubbles} == {Fraction(row["bubble_makespan"]) * unit}
    assert max(bubble.span_ns for bubble in bubbles) == Fraction(row["longest_device_span"]) * unit
    assert max(bubble.span_bubble_ns for bubble in bubbles) == Fraction(row["bubble_longest_span"]) * unit
    assert [peak.buffer_bytes for peak in simulation.peaks.values()] == [int(n) for n in row["peak_chunks_per_device"].split()]
