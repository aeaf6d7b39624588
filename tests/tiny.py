"""Tiny models, clusters and jobs, and a way to run a whole program in threads ("loop" tier).

``Toy`` is a language model small enough to write down as a graph by hand: embedding, residual blocks, head, loss; a
skip connection may lead from the embedding straight to the last block, the head may be tied to the embedding.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from atoll.graph.graph import Graph, GraphIndex, Operator, ParameterSpec, TensorSpec
from atoll.plan.layout import Layout
from atoll.plan.plan import Plan, ReplicaPlan, StagePlacement
from atoll.policies.optim.spec import OptimizerSpec
from atoll.program.program import Program
from atoll.runtime.clock import Clock
from atoll.runtime.engine import Engine
from atoll.runtime.kernels.optimizers import optimizer
from atoll.runtime.state import ParameterStore
from atoll.runtime.transport.local import LocalHub
from atoll.runtime.worker_state import StepResult, World
from atoll.runtime.world import StageModule, Stop

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
VOCABULARY, SEQUENCE = 17, 5


@dataclass(frozen=True)
class Toy:
    """Shapes of the hand-made model."""

    blocks: int = 4
    width: int = 8
    tied: bool = False
    skip: bool = False
    dtype: str = "float64"
    seed: int = 0

    def graph(self) -> Graph:
        hidden = (SEQUENCE, self.width)

        def tensor(name: str, shape: tuple[int, ...] = hidden) -> TensorSpec:
            return TensorSpec(name=name, shape=shape, dtype=self.dtype)

        def weight(name: str, *shape: int) -> ParameterSpec:
            return ParameterSpec(name=name, shape=shape, dtype=self.dtype)

        parameters = [weight("embed.weight", VOCABULARY, self.width)]
        operators = [Operator(name="embed", kind="embedding", inputs=("tokens",), outputs=(tensor("h0"),),
                              parameters=("embed.weight",))]
        for i in range(self.blocks):
            parameters += [weight(f"block{i}.up", 2 * self.width, self.width), weight(f"block{i}.bias", 2 * self.width),
                           weight(f"block{i}.down", self.width, 2 * self.width)]
            extra = ("h0",) if self.skip and i == self.blocks - 1 else ()
            operators.append(Operator(name=f"block{i}", kind="block", inputs=(f"h{i}", *extra), outputs=(tensor(f"h{i + 1}"),),
                                      parameters=(f"block{i}.up", f"block{i}.bias", f"block{i}.down"), forward_flops=100))
        if not self.tied:
            parameters.append(weight("head.weight", VOCABULARY, self.width))
        operators.append(Operator(name="head", kind="linear", inputs=(f"h{self.blocks}",),
                                  outputs=(tensor("logits", (SEQUENCE, VOCABULARY)),),
                                  parameters=("embed.weight" if self.tied else "head.weight",)))
        operators.append(Operator(name="loss", kind="loss", inputs=("logits", "targets"), outputs=(
            TensorSpec(name="loss", shape=(), dtype=self.dtype, batched=False),)))
        ids = tuple(TensorSpec(name=name, shape=(SEQUENCE,), dtype="int64") for name in ("tokens", "targets"))
        return Graph(name="toy", inputs=ids, parameters=tuple(parameters), operators=tuple(operators), loss="loss",
                     sequence_length=SEQUENCE)

    def weights(self) -> dict[str, torch.Tensor]:
        """Every parameter from a seed of its name."""
        result = {}
        for spec in self.graph().parameters:
            generator = torch.Generator().manual_seed(self.seed + sum(map(ord, spec.name)))
            value = torch.randn(spec.shape, generator=generator, dtype=torch.float64) * 0.3
            result[spec.name] = value.to(DTYPES[spec.dtype])
        return result

    def stages(self, ranges: Mapping[int, tuple[int, int]]) -> dict[int, ToyStage]:
        """The stages of one worker; they share the parameters they have in common."""
        weights = self.weights()
        shared: dict[str, torch.nn.Parameter] = {}
        return {index: ToyStage(self, low, high, weights, shared) for index, (low, high) in ranges.items()}


class _Product(torch.autograd.Function):
    """x @ w.T whose weight gradient may be put off."""

    @staticmethod
    def forward(ctx, x, w, stage):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, w)
        ctx.stage = stage
        return x @ w.T

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, w = ctx.saved_tensors
        if ctx.stage.sink is None:
            return g @ w, g.flatten(0, -2).T @ x.flatten(0, -2), None
        ctx.stage.sink.append((w, x, g))
        return g @ w, None, None


class ToyStage:
    """Operators ``low``..``high`` - 1 of a ``Toy`` (the ``StageModule`` protocol)."""

    def __init__(self, toy: Toy, low: int, high: int, weights: Mapping[str, torch.Tensor],
                 shared: dict[str, torch.nn.Parameter]) -> None:
        graph = toy.graph()
        self.operators = graph.operators[low:high]
        names = [spec.name for spec in GraphIndex(graph).parameters_of(low, high)]
        for name in names:
            shared.setdefault(name, torch.nn.Parameter(weights[name].clone()))
        self.parameters = {name: shared[name] for name in names}
        made = {tensor.name for operator in self.operators for tensor in operator.outputs}
        self.inputs = tuple(dict.fromkeys(name for op in self.operators for name in op.inputs if name not in made))
        self.outputs = tuple(made)
        self.sink: list[object] | None = None

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        known = dict(tensors)
        for operator in self.operators:
            known[operator.outputs[0].name] = self._apply(operator, [known[name] for name in operator.inputs])
        return {name: known[name] for name in self.outputs}

    def _apply(self, operator: Operator, inputs: list[torch.Tensor]) -> torch.Tensor:
        weights = [self.parameters[name] for name in operator.parameters]
        if operator.kind == "embedding":
            return F.embedding(inputs[0], weights[0])
        if operator.kind == "linear":
            return _Product.apply(inputs[0], weights[0], self)
        if operator.kind == "loss":
            return F.cross_entropy(inputs[0].flatten(0, 1), inputs[1].flatten(), reduction="sum")
        up, bias, down = weights
        inner = torch.tanh(_Product.apply(inputs[0], up, self) + bias)
        return sum(inputs[1:], inputs[0] + _Product.apply(inner, down, self))

    def start_deferring(self) -> list[object]:
        self.sink = []
        return self.sink

    def stop_deferring(self) -> None:
        self.sink = None

    def run_deferred(self, deferred: list[object]) -> None:
        for weight, x, g in deferred:  # type: ignore[misc]
            weight.grad += g.flatten(0, -2).T @ x.flatten(0, -2)


class ToyBatches:
    """Random tokens from (split, step, sample) alone; the same again every ``period`` steps, so that they can be learned."""

    def __init__(self, vocabulary: int = VOCABULARY, sequence: int = SEQUENCE, seed: int = 0, period: int = 1 << 30) -> None:
        self.vocabulary, self.sequence, self.seed, self.period = vocabulary, sequence, seed, period

    def microbatch(self, split: str, step: int, first: int, samples: int) -> dict[str, torch.Tensor]:
        rows = []
        for sample in range(first, first + samples):
            generator = torch.Generator().manual_seed(self.seed + 7919 * (step % self.period) + 104729 * sample + len(split))
            rows.append(torch.randint(0, self.vocabulary, (self.sequence + 1,), generator=generator))
        block = torch.stack(rows)
        return {"tokens": block[:, :-1].contiguous(), "targets": block[:, 1:].contiguous()}


def plan_of(graph: Graph, replicas: Sequence[tuple[Sequence[tuple[int, str]], int]], *, schedule: str = "gpipe",
            chunks: int = 1, samples: int = 1, recompute: bool = False, collective: str = "ring", native: bool = False,
            bucket_bytes: int = 1 << 30) -> Plan:
    """A plan by hand. Each replica: ([(end operator index of the stage, worker), ...], microbatches)."""
    result = []
    for stages, microbatches in replicas:
        low, placed = 0, []
        for high, worker in stages:
            placed.append(StagePlacement(first=graph.operators[low].name, last=graph.operators[high - 1].name, worker=worker,
                                         recompute=recompute))
            low = high
        result.append(ReplicaPlan(stages=tuple(placed), microbatches=microbatches))
    return Plan(job="toy", cluster="loop", graph=graph.name, schedule=schedule, chunks=chunks, microbatch_samples=samples,
                replicas=tuple(result), bucket_bytes=bucket_bytes, collective=collective, native=native)


@dataclass
class Crew:
    """All workers of one program as worlds in this process, joined by a ``LocalHub``."""

    worlds: dict[str, World]
    hub: LocalHub
    engines: dict[str, Engine] = field(default_factory=dict)

    def step(self, step: int, split: str = "train", program: Program | None = None,
             timeout_s: float = 60.0) -> dict[str, StepResult]:
        """One step of everybody, each on a thread of its own. Raises the first error of any worker."""
        results: dict[str, StepResult] = {}
        errors: list[BaseException] = []

        def work(name: str) -> None:
            engine = self.engines.setdefault(name, Engine(self.worlds[name]))
            try:
                results[name] = engine.run_step(step, split, program)
            except BaseException as error:
                errors.append(error)
                self.worlds[name].channel.close()

        threads = [threading.Thread(target=work, args=(name,)) for name in self.worlds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        if any(thread.is_alive() for thread in threads):
            doing = {name: engine.doing() for name, engine in self.engines.items()}
            self.stop("the test waited too long")
            raise TimeoutError(doing)
        if errors:
            raise errors[0]
        return results

    def stop(self, reason: str) -> None:
        for world in self.worlds.values():
            world.stop.set(reason)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Every parameter's summed gradient; holders must agree to the bit."""
        found: dict[str, torch.Tensor] = {}
        for world in self.worlds.values():
            for name, view in world.store.views.items():
                assert torch.equal(found.setdefault(name, view.clone()), view), f"holders of {name} differ"
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: leaf.detach().clone() for world in self.worlds.values() for name, leaf in world.store.parameters.items()}

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def crew(program: Program, plan: Plan, graph: Graph, build: object, batches: object, *, spec: OptimizerSpec | None = None,
         steps: int = 50, master: str = "float64", tokens_per_sample: int = SEQUENCE) -> Crew:
    """Worlds for all workers of ``program``. ``build(ranges)`` returns the stage modules of {stage: (low, high)}."""
    spec = spec or OptimizerSpec(learning_rate=1e-2, warmup_steps=2)
    layout = Layout.of(plan, graph)
    clock, hub = Clock(), LocalHub([part.worker for part in program.workers])
    samples = sum(replica.microbatches for replica in plan.replicas) * plan.microbatch_samples
    worlds = {}
    for part in program.workers:
        replica, stop = layout.replica(part.worker), Stop()
        stages: Mapping[int, StageModule] = build(  # type: ignore[operator]
            {s: (replica.cuts[s], replica.cuts[s + 1]) for s in replica.stages_of(part.worker)})
        store = ParameterStore(stages, [b for b in program.buckets if b.index in part.buckets], DTYPES[master])
        worlds[part.worker] = World(
            name=part.worker, program=program, stages=stages, edges={(e.source, e.target): e for e in replica.edges},
            loss=graph.loss, store=store, optimizer=optimizer(store, spec), optimizer_spec=spec, total_steps=steps,
            step_tokens=samples * tokens_per_sample, tokens_per_sample=tokens_per_sample,
            channel=hub.channel(part.worker, stop), batches=batches, stop=stop, clock=clock)  # type: ignore[arg-type]
    return Crew(worlds, hub)
