"""The oracle of equality: whatever the plan, gradients and losses are those of one process.

The one process is plain PyTorch: the user's own module (or Hugging Face's), autograd over the whole batch at once. Atoll
runs every worker of the plan on a thread ("loop" tier), from captured stages, float64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from tiny import Crew, ToyBatches, crew, plan_of
from torch import nn

from atoll.graph.spec import ModelSpec
from atoll.plan.job import PRECISIONS
from atoll.plan.layout import Layout
from atoll.plan.lower import lower
from atoll.plan.plan import Plan
from atoll.policies.optim.spec import OptimizerSpec, learning_rate
from atoll.policies.schedules.table import SCHEDULES
from atoll.runtime.capture.models import model_source
from atoll.runtime.capture.stage import Captured, Stage, build_stage, capture
from atoll.runtime.capture.weights import initial_value, initialise

torch.set_num_threads(1)

VOCABULARY, LENGTH, BATCH = 32, 8, 4
GPT2 = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "max_position_embeddings": LENGTH}
MODELS = {
    "gpt2, tied": ModelSpec(family="gpt2", config=GPT2),
    "gpt2, untied": ModelSpec(family="gpt2", config={**GPT2, "tie_word_embeddings": False}),
    "llama, tied": ModelSpec(family="llama", config={**LLAMA, "tie_word_embeddings": True}),
    "llama, untied": ModelSpec(family="llama", config=LLAMA),
    "skips, tied": ModelSpec(module="models:SkipModel", arguments={"depth": 6, "tied": True}),
}


def data() -> ToyBatches:
    return ToyBatches(VOCABULARY, LENGTH, period=4)


@cache
def captured(model: str, dtype: str = "float64") -> Captured:
    return capture(MODELS[model], LENGTH, compute_dtype=dtype)


def plain(model: str) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The whole module with the weights that Atoll gives it, and its parameters by Atoll's names."""
    source = model_source(MODELS[model], LENGTH)
    module = source.build().double()
    everything = dict(module.named_parameters(remove_duplicate=False))
    mine = {spec.name: everything[source.prefix + spec.name] for spec in captured(model).graph.parameters}
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(initial_value(captured(model), name, 0))
    return module, mine


def stages_of(model: Captured, split: bool) -> Callable[[Mapping[int, tuple[int, int]]], dict[int, Stage]]:
    def build(ranges: Mapping[int, tuple[int, int]]) -> dict[int, Stage]:
        shared: dict[str, nn.Parameter] = {}
        stages = {index: build_stage(model, low, high, device="cpu", split_backward=split, shared=shared)
                  for index, (low, high) in ranges.items()}
        initialise(shared, model, 0)
        return stages
    return build


def even(operators: int, stages: int) -> list[int]:
    """Where each of ``stages`` stages ends."""
    return [operators * (stage + 1) // stages for stage in range(stages)]


def launch(model: Captured, plan: Plan, *, islands: Mapping[str, str] | None = None, spec: OptimizerSpec | None = None,
           precision: str = "fp64") -> Crew:
    workers = Layout.of(plan, model.graph).workers
    program = lower(plan, model.graph, islands or dict.fromkeys(workers, "x"), PRECISIONS[precision])
    return crew(program, plan, model.graph, stages_of(model, SCHEDULES[plan.schedule].splits_backward), data(), spec=spec,
                master=PRECISIONS[precision].master, tokens_per_sample=LENGTH)


@cache
def plain_gradients(model: str) -> dict[str, torch.Tensor]:
    module, parameters = plain(model)
    (module(**data().microbatch("train", 0, 0, BATCH)) / (BATCH * LENGTH)).backward()
    return {name: parameter.grad.clone() for name, parameter in parameters.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_equal_one_process(model: str, schedule: str) -> None:
    rule, whole = SCHEDULES[schedule], captured(model)
    ranks, chunks = next((ranks, chunks) for ranks, chunks in ((3, 1), (2, 2)) if rule.refuse(ranks, BATCH, chunks) is None)
    names = [f"w{rank}" for rank in rule.placement(ranks, chunks)]
    ends = even(len(whole.graph.operators), len(names))
    plan = plan_of(whole.graph, [(list(zip(ends, names, strict=True)), BATCH)], schedule=schedule, chunks=chunks)
    if "skips" in model:
        assert any(edge.target - edge.source > 1 for edge in Layout.of(plan, whole.graph).replicas[0].edges)
    with launch(whole, plan, spec=OptimizerSpec(clip_norm=0.0)) as workers:
        workers.step(0)
        found = workers.gradients()
    expected = plain_gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.linalg.vector_norm(found[name] - gradient) <= 1e-12 * torch.linalg.vector_norm(gradient), name


STEPS, SAMPLES = 50, 6
SPEC = OptimizerSpec(learning_rate=1e-2, warmup_steps=5, clip_norm=0.5)


def plain_losses(model: str) -> list[float]:
    """A training loop without Atoll."""
    module, parameters = plain(model)
    groups = [{"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": SPEC.weight_decay},
              {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=SPEC.betas, eps=SPEC.epsilon)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = module(**data().microbatch("train", step, 0, SAMPLES)) / (SAMPLES * LENGTH)
        loss.backward()
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in parameters.values()]))
        for parameter in parameters.values():
            parameter.grad *= min(1.0, SPEC.clip_norm / norm.item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(SPEC, step, STEPS)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def reference() -> list[float]:
    losses = plain_losses("gpt2, tied")
    assert losses[-1] < 0.8 * losses[0], "the comparison must cover weights that have moved"
    return losses


def chain(*stages: tuple[int, str]) -> list[tuple[int, str]]:
    return list(stages)


PLANS = {
    "one worker": ([(chain((26, "a")), 6)], {}),
    "two stages, 1f1b": ([(chain((11, "a"), (26, "b")), 6)], {"schedule": "1f1b"}),
    "four uneven stages, recomputed": ([(chain((1, "a"), (5, "b"), (22, "c"), (26, "d")), 6)], {"recompute": True}),
    "microbatches of two": ([(chain((13, "a"), (26, "b")), 3)], {"schedule": "1f1b", "samples": 2}),
    "two replicas cut differently": ([(chain((9, "a"), (26, "b")), 4), (chain((26, "c")), 2)], {"schedule": "1f1b"}),
    "three replicas on two islands": ([(chain((26, "a")), 3), (chain((4, "b"), (26, "c")), 2),
                                       (chain((8, "d"), (17, "e"), (26, "f")), 1)], {"bucket_bytes": 4096}),
    "native sums": ([(chain((12, "a"), (26, "b")), 3), (chain((12, "c"), (26, "d")), 3)],
                    {"schedule": "1f1b", "native": True, "bucket_bytes": 2048, "recompute": True}),
    "interleaved": ([(chain((6, "a"), (13, "b"), (20, "a"), (26, "b")), 6)], {"schedule": "interleaved-1f1b", "chunks": 2}),
    "breadth first": ([(chain((6, "a"), (13, "b"), (20, "a"), (26, "b")), 6)], {"schedule": "breadth-first", "chunks": 2}),
    "zero bubble": ([(chain((7, "a"), (15, "b"), (26, "c")), 6)], {"schedule": "zb-h1"}),
    "zero bubble, folded, two replicas": ([(chain((6, "a"), (13, "b"), (20, "b"), (26, "a")), 4),
                                           (chain((3, "c"), (9, "d"), (21, "d"), (26, "c")), 2)],
                                          {"schedule": "zb-v", "chunks": 2, "recompute": True}),
}
ISLANDS = {"a": "x", "b": "x", "c": "y", "d": "y", "e": "x", "f": "y"}


@pytest.mark.parametrize("name", PLANS)
def test_losses_equal_one_process_under_every_plan(name: str, reference: list[float]) -> None:
    replicas, options = PLANS[name]
    whole = captured("gpt2, tied")
    plan = plan_of(whole.graph, replicas, **options)  # type: ignore[arg-type]
    islands = None if plan.native else ISLANDS
    with launch(whole, plan, islands=islands, spec=SPEC) as workers:
        for step in range(STEPS):
            results = workers.step(step)
            for result in results.values():
                assert result.committed
                assert result.loss == pytest.approx(reference[step], rel=1e-9), step


def test_bf16_trains_in_a_pipeline_with_replicas() -> None:
    whole = captured("gpt2, untied", "bfloat16")
    plan = plan_of(whole.graph, [(chain((9, "a"), (26, "b")), 4), (chain((26, "c")), 2)], schedule="1f1b")
    with launch(whole, plan, spec=SPEC, precision="bf16") as workers:
        losses = [workers.step(step)["a"].loss for step in range(40)]
        holders: dict[str, torch.Tensor] = {}
        for world in workers.worlds.values():
            for name, master in world.store.masters.items():
                assert master.dtype == torch.float32
                assert torch.equal(holders.setdefault(name, master), master), f"replicas differ in {name}"
                assert torch.equal(world.store.parameters[name], master.bfloat16())
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
