"""The lane engine: order, freeing, stopping, failing, and the laws of one worker (equal to plain PyTorch)."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter

import msgspec
import pytest
import torch
from tiny import SEQUENCE, Crew, Toy, ToyBatches, ToyStage, crew, plan_of
from torch.nn import functional as F

from atoll.errors import ClusterError, InstructionError, ProgramError, WorkerLostError
from atoll.plan.job import PRECISIONS
from atoll.plan.layout import evaluation_plan
from atoll.plan.lower import lower
from atoll.policies.optim.spec import OptimizerSpec, learning_rate
from atoll.program.check import check
from atoll.program.dependencies import dependencies
from atoll.program.instructions import INSTRUCTIONS, Native, Receive, Reduce, Send
from atoll.program.program import Program
from atoll.runtime.clock import Clock
from atoll.runtime.engine import Engine
from atoll.runtime.kernels.table import KERNELS
from atoll.runtime.pace import EmulatedPace
from atoll.runtime.state import sum_of_squares
from atoll.runtime.transport.local import LocalHub
from atoll.runtime.world import Stop, StoppedError

torch.set_num_threads(1)

ALONE = [([(7, "a")], 4)]
PIPELINE = [([(3, "a"), (7, "b")], 4)]
TWO_REPLICAS = [([(3, "a"), (7, "b")], 3), ([(7, "c")], 1)]


def make(toy: Toy, replicas: list, *, precision: str = "fp64", spec: OptimizerSpec | None = None, islands: dict | None = None,
         build: object = None, **plan: object) -> Crew:
    graph = toy.graph()
    chosen = plan_of(graph, replicas, **plan)  # type: ignore[arg-type]
    workers = [worker for stages, _ in replicas for _, worker in stages]
    program = lower(chosen, graph, islands or dict.fromkeys(workers, "x"), PRECISIONS[precision])
    return crew(program, chosen, graph, build or toy.stages, ToyBatches(), spec=spec, master=PRECISIONS[precision].master)


@pytest.fixture(autouse=True, params=["threads", "prompt"])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of messages with a thread each, and done by whoever needs the message."""
    monkeypatch.setattr(LocalHub, "prompt", request.param == "prompt")


def test_every_instruction_has_a_kernel() -> None:
    assert set(KERNELS) == set(INSTRUCTIONS)


# -- one worker is plain PyTorch ---------------------------------------------------------------------------------------


def plain_loop(toy: Toy, steps: int, microbatches: int, spec: OptimizerSpec) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What somebody would write without Atoll: a module, AdamW, gradient accumulation, clipping, warm-up and cosine."""
    stage = toy.stages({0: (0, toy.blocks + 3)})[0]
    leaves = stage.parameters
    optimizer = torch.optim.AdamW([{"params": [p for p in leaves.values() if p.ndim >= 2], "weight_decay": spec.weight_decay},
                                   {"params": [p for p in leaves.values() if p.ndim < 2], "weight_decay": 0.0}],
                                  betas=spec.betas, eps=spec.epsilon, fused=True)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spec, step, 50)
        optimizer.zero_grad()
        total = 0.0
        for microbatch in range(microbatches):
            loss = stage(ToyBatches().microbatch("train", step, microbatch, 1))["loss"]
            (loss / (microbatches * SEQUENCE)).backward()
            total += loss.item()
        if spec.clip_norm:
            torch.nn.utils.clip_grad_norm_(leaves.values(), spec.clip_norm)
        optimizer.step()
        losses.append(total)
    return losses, {name: leaf.detach() for name, leaf in leaves.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("tied", [False, True])
def test_one_worker_equals_plain_pytorch_to_the_bit(dtype: str, tied: bool) -> None:
    toy, spec = Toy(dtype=dtype, tied=tied), OptimizerSpec(learning_rate=3e-2, warmup_steps=3, clip_norm=0.0)
    losses, weights = plain_loop(toy, 20, 4, spec)
    with make(toy, ALONE, precision={"float32": "fp32", "float64": "fp64"}[dtype], spec=spec) as workers:
        found = [workers.step(step)["a"].loss_sum for step in range(20)]
        assert found == losses
        for name, value in workers.weights().items():
            assert torch.equal(value, weights[name]), name


def test_clipping_follows_clip_grad_norm() -> None:
    toy, spec = Toy(), OptimizerSpec(learning_rate=3e-2, warmup_steps=3, clip_norm=0.05)
    losses, _ = plain_loop(toy, 20, 4, spec)
    unclipped, _ = plain_loop(toy, 20, 4, msgspec.structs.replace(spec, clip_norm=0.0))
    with make(toy, ALONE, spec=spec) as workers:
        found = [workers.step(step)["a"] for step in range(20)]
    assert all(result.gradient_norm > spec.clip_norm for result in found)
    # clip_grad_norm_ divides by norm + 1e-6, Atoll by the norm.
    assert [result.loss_sum for result in found] == pytest.approx(losses, rel=1e-5)
    assert losses != pytest.approx(unclipped, rel=1e-3)


def test_bf16_keeps_fp32_masters_and_gradients() -> None:
    """Equal to the bit to bf16 weights, gradients added up in fp32 after each backward, AdamW on fp32 masters."""
    toy, spec = Toy(dtype="bfloat16"), OptimizerSpec(learning_rate=1e-2, warmup_steps=3, clip_norm=0.0)
    stage = toy.stages({0: (0, 7)})[0]
    masters = {name: torch.nn.Parameter(leaf.detach().float()) for name, leaf in stage.parameters.items()}
    optimizer = torch.optim.AdamW([{"params": [p for p in masters.values() if p.ndim >= 2], "weight_decay": spec.weight_decay},
                                   {"params": [p for p in masters.values() if p.ndim < 2], "weight_decay": 0.0}],
                                  betas=spec.betas, eps=spec.epsilon, fused=True)
    with make(toy, ALONE, precision="bf16", spec=spec) as workers:
        for step in range(8):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(spec, step, 50)
            for master in masters.values():
                master.grad = torch.zeros_like(master)
            for microbatch in range(4):
                loss = stage(ToyBatches().microbatch("train", step, microbatch, 1))["loss"]
                (loss / (4 * SEQUENCE)).backward()
                for name, leaf in stage.parameters.items():
                    masters[name].grad += leaf.grad
                    leaf.grad = None
            optimizer.step()
            for name, leaf in stage.parameters.items():
                leaf.data.copy_(masters[name])
            workers.step(step)
        store = workers.worlds["a"].store
        for name, master in masters.items():
            assert store.masters[name].dtype == torch.float32 and store.parameters[name].dtype == torch.bfloat16
            assert torch.equal(store.masters[name], master), name
            assert torch.equal(store.parameters[name], master.bfloat16()), name


def test_sum_of_squares_is_accurate_and_sees_what_is_not_finite() -> None:
    for elements in (0, 1, 4095, 4096, 100_003):
        vector = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
        assert float(sum_of_squares(vector)) == pytest.approx(float(vector.double().square().sum()), rel=1e-6)
    assert math.isnan(float(sum_of_squares(torch.tensor([1.0, math.nan]).repeat(9000))))
    assert math.isinf(float(sum_of_squares(torch.tensor([1.0, -math.inf]).repeat(9000))))


# -- what a step leaves behind -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [False, True])
def test_spans_are_the_program_and_keep_its_order(native: bool) -> None:
    with make(Toy(skip=True), TWO_REPLICAS, native=native, bucket_bytes=512, recompute=True) as workers:
        results = workers.step(0)
        for name, world in workers.worlds.items():
            instructions, spans = world.program.part(name).instructions, results[name].spans
            assert [span.instruction for span in spans] == list(range(len(instructions)))
            assert [span.lane for span in spans] == [instruction.lane for instruction in instructions]
            assert [span.size_bytes for span in spans] == [getattr(i, "size_bytes", 0) for i in instructions]
            for index, needed in enumerate(dependencies(instructions)):
                assert all(spans[index].start_ns >= spans[earlier].end_ns for earlier in needed)
        sent: Counter[tuple[str, str]] = Counter()
        for part in workers.worlds["a"].program.workers:
            for send in (item for item in part.instructions if isinstance(item, Send)):
                sent[part.worker, send.peer] += send.size_bytes
        assert workers.hub.sent_bytes == sent


def test_no_buffer_outlives_its_last_reader() -> None:
    with make(Toy(skip=True), TWO_REPLICAS, bucket_bytes=512, recompute=True) as workers:
        workers.step(0)
        for engine in workers.engines.values():
            assert engine._step is not None and engine._step.state.values == {}


def test_recomputing_changes_no_bit() -> None:
    with make(Toy(skip=True), PIPELINE) as kept, make(Toy(skip=True), PIPELINE, recompute=True) as recomputed:
        for step in range(4):
            assert kept.step(step)["a"].loss_sum == recomputed.step(step)["a"].loss_sum
        assert all(torch.equal(value, recomputed.weights()[name]) for name, value in kept.weights().items())


def test_all_workers_learn_the_same_sums() -> None:
    spec = OptimizerSpec(clip_norm=0.0)
    with make(Toy(), TWO_REPLICAS, islands={"a": "x", "b": "y", "c": "y"}, spec=spec) as workers:
        results = list(workers.step(0).values())
        assert all((r.loss_sum, r.tokens, r.gradient_norm) == (results[0].loss_sum, 4 * SEQUENCE, results[0].gradient_norm)
                   for r in results)
        squares = sum(float(g.square().sum()) for g in workers.gradients().values())
        assert results[0].gradient_norm == pytest.approx(math.sqrt(squares), rel=1e-12)


def test_evaluation_changes_nothing_and_equals_a_forward() -> None:
    toy = Toy(skip=True)
    graph = toy.graph()
    plan = plan_of(graph, TWO_REPLICAS)
    program = lower(evaluation_plan(plan, 6), graph, dict.fromkeys("abc", "x"), PRECISIONS["fp64"], kind="evaluate")
    with make(toy, TWO_REPLICAS) as workers:
        before = workers.weights()
        results = workers.step(5, "validation", program)
        assert all(torch.equal(value, before[name]) for name, value in workers.weights().items())
    stage = toy.stages({0: (0, 7)})[0]
    expected = sum(stage(ToyBatches().microbatch("validation", 5, sample, 1))["loss"].item() for sample in range(6))
    for result in results.values():
        assert result.tokens == 6 * SEQUENCE
        assert result.loss_sum == pytest.approx(expected, rel=1e-12)


def test_optimizer_state_moves_to_another_worker() -> None:
    with make(Toy(), ALONE) as straight, make(Toy(seed=1), ALONE) as other:
        for step in range(3):
            straight.step(step)
        source, target = straight.worlds["a"], other.worlds["a"]
        for name, master in source.store.masters.items():
            target.store.load(name, master)
        target.optimizer.load(source.optimizer.moments(), source.optimizer.steps)
        for step in range(3, 6):
            assert straight.step(step)["a"].loss_sum == other.step(step)["a"].loss_sum
        with pytest.raises(ProgramError, match=r"exp_avg of .*found nothing"):
            target.optimizer.load({}, 3)


# -- sums that may not be written over what is still sent ---------------------------------------------------------------


def exchanged(program: Program) -> Program:
    """Instead of a library's all-reduce, two holders swap whole gradients and each sums by itself."""
    parts = []
    for part in program.workers:
        instructions: list = []
        for item in part.instructions:
            if not isinstance(item, Native):
                instructions.append(item)
                continue
            (peer,) = [member for member in item.group if member != part.worker]
            arrived = ("incoming", *item.source[1:])
            pair = (item.source, arrived) if part.worker < peer else (arrived, item.source)
            instructions += [Send(buffer=item.source, peer=peer, size_bytes=item.size_bytes),
                             Receive(buffer=arrived, peer=peer, size_bytes=item.size_bytes),
                             Reduce(target=item.target, sources=pair, size_bytes=2 * item.size_bytes)]
        parts.append(msgspec.structs.replace(part, instructions=tuple(instructions)))
    return msgspec.structs.replace(program, workers=tuple(parts))


def test_a_gradient_that_is_also_sent_is_not_summed_over() -> None:
    toy, replicas = Toy(), [([(7, "a")], 2), ([(7, "b")], 2)]
    graph = toy.graph()
    plan = plan_of(graph, replicas, native=True)
    program = lower(plan, graph, dict.fromkeys("ab", "x"), PRECISIONS["fp64"])

    def renamed(label: str) -> str:
        return label.replace("gradient", "incoming")

    swapped = exchanged(program)
    (summing,) = [k for k, item in enumerate(swapped.part("a").instructions)
                  if isinstance(item, Reduce) and item.target[0] == "reduced"]
    with crew(swapped, plan, graph, toy.stages, ToyBatches()) as swapping, make(toy, ALONE) as alone:
        def slow(send: object) -> object:
            """a's link takes the gradient only after a has summed."""
            def late(peer: str, label: str, tensors: list) -> int:
                while "gradient" in label and peer == "b" and not swapping.engines["a"]._step.spans[summing]:  # type: ignore[union-attr]
                    time.sleep(0.001)
                return send(peer, renamed(label), tensors)  # type: ignore[operator]
            return late

        for world in swapping.worlds.values():
            world.channel.send = slow(world.channel.send)  # type: ignore[method-assign]
        for step in range(3):
            expected = alone.step(step)["a"]
            for result in swapping.step(step).values():
                assert result.loss_sum == pytest.approx(expected.loss_sum, rel=1e-12)
                assert result.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-12)
        for name, value in alone.gradients().items():
            assert (swapping.gradients()[name] - value).abs().max() <= 1e-12 * value.abs().max()


def test_a_message_that_nobody_reads_is_received_all_the_same() -> None:
    """The program allows it; a step that left it on the wire would hand it to the next one."""
    toy, graph = Toy(), Toy().graph()
    plan = plan_of(graph, PIPELINE)
    program = lower(plan, graph, dict.fromkeys("ab", "x"), PRECISIONS["fp64"])
    unread = ("vote", "a")
    more = {"a": Send(buffer=unread, peer="b", size_bytes=32), "b": Receive(buffer=unread, peer="a", size_bytes=32)}
    longer = msgspec.structs.replace(program, workers=tuple(
        msgspec.structs.replace(part, instructions=(*part.instructions, more[part.worker])) for part in program.workers))
    check(longer)
    with crew(longer, plan, graph, toy.stages, ToyBatches()) as workers, make(toy, PIPELINE) as plain:
        for step in range(3):
            results, expected = workers.step(step), plain.step(step)
            for part in longer.workers:
                assert len(results[part.worker].spans) == len(part.instructions)
                assert results[part.worker].loss_sum == expected[part.worker].loss_sum


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Poisoned(ToyStage):
    """Turns its first output into infinities while ``armed``."""

    armed = False

    def _apply(self, operator: object, inputs: list) -> torch.Tensor:
        result = super()._apply(operator, inputs)  # type: ignore[arg-type]
        return result * math.inf if self.armed and operator is self.operators[0] else result


def test_a_step_that_is_not_finite_changes_no_weight_anywhere() -> None:
    toy = Toy()
    with make(toy, TWO_REPLICAS) as workers:
        stage = workers.worlds["c"].stages[0]
        workers.step(0)
        before = workers.weights()
        stage.__class__ = Poisoned
        stage.armed = True  # type: ignore[attr-defined]
        results = workers.step(1)
        assert not any(result.committed for result in results.values())
        assert all(torch.equal(value, before[name]) for name, value in workers.weights().items())
        assert all(world.optimizer.steps == 1 for world in workers.worlds.values())
        stage.armed = False  # type: ignore[attr-defined]
        results = workers.step(2)
        assert all(result.committed and math.isfinite(result.loss_sum) for result in results.values())
        assert not torch.equal(workers.weights()["embed.weight"], before["embed.weight"])


def test_stop_frees_every_lane() -> None:
    with make(Toy(), TWO_REPLICAS) as workers:
        world = workers.worlds["b"]
        engine = Engine(world)
        caught: list[BaseException] = []

        def run() -> None:
            try:
                engine.run_step(0)
            except StoppedError as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while "in:a" not in engine.doing() or "compute" not in engine.doing():
            time.sleep(0.001)
        doing = engine.doing()
        workers.stop("the head says so")
        thread.join(20)
        assert not thread.is_alive()
        assert str(caught[0]) == "the head says so"
        assert set(doing) >= {"compute", "in:a"}
        assert engine.doing() == {}
        engine.close()


class Broken(ToyStage):
    def __call__(self, tensors: object) -> dict[str, torch.Tensor]:
        raise ValueError("wrong colour")


def test_a_failing_kernel_names_worker_step_and_instruction() -> None:
    with make(Toy(), PIPELINE) as workers:
        workers.worlds["b"].stages[1].__class__ = Broken
        with pytest.raises(InstructionError, match="worker b, step 4, 1F0 on lane compute: ValueError: wrong colour"):
            workers.step(4)
        assert "worker b, step 4" in workers.worlds["b"].stop.reason


def test_a_worker_that_leaves_is_named_by_its_peer() -> None:
    with make(Toy(), PIPELINE) as workers:
        workers.worlds["a"].channel.close()
        engine = Engine(workers.worlds["b"])
        with pytest.raises(WorkerLostError, match=r"worker b, step 0, .*on lane in:a: b waits for .* of a, which has left"):
            engine.run_step(0)
        engine.close()


# -- pace and transport ------------------------------------------------------------------------------------------------


def test_pace_stretches_cpu_time_from_the_start() -> None:
    class Told(Clock):
        until: int | None = None

        def sleep_until(self, deadline_ns: int, stop: Stop) -> None:
            self.until = deadline_ns

    clock = Told()
    EmulatedPace.of(0.5, 0.5, clock, Stop(), alone=False)(1_000, 300, 0)
    assert clock.until == 1_000 + 4 * 300
    with pytest.raises(ClusterError, match="lower cpu_share"):
        EmulatedPace.of(1.0, 1.5, clock, Stop(), alone=True)


@pytest.mark.parametrize(("others", "charged"), [((0, 0), 300), ((40, 40), 340), ((40, 50, 50), 350), ((9_000, 9_000), 600)])
def test_other_threads_of_a_device_are_paid_from_its_time(others: tuple[int, ...], charged: int) -> None:
    class Told(Clock):
        until = 0
        later = iter(others)

        def sleep_until(self, deadline_ns: int, stop: Stop) -> None:
            self.until = deadline_ns

        def others_cpu(self) -> int:
            return 7 + next(self.later)

    clock = Told()
    pace = EmulatedPace.of(0.5, 0.5, clock, Stop(), alone=True)
    pace(1_000, 300, 7)
    assert clock.until == 1_000 + 4 * charged
    pace(1_000, 300, None)  # a lane beside the compute lane pays for itself
    assert clock.until == 1_000 + 4 * 300


def test_a_sleep_lasts_and_a_stop_ends_it() -> None:
    clock, stop = Clock(), Stop()
    deadline = clock.now() + 3_000_000
    clock.sleep_until(deadline, stop)
    assert clock.now() >= deadline
    stop.set("enough")
    with pytest.raises(StoppedError, match="enough"):
        clock.sleep_until(clock.now() + 3_600_000_000_000, stop)


def test_backward_runs_on_the_calling_thread() -> None:
    """What makes CPU time of the compute thread the time of the instruction."""
    seen: list[int] = []
    x = torch.ones(3, requires_grad=True)
    y = F.gelu(x * 2)
    y.register_hook(lambda gradient: seen.append(threading.get_ident()))
    thread = threading.Thread(target=lambda: (y.sum().backward(), seen.append(threading.get_ident())))
    thread.start()
    thread.join()
    assert seen[0] == seen[1] != threading.get_ident()


def test_local_channels_copy_count_and_check() -> None:
    stop = Stop()
    hub = LocalHub(["a", "b"])
    a, b = hub.channel("a", stop), hub.channel("b", stop)
    value = torch.arange(4.0)
    assert a.send("b", "one", [value, value[:1]]) == 20
    value.zero_()
    assert [t.tolist() for t in b.receive("a", "one")] == [[0, 1, 2, 3], [0]]
    assert hub.sent_bytes == {("a", "b"): 20}
    a.send("b", "two", [value])
    with pytest.raises(ProgramError, match="b expected three of a, found two"):
        b.receive("a", "three")
    with pytest.raises(ProgramError, match="no channel from 'a' to 'z'"):
        a.send("z", "one", [value])


def test_local_all_reduce_meets_again_and_again() -> None:
    hub, stop = LocalHub("abc"), Stop()
    tensors = {name: torch.full((3,), float(index + 1)) for index, name in enumerate("abc")}

    def work(name: str) -> None:
        for _ in range(20):
            hub.channel(name, stop).all_reduce("abc", tensors[name])
            tensors[name] /= 3

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(torch.equal(tensor, torch.full((3,), 2.0)) for tensor in tensors.values())
