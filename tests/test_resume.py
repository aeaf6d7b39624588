"""Resume: a run that stops and goes on from its checkpoint is the run that never stopped, under the same plan and others."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Crew, crew, plan_of

from atoll.graph.spec import ModelSpec
from atoll.plan.job import PRECISIONS, Job
from atoll.plan.lower import lower
from atoll.policies.data.spec import DataSpec
from atoll.policies.optim.spec import OptimizerSpec
from atoll.runtime.capture.models import model_source
from atoll.runtime.capture.stage import Captured, build_stage, capture
from atoll.runtime.capture.weights import initialise
from atoll.runtime.checkpoint.shards import write_shard
from atoll.runtime.checkpoint.state import restore_worker, worker_tensors
from atoll.runtime.checkpoint.store import Facts, finish, job_facts, open_latest
from atoll.runtime.data.ledger import About, Ledger, prove
from atoll.runtime.data.packed import PackedBatches, prepare
from atoll.runtime.export import export

torch.set_num_threads(1)

SEQUENCE, BATCH, STEPS = 16, 4, 8
SPEC = OptimizerSpec(learning_rate=1e-2, warmup_steps=3)
MODELS = {
    "gpt2": ModelSpec(family="gpt2", config={"vocab_size": 257, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    "llama": ModelSpec(family="llama", config={
        "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 16}),
}


@cache
def _captured(model: str, dtype: str) -> Captured:
    return capture(MODELS[model], SEQUENCE, compute_dtype=dtype)


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> PackedBatches:
    root = tmp_path_factory.mktemp("data")
    source = random.Random(0)
    lines = [" ".join(source.choices(["one", "two", "three", "four", "five"], k=9)) for _ in range(40)]
    (root / "words.txt").write_text("\n".join(lines))
    packed = prepare(DataSpec(source=str(root / "words.txt")), SEQUENCE, root / "cache")
    return PackedBatches(packed, seed=3, global_batch=BATCH, sequence_length=SEQUENCE)


def _plans(operators: int) -> dict[str, list[tuple[list[tuple[int, str]], int]]]:
    third, half = operators // 3, operators // 2
    return {
        "alone": [([(operators, "a")], BATCH)],
        "pipeline": [([(half, "a"), (operators, "b")], BATCH)],
        "three stages": [([(third, "a"), (2 * third, "b"), (operators, "c")], BATCH)],
        "unlike replicas": [([(third, "a"), (operators, "b")], 3), ([(operators, "c")], 1)],
    }


def _crew(model: str, precision: str, plan: str, batches: PackedBatches, seed: int = 0) -> Crew:
    captured = _captured(model, PRECISIONS[precision].compute)
    graph = captured.graph
    chosen = plan_of(graph, _plans(len(graph.operators))[plan])
    workers = {placed.worker for replica in chosen.replicas for placed in replica.stages}
    program = lower(chosen, graph, dict.fromkeys(workers, "island"), PRECISIONS[precision])

    def build(ranges: dict[int, tuple[int, int]]) -> dict[int, Any]:
        shared: dict[str, torch.nn.Parameter] = {}
        stages = {index: build_stage(captured, low, high, device="cpu", shared=shared) for index, (low, high) in ranges.items()}
        initialise(shared, captured, seed)
        return stages

    return crew(program, chosen, graph, build, batches, spec=SPEC, steps=STEPS, master=PRECISIONS[precision].master,
                tokens_per_sample=SEQUENCE)


def _job(model: str, precision: str) -> Job:
    return Job(model=MODELS[model], sequence_length=SEQUENCE, global_batch=BATCH, steps=STEPS, precision=precision, seed=3,
               optimizer=SPEC)


def _save(folder: Path, step: int, team: Crew, job: Job) -> None:
    """Each name is saved by its first holder."""
    saved: set[str] = set()
    entries, updates = [], 0
    for name, world in team.worlds.items():
        own = [parameter for parameter in world.store.masters if parameter not in saved]
        saved.update(own)
        entries.append(write_shard(folder, step, name, worker_tensors(world.store, world.optimizer, own)))
        updates = world.optimizer.steps
    finish(folder, step, entries, Facts(job=job_facts(job), step=step, updates=updates, tokens=step * job.step_tokens,
                                        position=step * BATCH),
           expected=[f"{kind}/{name}" for name in saved for kind in ("parameter", "exp_avg", "exp_avg_sq")])


def _losses(team: Crew, first: int, last: int, after: Callable[[int], None] | None = None) -> list[float]:
    losses = []
    for step in range(first, last):
        result = next(iter(team.step(step).values()))
        assert result.committed
        losses.append(result.loss)
        if after is not None:
            after(step + 1)
    return losses


def _whole_run(folder: Path, model: str, precision: str, plan: str, batches: PackedBatches, stop: int) -> list[float]:
    """All steps without a stop; the checkpoint after ``stop`` steps is left in ``folder``."""
    with _crew(model, precision, plan, batches) as team:
        def after(step: int) -> None:
            if step == stop:
                _save(folder, step, team, _job(model, precision))

        return _losses(team, 0, STEPS, after)


def _resumed(folder: Path, model: str, precision: str, plan: str, batches: PackedBatches) -> list[float]:
    """A new crew with other first weights, restored from the newest checkpoint: the losses of the remaining steps."""
    checkpoint = open_latest(folder, job_facts(_job(model, precision)))
    with _crew(model, precision, plan, batches, seed=99) as team:
        for world in team.worlds.values():
            restore_worker(checkpoint, world.store, world.optimizer)
        return _losses(team, checkpoint.facts.step, STEPS)


@pytest.mark.parametrize(("model", "precision", "plan"), [
    ("gpt2", "fp64", "pipeline"), ("gpt2", "bf16", "pipeline"), ("gpt2", "fp32", "unlike replicas"),
    ("llama", "fp32", "alone")])
def test_the_same_plan_continues_to_the_bit(tmp_path: Path, batches: PackedBatches, model: str, precision: str,
                                            plan: str) -> None:
    whole = _whole_run(tmp_path, model, precision, plan, batches, stop=4)
    resumed = _resumed(tmp_path, model, precision, plan, batches)
    assert resumed == whole[4:]
    assert whole[-1] < whole[0] - 0.1  # it does learn: continuing from fresh weights could not pass


@pytest.mark.parametrize("after", ["alone", "three stages", "unlike replicas"])
@pytest.mark.parametrize("before", ["pipeline", "unlike replicas"])
def test_another_plan_continues_the_curve(tmp_path: Path, batches: PackedBatches, before: str, after: str) -> None:
    whole = _whole_run(tmp_path, "gpt2", "fp64", before, batches, stop=4)
    resumed = _resumed(tmp_path, "gpt2", "fp64", after, batches)
    assert resumed == pytest.approx(whole[4:], rel=1e-9, abs=0)


def test_what_another_plan_loads_is_bit_equal(tmp_path: Path, batches: PackedBatches) -> None:
    with _crew("gpt2", "fp32", "three stages", batches) as team:
        _losses(team, 0, 2)
        _save(tmp_path, 2, team, _job("gpt2", "fp32"))
        before = team.weights()
        moments = {name: state for world in team.worlds.values() for name, state in world.optimizer.moments().items()}
    with _crew("gpt2", "fp32", "unlike replicas", batches, seed=99) as team:
        for world in team.worlds.values():
            restore_worker(open_latest(tmp_path), world.store, world.optimizer)
            assert world.optimizer.steps == 2
            for name, state in world.optimizer.moments().items():
                assert all(torch.equal(state[kind], moments[name][kind]) for kind in ("exp_avg", "exp_avg_sq"))
        assert team.weights().keys() == before.keys()
        assert all(torch.equal(tensor, before[name]) for name, tensor in team.weights().items())


def test_without_the_moments_the_curve_would_differ(tmp_path: Path, batches: PackedBatches) -> None:
    """The equality above is not one that any restore would pass."""
    whole = _whole_run(tmp_path, "gpt2", "fp64", "alone", batches, stop=4)
    checkpoint = open_latest(tmp_path)
    with _crew("gpt2", "fp64", "alone", batches, seed=99) as team:
        world = team.worlds["a"]
        for name in world.store.masters:
            world.store.load(name, checkpoint.read(f"parameter/{name}"))
        without = _losses(team, 4, STEPS)
    assert without[0] == whole[4]
    assert without[1:] != pytest.approx(whole[5:], rel=1e-9, abs=0)


def test_a_stopped_run_uses_each_sample_once(tmp_path: Path, batches: PackedBatches) -> None:
    path = tmp_path / "ledger.jsonl"
    for first, last in ((0, 7), (4, 60)):  # stopped after 7 steps, resumed from the checkpoint of step 4
        with Ledger(path, About(seed=3, global_batch=BATCH, sequences=batches.sequences("train")), next_step=first) as ledger:
            for step in range(first, last):
                ledger.record(step, step * BATCH, batches.ids("train", step, 0, BATCH))
    proof = prove(path)
    assert proof.steps == 60 and proof.rewound == 3 and proof.epochs >= 1


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_trained_model_is_exported_with_its_logits(tmp_path: Path, batches: PackedBatches, model: str) -> None:
    import transformers

    with _crew(model, "fp32", "pipeline", batches) as team:
        _losses(team, 0, 3)
        _save(tmp_path / "run" / "checkpoints", 3, team, _job(model, "fp32"))
        weights = team.weights()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export(tmp_path / "run", tmp_path / "out"))
    source = model_source(MODELS[model], SEQUENCE)
    module = source.build()
    loaded = module.load_state_dict({source.prefix + name: tensor for name, tensor in weights.items()}, strict=False)
    assert not loaded.unexpected_keys
    data = batches.microbatch("validation", 0, 0, 2)
    with torch.no_grad():
        ours = module.model(data["tokens"], use_cache=False).logits
        assert torch.allclose(theirs(data["tokens"]).logits, ours, atol=1e-5, rtol=0)
        assert abs(ours.std()) > 1e-2
