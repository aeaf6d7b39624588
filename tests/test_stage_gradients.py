"""A chain of stages, cut anywhere, is the whole module: loss and gradients in float64 against plain PyTorch."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from atoll.graph.spec import ModelSpec
from atoll.runtime.capture import Captured, Stage, build_stage, capture, initial_value, initialise
from atoll.runtime.capture.models import model_source

torch.set_num_threads(1)

LENGTH, SAMPLES = 8, 3
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": LENGTH}
LLAMA: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                         "intermediate_size": 48, "vocab_size": 64}
MODELS = {
    "gpt2, tied": ModelSpec(family="gpt2", config=GPT2),
    "gpt2, untied": ModelSpec(family="gpt2", config={**GPT2, "tie_word_embeddings": False}),
    "llama": ModelSpec(family="llama", config=LLAMA),
    "llama, tied": ModelSpec(family="llama", config={**LLAMA, "tie_word_embeddings": True}),
    "qwen2": ModelSpec(family="qwen2", config=LLAMA),
    "qwen3": ModelSpec(family="qwen3", config={**LLAMA, "head_dim": 16}),
    "gpt_neox": ModelSpec(family="gpt_neox", config={k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}),
    "skips": ModelSpec(module="models:SkipModel", arguments={"vocabulary": 64}),
    "skips, tied": ModelSpec(module="models:SkipModel", arguments={"vocabulary": 64, "tied": True}),
    "functional": ModelSpec(module="models:FunctionalModel", arguments={"vocabulary": 64}),
    "u-net": ModelSpec(module="models:SmallUNet"),
    "two towers": ModelSpec(module="models:TwoTowers", arguments={"vocabulary": 64}),
    "nanogpt": ModelSpec(module="models:NanoGPT", arguments={"vocabulary": 64}),
}
Gradients = dict[str, torch.Tensor]


@cache
def captured(model: str) -> Captured:
    return capture(MODELS[model], LENGTH, 1, "float64")


@cache
def batch(model: str, samples: int = SAMPLES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {tensor.name: torch.randint(0, 64, (samples, *tensor.shape[1:]), generator=generator) if tensor.dtype == "int64"
            else torch.rand((samples, *tensor.shape[1:]), generator=generator, dtype=torch.float64)
            for tensor in captured(model).graph.inputs}


@cache
def plain(model: str) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradients of the user's own module, whole, in one process, with Atoll's weights."""
    source = model_source(MODELS[model], LENGTH)
    module = source.build().double()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    mine = {spec.name: parameters[source.prefix + spec.name] for spec in captured(model).graph.parameters}
    with torch.no_grad():
        for name, parameter in mine.items():
            parameter.copy_(initial_value(captured(model), name, 0))
    loss = module(**batch(model))
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in mine.items() if parameter.grad is not None}


def chain(model: str, cuts: list[int], split: bool, parts: int = 1, tie: bool = True) -> tuple[torch.Tensor, Gradients]:
    """The same through stages; ``parts``: microbatches; ``tie``: whether stages share parameters or their gradients are
    summed afterwards, as two workers would do."""
    whole, shared = captured(model), {} if tie else None
    stages = [build_stage(whole, low, high, device="cpu", split_backward=split, shared=shared)
              for low, high in itertools.pairwise(cuts)]
    for stage in stages:
        initialise(stage.parameters, whole, 0)
    total = torch.zeros((), dtype=torch.float64)
    samples = next(iter(batch(model).values())).shape[0]
    for part in torch.arange(samples).chunk(parts):
        total += one_pass(whole, stages, {name: value[part] for name, value in batch(model).items()}, split)
    gradients: Gradients = {}
    distinct = {id(parameter): (name, parameter) for stage in stages for name, parameter in stage.parameters.items()}
    for name, parameter in distinct.values():
        if parameter.grad is not None:
            gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return total, gradients


def one_pass(whole: Captured, stages: list[Stage], known: dict[str, torch.Tensor], split: bool) -> torch.Tensor:
    taken, given = [], []
    model_inputs = {tensor.name for tensor in whole.graph.inputs}
    for stage in stages:
        inputs = {name: known[name].detach().requires_grad_(known[name].is_floating_point() and name not in model_inputs)
                  for name in stage.inputs}
        outputs = stage(inputs)
        taken.append(inputs)
        given.append(outputs)
        known = {**known, **outputs}
    deltas: Gradients = {whole.graph.loss: torch.ones((), dtype=torch.float64)}
    for stage, inputs, outputs in zip(reversed(stages), reversed(taken), reversed(given), strict=True):
        floats = [name for name in outputs if outputs[name].is_floating_point()]
        deferred = stage.start_deferring() if split else []
        torch.autograd.backward([outputs[name] for name in floats], [deltas[name] for name in floats])
        for name, tensor in inputs.items():
            if tensor.grad is not None:
                deltas[name] = deltas[name] + tensor.grad if name in deltas else tensor.grad
        stage.run_deferred(deferred)
    return known[whole.graph.loss].detach()


def assert_same(found: tuple[torch.Tensor, Gradients], wanted: tuple[torch.Tensor, Gradients]) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=0)
    assert set(found[1]) == set(wanted[1])
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-12 * gradient.norm(), name


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("model", MODELS)
def test_any_cuts_give_the_gradients_of_one_process(model: str, split: bool) -> None:
    count = len(captured(model).graph.operators)
    draw = random.Random(model)
    every = list(range(count + 1))
    cuts = [[0, count], every, *([0, *sorted(draw.sample(every[1:-1], min(count - 1, draw.randint(1, 5)))), count]
                                 for _ in range(4))]
    for one in cuts:
        assert_same(chain(model, one, split), plain(model))


@pytest.mark.parametrize("model", ["gpt2, tied", "llama", "skips, tied", "u-net"])
def test_microbatches_add_up(model: str) -> None:
    count = len(captured(model).graph.operators)
    for split in (False, True):
        assert_same(chain(model, [0, count // 2, count], split, parts=SAMPLES), plain(model))


@pytest.mark.parametrize("model", ["gpt2, tied", "llama, tied", "skips, tied", "functional", "nanogpt"])
def test_a_tied_weight_held_twice_has_its_gradients_summed(model: str) -> None:
    count = len(captured(model).graph.operators)
    tied = captured(model).graph.operators[0].parameters[0]
    assert any(tied in operator.parameters for operator in captured(model).graph.operators[1:])
    for split in (False, True):
        assert_same(chain(model, [0, count // 2, count], split, tie=False), plain(model))


@pytest.mark.parametrize("model", ["gpt2, tied", "llama", "u-net", "functional"])
def test_splitting_puts_off_the_gradients_of_products_alone(model: str) -> None:
    """Before the second half, weights of products have no gradient and all others have theirs; inputs as well."""
    whole = captured(model)
    stage = build_stage(whole, 0, len(whole.graph.operators), device="cpu", split_backward=True)
    initialise(stage.parameters, whole, 0)
    deferred = stage.start_deferring()
    stage(batch(model))[whole.graph.loss].backward()
    late = {name for name, parameter in stage.parameters.items() if parameter.grad is None}
    products = {"gpt2, tied": ".attn.c_attn.weight", "llama": "_proj.weight", "u-net": "deep.weight", "functional": "weights.1"}
    assert len(deferred) >= len(late) > 0 and any(name.endswith(products[model]) for name in late)
    assert not any(name.endswith("bias") or "norm" in name or "ln_" in name for name in late)
    stage.run_deferred(deferred)
    assert not deferred
    stage.stop_deferring()
    stage(batch(model))[whole.graph.loss].backward()  # whole again: every gradient is now there twice
    _, wanted = plain(model)
    for name, parameter in stage.parameters.items():
        assert (parameter.grad - 2 * wanted[name]).norm() <= 1e-12 * wanted[name].norm()  # type: ignore[operator]


def test_a_stage_that_was_not_built_to_split_says_so() -> None:
    stage = build_stage(captured("skips"), 0, 3, device="cpu")
    with pytest.raises(Exception, match="not built to split"):
        stage.start_deferring()


def test_running_again_from_kept_inputs_is_the_same_to_the_bit() -> None:
    whole = captured("llama")
    stage = build_stage(whole, 0, 6, device="cpu")
    initialise(stage.parameters, whole, 0)
    with torch.no_grad():
        first = stage(batch("llama"))
    again = stage(batch("llama"))
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    assert all(not tensor.requires_grad for tensor in first.values()) and all(t.requires_grad for t in again.values())


def test_shared_parameters_are_one_object() -> None:
    whole, shared = captured("gpt2, tied"), dict[str, nn.Parameter]()
    first = build_stage(whole, 0, 4, device="cpu", shared=shared)
    last = build_stage(whole, len(whole.graph.operators) - 2, len(whole.graph.operators), device="cpu", shared=shared)
    assert first.parameters["transformer.wte.weight"] is last.parameters["transformer.wte.weight"]
    assert set(shared) == set(first.parameters) | set(last.parameters)


@pytest.mark.parametrize("model", ["gpt2, tied", "llama", "gpt_neox", "nanogpt", "functional", "u-net"])
def test_nothing_of_the_tracing_device_is_left_in_a_stage(model: str) -> None:
    """On another device (meta: no data, but every operation refuses tensors of two devices) a stage runs as well."""
    whole = captured(model)
    for split in (False, True):
        stage = build_stage(whole, 0, len(whole.graph.operators), device="meta", split_backward=split)
        loss = stage({name: tensor.to("meta") for name, tensor in batch(model).items()})[whole.graph.loss]
        loss.backward()
        assert loss.device.type == "meta" and all(each.grad is not None for each in stage.parameters.values())
