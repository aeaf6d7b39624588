"""The planner: partition against brute force, plans that lower, check and fit, sentences and refusals. No torch."""

from __future__ import annotations

from itertools import combinations, pairwise

import msgspec
import pytest

from atoll.cluster.cluster import Cluster, Device, Island, Link, Machine
from atoll.errors import PlanError
from atoll.graph.graph import Graph, Operator, ParameterSpec, TensorSpec
from atoll.graph.spec import ModelSpec
from atoll.plan.job import PRECISIONS, Job, Wishes
from atoll.plan.layout import Layout
from atoll.planner.advice import advise
from atoll.planner.bill import bill
from atoll.planner.explain import explain, explain_bill
from atoll.planner.partition import partition
from atoll.planner.predict import predict, program_of
from atoll.planner.search import Budget, search
from atoll.planner.times import Problem
from atoll.program.check import check
from atoll.units import Bandwidth, Bytes, Duration

MIB = 2**20


def chain(blocks: int = 8, width: int = 64, uneven: bool = False) -> Graph:
    """A residual chain: embedding, blocks, tied head and loss; amounts like a small transformer's."""
    hidden = TensorSpec(name="x0", shape=(1, 16, width), dtype="float32")
    operators = [Operator(name="embed", kind="embedding", inputs=("tokens",), outputs=(hidden,), parameters=("w",),
                          written_bytes=hidden.size_bytes(1))]
    parameters = [ParameterSpec(name="w", shape=(100, width), dtype="float32")]
    for block in range(blocks):
        flops = 2 * 16 * width * width * (1 + 3 * (block % 3 == 2) if uneven else 1)
        parameters.append(ParameterSpec(name=f"b{block}", shape=(width, width), dtype="float32"))
        operators.append(Operator(
            name=f"block.{block}", kind="linear", inputs=(f"x{block}",), parameters=(f"b{block}",),
            outputs=(TensorSpec(name=f"x{block + 1}", shape=(1, 16, width), dtype="float32"),), forward_flops=flops,
            backward_input_flops=flops, backward_weight_flops=flops, saved_bytes=hidden.size_bytes(1),
            read_bytes=2 * hidden.size_bytes(1), written_bytes=hidden.size_bytes(1)))
    operators.append(Operator(name="loss", kind="loss", inputs=(f"x{blocks}", "targets"), parameters=("w",),
                              outputs=(TensorSpec(name="loss", shape=(), dtype="float32", batched=False),),
                              forward_flops=2 * 16 * width * 100, backward_input_flops=2 * 16 * width * 100,
                              backward_weight_flops=2 * 16 * width * 100, saved_bytes=16 * 100 * 4))
    integers = tuple(TensorSpec(name=name, shape=(1, 16), dtype="int64") for name in ("tokens", "targets"))
    return Graph(name="chain", inputs=integers, parameters=tuple(parameters), operators=tuple(operators), loss="loss",
                 sequence_length=16)


def cluster(speeds: tuple[tuple[float, ...], ...] = ((1.0, 0.5), (1.0, 0.7)), memory: int = 64 * MIB,
            between: str = "50 Mbit/s") -> Cluster:
    """Islands i0, i1, ... of devices with the given speeds, every pair of islands linked."""
    islands = {f"i{n}": Island(bandwidth=Bandwidth.parse("1 Gbit/s")) for n in range(len(speeds))}
    machines = tuple(Machine(name=f"m{n}{k}", island=f"i{n}",
                             devices=(Device(kind="cpu-core", speed=speed, memory=Bytes(memory)),))
                     for n, group in enumerate(speeds) for k, speed in enumerate(group))
    links = tuple(Link(between=(a, b), bandwidth=Bandwidth.parse(between), latency=Duration.parse("5 ms"))
                  for a, b in combinations(islands, 2))
    return Cluster(islands=islands, machines=machines, links=links)


def job(**changes: object) -> Job:
    return msgspec.structs.replace(
        Job(model=ModelSpec(module="x:Y"), sequence_length=16, global_batch=16, steps=10), **changes)


def problem(graph: Graph | None = None, machines: Cluster | None = None) -> Problem:
    return Problem(graph or chain(), machines or cluster(), PRECISIONS["fp32"])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("uneven", [False, True])
def test_partition_is_as_good_as_brute_force(stages: int, uneven: bool) -> None:
    given = problem(chain(uneven=uneven))
    workers = tuple(given.network.workers)[:stages]
    found = partition(given, workers, 2, (1,) * stages, False)
    assert found is not None and found.excess_bytes == 0

    def bottleneck(cuts: tuple[int, ...]) -> float:
        worst = 0.0
        for k, (low, high) in enumerate(pairwise(cuts)):
            ranges = given.ranges(workers[k], 2)
            worst = max(worst, ranges.forward_ns[high] - ranges.forward_ns[low] + ranges.backward_ns[high]
                        - ranges.backward_ns[low])
            if k:
                worst = max(worst, given.link_ns(workers[k - 1], workers[k], given.index.cut_bytes[low] * 2)[0])
        return worst

    inner = [int(cut) for cut in given.cuts[1:-1]]
    best = min(bottleneck((0, *chosen, int(given.cuts[-1]))) for chosen in combinations(inner, stages - 1))
    assert bottleneck(found.cuts) == pytest.approx(best, rel=1e-12)
    assert found.bottleneck_ns == pytest.approx(best, rel=1e-12)


def test_partition_minds_memory() -> None:
    tight = cluster(((1.0, 1.0),), memory=480_000)
    found = partition(problem(machines=tight), ("m00", "m01"), 1, (2, 1), False)
    assert found is not None and found.excess_bytes == 0
    tighter = cluster(((1.0, 1.0),), memory=200_000)
    assert partition(problem(machines=tighter), ("m00", "m01"), 1, (2, 1), False) is None
    lacking = partition(problem(machines=tighter), ("m00", "m01"), 1, (2, 1), False, nearest=True)
    assert lacking is not None and lacking.excess_bytes > 0 and lacking.worst in ("m00", "m01")


@pytest.mark.parametrize("wishes", [Wishes(), Wishes(stages=2), Wishes(replicas=2), Wishes(replicas=4, microbatch=2),
                                    Wishes(schedule="interleaved-1f1b", chunks=2), Wishes(schedule="zb-v"),
                                    Wishes(recompute="always"), Wishes(schedule="gpipe")])
def test_the_plan_found_lowers_checks_and_fits(wishes: Wishes) -> None:
    given, wanted = problem(), job(plan=wishes)
    decision = search(given, wanted, Budget(simulated=12))
    plan = decision.prediction.plan
    check(decision.prediction.program)
    layout = Layout.of(plan, given.graph)
    assert sum(replica.microbatches for replica in plan.replicas) * plan.microbatch_samples == wanted.global_batch
    for name, peak in decision.prediction.simulation.peaks.items():
        assert peak.total_bytes <= given.memory_bytes(name)
    for kind in ("evaluate", "save"):
        check(program_of(given, plan, kind))
    assert wishes.stages in (None, len(layout.replicas[0].ranks)) and wishes.replicas in (None, len(plan.replicas))
    assert wishes.schedule in (None, plan.schedule)


def test_a_slow_link_is_avoided_and_a_fast_one_used() -> None:
    islands = {}
    for between in ("1 Mbit/s", "10 Gbit/s"):
        given = problem(chain(width=1024), cluster(((1.0,), (1.0,)), memory=2**30, between=between))
        plan = search(given, job(), Budget(simulated=12)).prediction.plan
        islands[between] = {given.network.island(stage.worker) for replica in plan.replicas for stage in replica.stages}
    assert len(islands["1 Mbit/s"]) == 1 and len(islands["10 Gbit/s"]) == 2


def test_the_faster_device_gets_more() -> None:
    given = problem(machines=cluster(((1.0, 0.25),)))
    plan = search(given, job(plan=Wishes(stages=2)), Budget(simulated=12)).prediction.plan
    layout = Layout.of(plan, given.graph)
    work = {worker: given.index.stage_cost(*layout.replicas[0].cuts[k:k + 2]).forward_flops
            for k, worker in enumerate(layout.replicas[0].workers)}
    assert work["m00"] > 2 * work["m01"]


def test_what_fits_nowhere_is_refused_with_the_nearest_change() -> None:
    given = problem(machines=cluster(memory=60_000))
    with pytest.raises(PlanError, match=r"fits no plan: nearest is .* lacks .* more memory on m"):
        search(given, job())


def test_wishes_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(PlanError, match=r"found 3, which does not divide job.global_batch"):
        search(problem(), job(plan=Wishes(microbatch=3)))


def test_sentences_bill_and_advice() -> None:
    given, wanted = problem(), job()
    decision = search(given, wanted, Budget(simulated=12))
    advice = advise(given, wanted)
    text = " ".join(explain(given, decision, advice))
    for expected in ("What limits it is", "Refused:", "Memory is fullest on", "The one change that would help most"):
        assert expected in text
    figures = bill(given, wanted, decision.prediction)
    assert figures.tokens == 10 * 16 * 16 and figures.duration_ns == 10 * decision.prediction.step_ns
    assert figures.energy_joules > 0 and "kWh" in explain_bill(figures)


def test_equal_input_gives_the_same_plan() -> None:
    first, second = (search(problem(), job(), Budget(simulated=10, seconds=1e9)).prediction.plan for _ in range(2))
    assert first == second


def test_prediction_is_read_off_the_program_that_runs() -> None:
    given = problem()
    prediction = predict(given, search(given, job(), Budget(simulated=4)).prediction.plan, steps=3)
    spans = {(span.worker, span.instruction) for span in prediction.simulation.trace().spans}
    assert spans == {(part.worker, index) for part in prediction.program.workers for index in range(len(part.instructions))}
