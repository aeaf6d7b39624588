"""What instructions cost and buffers weigh under a plan, worked out by hand; and a plan's summary from end to end."""

from __future__ import annotations

import json

import msgspec
import pytest

from atoll.cluster.calibration import Calibration, OperatorTimes, Profile, merged
from atoll.cluster.cluster import Cluster, Device, Emulation, Island, Link, Machine
from atoll.cluster.network import Network
from atoll.errors import PlanError
from atoll.graph.graph import Graph, GraphIndex, Operator, ParameterSpec, TensorSpec
from atoll.plan.job import PRECISIONS
from atoll.plan.lower import lower
from atoll.plan.plan import Plan, ReplicaPlan, StagePlacement
from atoll.program.instructions import Backward, BackwardInput, BackwardWeight, Forward, Recompute, Reduce, Save, Update
from atoll.records import to_json, to_plain
from atoll.simulator.costs import DISK_BYTES_PER_S, PlanCosts
from atoll.simulator.simulate import simulate
from atoll.simulator.summary import IDLE_SHARE, Summary, summarise
from atoll.units import Bandwidth, Bytes, Duration, FlopRate

pytestmark = pytest.mark.null

WIDTH, LENGTH, VOCABULARY = 8, 4, 32
GFLOPS, GBYTES, LAUNCH = 100, 1, 1000  # of the device: GFLOP/s, GB/s, ns


def graph() -> Graph:
    """embed -> two blocks -> head, tied to the embedding."""
    def hidden(name: str) -> TensorSpec:
        return TensorSpec(name=name, shape=(1, LENGTH, WIDTH), dtype="float32")

    size = hidden("x").size_bytes(1)
    weights = [ParameterSpec(name="w", shape=(VOCABULARY, WIDTH), dtype="float32", aliases=("head.w",)),
               *(ParameterSpec(name=f"b{i}", shape=(WIDTH, WIDTH), dtype="float32") for i in range(2))]
    operators = [Operator(name="embed", kind="embedding", inputs=("tokens",), outputs=(hidden("x0"),), parameters=("w",),
                          written_bytes=size)]
    operators += [Operator(name=f"block{i}", kind="linear", inputs=(f"x{i}",), outputs=(hidden(f"x{i + 1}"),),
                           parameters=(f"b{i}",), forward_flops=100_000, backward_input_flops=200_000,
                           backward_weight_flops=300_000, saved_bytes=7 * size, read_bytes=size, written_bytes=size)
                  for i in range(2)]
    operators.append(Operator(
        name="head", kind="loss", inputs=("x2", "targets"), parameters=("w",), saved_bytes=1000,
        outputs=(TensorSpec(name="logits", shape=(1, LENGTH, VOCABULARY), dtype="float32"),
                 TensorSpec(name="loss", shape=(), dtype="float32", batched=False))))
    ids = tuple(TensorSpec(name=name, shape=(1, LENGTH), dtype="int64") for name in ("tokens", "targets"))
    return Graph(name="toy", inputs=ids, parameters=tuple(weights), operators=tuple(operators), loss="loss",
                 sequence_length=LENGTH)


def device(speed: float = 1.0, watts: float | None = None) -> Device:
    return Device(kind="cpu-core", speed=speed, memory=Bytes(10**6), efficiency=0.5, launch=Duration(LAUNCH), watts=watts,
                  flops={"float32": FlopRate(2 * GFLOPS * 10**9)}, memory_bandwidth=Bandwidth(GBYTES * 10**9))


def cluster(*speeds: float, emulation: Emulation | None = None) -> Cluster:
    machines = tuple(Machine(name=f"m{i}", island=f"i{i % 2}", devices=(device(speed, watts=100),))
                     for i, speed in enumerate(speeds))
    islands = {name: Island(bandwidth=Bandwidth(10**9), latency=Duration(1000)) for name in ("i0", "i1")}
    link = Link(between=("i0", "i1"), bandwidth=Bandwidth(10**6), latency=Duration(10**6))
    return Cluster(name="toy", islands=islands, machines=machines, links=(link,), emulation=emulation)


def plan(*replicas: tuple[tuple[str, str, str], ...], samples: int = 2, microbatches: int = 4, recompute: bool = False) -> Plan:
    return Plan(job="", cluster="toy", graph="toy", schedule="1f1b", chunks=1, microbatch_samples=samples, bucket_bytes=10**6,
                collective="ring", native=False, replicas=tuple(
                    ReplicaPlan(stages=tuple(StagePlacement(first=first, last=last, worker=worker, recompute=recompute)
                                             for first, last, worker in stages), microbatches=microbatches)
                    for stages in replicas))


HALVES = (("embed", "block0", "m0"), ("block1", "head", "m1"))
HIDDEN = LENGTH * WIDTH * 4
FP32 = PRECISIONS["fp32"]


def test_roofline_times():
    """Per sample the embedding moves 128 bytes at 1 GB/s; a block takes 100 kflop at 100 GFLOP/s = 1000 ns, above its 256."""
    costs = PlanCosts(graph(), plan(HALVES), cluster(1.0, 0.5), FP32)
    forward = 2 * (HIDDEN + 1000)
    assert costs.duration_ns("m0", Forward(stage=0, microbatch=0)) == forward + LAUNCH
    assert costs.duration_ns("m0", Recompute(stage=0, microbatch=3)) == forward + LAUNCH
    weight = 2 * (HIDDEN + 3000)
    assert costs.duration_ns("m0", BackwardWeight(stage=0, microbatch=0)) == weight + LAUNCH
    halfway = 2 * (HIDDEN + 2000)
    assert costs.duration_ns("m0", BackwardInput(stage=0, microbatch=0)) == halfway + LAUNCH
    assert costs.duration_ns("m0", Backward(stage=0, microbatch=0)) == halfway + weight + LAUNCH


def test_speed_stretches_work_and_launch():
    costs = PlanCosts(graph(), plan(HALVES), cluster(1.0, 0.5), FP32)
    assert costs.duration_ns("m1", Forward(stage=1, microbatch=0)) == 2 * (2 * 1000 + LAUNCH)


def test_an_emulated_device_has_its_share_of_a_core():
    whole = PlanCosts(graph(), plan(HALVES), cluster(1.0, 0.5), FP32)
    shared = PlanCosts(graph(), plan(HALVES), cluster(1.0, 0.5, emulation=Emulation(cpu_share=0.5)), FP32)
    for instruction in (Forward(stage=1, microbatch=0), Update(rule="adamw", stages=(1,), gradients=())):
        assert shared.duration_ns("m1", instruction) == 2 * whole.duration_ns("m1", instruction)


def calibration(samples: int) -> Calibration:
    times = OperatorTimes(forward_ns=500, backward_ns=900, backward_input_ns=600, backward_weight_ns=400)
    return Calibration(kind="cpu-core", speed=1.0, graph="toy", work=graph().work, precision="fp32", samples=samples,
                       launch_ns=50, operators={operator.name: times for operator in graph().operators},
                       update_ns_per_element=3.0, reduce_ns_per_byte=0.25)


def test_measured_times_go_before_the_roofline():
    costs = PlanCosts(graph(), plan(HALVES), cluster(1.0, 0.5), FP32, Profile(measured=(calibration(2),)))
    assert costs.duration_ns("m0", Forward(stage=0, microbatch=0)) == 1050
    assert costs.duration_ns("m1", Forward(stage=1, microbatch=0)) == 2100
    assert costs.duration_ns("m0", Backward(stage=0, microbatch=0)) == 1850
    assert costs.duration_ns("m0", BackwardInput(stage=0, microbatch=0)) == 1250
    assert costs.duration_ns("m0", BackwardWeight(stage=0, microbatch=0)) == 850
    elements = VOCABULARY * WIDTH + WIDTH * WIDTH
    assert costs.duration_ns("m0", Update(rule="adamw", stages=(0,), gradients=())) == 3 * elements + 50
    summed = Reduce(target=("reduced", 0, 0), sources=(("gradient", 0, 0), ("partial", 0, 0, "m1")), size_bytes=800)
    assert costs.duration_ns("m0", summed) == 250


def test_measured_times_of_another_microbatch_are_not_used():
    costs = PlanCosts(graph(), plan(HALVES), cluster(1.0, 0.5), FP32, Profile(measured=(calibration(4),)))
    plain = PlanCosts(graph(), plan(HALVES), cluster(1.0, 0.5), FP32)
    forward = Forward(stage=0, microbatch=0)
    assert costs.duration_ns("m0", forward) == plain.duration_ns("m0", forward) != 1050


def test_of_several_measured_devices_the_one_most_alike_counts():
    slow = msgspec.structs.replace(calibration(2), speed=0.5, launch_ns=90)
    other = msgspec.structs.replace(calibration(2), kind="T4", launch_ns=7)
    profile = Profile(measured=(calibration(2), slow, other))
    costs = PlanCosts(graph(), plan(HALVES), cluster(1.0, 0.5), FP32, profile)
    assert costs.duration_ns("m0", Forward(stage=0, microbatch=0)) == 1000 + 50
    assert costs.duration_ns("m1", Forward(stage=1, microbatch=0)) == 2 * (1000 + 90)
    assert profile.of("V100", 1.0, "toy", 2) is None, "nothing measured says anything about a device of another kind"


def test_devices_alike_share_the_mean_of_what_was_measured():
    late = msgspec.structs.replace(calibration(2), launch_ns=70, update_ns_per_element=4.0, operators={
        name: OperatorTimes(forward_ns=700, backward_ns=900, backward_input_ns=600, backward_weight_ns=400)
        for name in calibration(2).operators})
    (mean, alone) = merged([calibration(2), calibration(4), late]).measured
    assert alone == calibration(4)
    assert (mean.launch_ns, mean.update_ns_per_element, mean.samples) == (60, 3.5, 2)
    assert {(times.forward_ns, times.backward_ns) for times in mean.operators.values()} == {(600, 900)}


def test_work_besides_compute():
    costs = PlanCosts(graph(), plan(HALVES), cluster(1.0, 0.5), FP32)
    elements = VOCABULARY * WIDTH + WIDTH * WIDTH
    assert costs.duration_ns("m0", Update(rule="adamw", stages=(0,), gradients=())) == 7 * 4 * elements + LAUNCH
    saved = Save(worker="m0", stages=(0,), size_bytes=DISK_BYTES_PER_S)
    assert costs.duration_ns("m0", saved) == 10**9 + LAUNCH


@pytest.mark.parametrize(("precision", "weight", "gradient", "moments"),
                         [("fp32", 4, 4, 8), ("bf16", 6, 4, 8), ("fp64", 8, 8, 16)])
def test_resident_memory(precision, weight, gradient, moments):
    both = (("embed", "block1", "m0"), ("head", "head", "m1"))
    costs = PlanCosts(graph(), plan(both), cluster(1.0, 1.0), PRECISIONS[precision])
    elements = VOCABULARY * WIDTH + 2 * WIDTH * WIDTH
    found = costs.resident("m0")
    assert (found.weights_bytes, found.gradients_bytes, found.optimizer_bytes) == (
        weight * elements, gradient * elements, moments * elements)
    assert found.working_bytes == 2 * max(4, 8 if precision == "fp64" else 4) * 2 * LENGTH * WIDTH
    assert costs.resident("m1").working_bytes == 2 * max(4, 8 if precision == "fp64" else 4) * 2 * LENGTH * VOCABULARY
    assert costs.resident_bytes("m0") == found.total_bytes == sum(to_plain(found).values())


def test_a_weight_shared_by_two_stages_of_a_worker_is_held_once():
    four = (("embed", "embed", "m0"), ("block0", "block0", "m1"), ("block1", "block1", "m0"), ("head", "head", "m1"))
    ends = (("embed", "embed", "m0"), ("block0", "block1", "m1"), ("head", "head", "m0"))
    apart, together = (PlanCosts(graph(), plan(stages), cluster(1.0, 1.0), FP32) for stages in (four, ends))
    assert apart.resident("m0").gradients_bytes == 4 * (VOCABULARY * WIDTH + WIDTH * WIDTH)
    assert together.resident("m0").gradients_bytes == 4 * VOCABULARY * WIDTH


def test_buffers():
    costs = PlanCosts(graph(), plan(HALVES), cluster(1.0, 1.0), FP32)
    tokens = 2 * LENGTH * 8
    assert costs.buffer_bytes("m0", ("saved", 0, 3)) == 2 * 7 * HIDDEN
    assert costs.buffer_bytes("m1", ("saved", 1, 0)) == 2 * (7 * HIDDEN + 1000)
    assert costs.buffer_bytes("m0", ("input", 0, 0)) == costs.buffer_bytes("m0", ("kept", 0, 1)) == tokens
    assert costs.buffer_bytes("m1", ("kept", 1, 1)) == tokens + 2 * HIDDEN
    for kind in ("activation", "delta"):
        assert costs.buffer_bytes("m0", (kind, 0, 1, 2)) == costs.buffer_bytes("m1", (kind, 0, 1, 2)) == 2 * HIDDEN
    for nothing in (("deferred", 0, 0), ("vote", "m0"), ("total",), ("reduced", 0, 0), ("loss",)):
        assert costs.buffer_bytes("m0", nothing) == 0


def test_a_worker_that_does_not_exist_is_named():
    with pytest.raises(PlanError, match="'m9' is not in cluster toy; it has m0, m1"):
        PlanCosts(graph(), plan((("embed", "block0", "m9"), ("block1", "head", "m1"))), cluster(1.0, 1.0), FP32)


# --- end to end -----------------------------------------------------------------------------------------------------------


def predicted(made: Plan, machines: Cluster, steps: int = 3) -> Summary:
    network = Network(machines)
    islands = {name: worker.island for name, worker in network.workers.items()}
    program = lower(made, graph(), islands, FP32)
    costs = PlanCosts(graph(), made, machines, FP32)
    return summarise(program, simulate(program, costs, network, steps=steps), costs, network)


def test_summary_of_a_pipeline():
    found = predicted(plan(HALVES), cluster(1.0, 1.0))
    crossing = 4 * 2 * HIDDEN
    tied = 4 * VOCABULARY * WIDTH
    assert found.pairs["m0>m1"] - found.pairs["m1>m0"] in range(-100, 101)  # votes apart, both ways alike
    assert crossing + tied <= found.pairs["m0>m1"] <= crossing + tied + 100
    assert found.links["i0>i1"].size_bytes == found.links["m0>i0"].size_bytes == found.pairs["m0>m1"]
    assert found.samples == 8
    assert found.tokens == 8 * LENGTH
    assert found.tokens_per_s == pytest.approx(found.tokens * 1e9 / found.step_ns)
    assert found.limit == "latency i0>i1"
    assert sum(found.critical_ns.values()) == found.step_ns
    memory = found.workers["m0"].memory
    assert memory.activations_bytes == 2 * 2 * 7 * HIDDEN  # 1F1B: two microbatches in flight on the first rank
    assert memory.peak_bytes == (memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.working_bytes
                                 + memory.activations_bytes + memory.buffers_bytes)
    for name in ("m0", "m1"):
        worker = found.workers[name]
        assert 0 < worker.busy_share["compute"] < 1
        assert 0 < worker.span_bubble < worker.makespan_bubble < 1
        busy = worker.busy_share["compute"]
        assert worker.energy_joules == pytest.approx(100 * (busy + (1 - busy) * IDLE_SHARE) * found.step_ns / 1e9)
    assert msgspec.json.decode(to_json(found), type=Summary) == found
    assert json.loads(to_json(found))["step_ns"] == found.step_ns


def test_recompute_trades_memory_for_time():
    plain, again = (predicted(plan(HALVES, recompute=recompute), cluster(1.0, 1.0)) for recompute in (False, True))
    assert again.workers["m0"].memory.activations_bytes < plain.workers["m0"].memory.activations_bytes
    assert again.workers["m0"].busy_share["compute"] * again.step_ns > plain.workers["m0"].busy_share["compute"] * plain.step_ns


def test_replicas_exchange_their_gradients():
    made = plan((("embed", "head", "m0"),), (("embed", "head", "m1"),))
    found = predicted(made, cluster(1.0, 1.0))
    elements = GraphIndex(graph()).stage_cost(0, 4).parameter_elements
    assert 4 * elements <= found.pairs["m0>m1"] <= 4 * elements + 100  # a ring of two: each sends half, then half of the sum
    assert found.critical_ns["link i0>i1"] >= 10**9 * 2 * elements // 10**6  # at least one half, at 1 MB/s
    assert found.limit.startswith("latency")  # for this small model: two hops of the ring, two of the agreement


def test_a_slower_device_slows_the_step_and_is_the_busiest():
    even, uneven = predicted(plan(HALVES), cluster(1.0, 1.0)), predicted(plan(HALVES), cluster(1.0, 0.25))
    assert uneven.step_ns > even.step_ns
    assert uneven.busiest_worker == "m1"


@pytest.mark.parametrize("kind", ["evaluate", "save"])
def test_programs_besides_training_are_simulated(kind):
    machines = cluster(1.0, 0.5)
    network = Network(machines)
    program = lower(plan(HALVES), graph(), {"m0": "i0", "m1": "i1"}, FP32, kind)
    costs = PlanCosts(graph(), plan(HALVES), machines, FP32)
    found = simulate(program, costs, network)
    assert found.makespan_ns > 0
    assert len(found.trace().spans) == found.instructions
    assert ("m0" in found.bubbles) == (kind == "evaluate")
    assert summarise(program, found, costs, network).kind == kind
