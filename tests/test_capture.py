"""Capture: graphs from modules without weights, weights by name, refusals in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from models import NanoGPT
from torch.utils.flop_counter import FlopCounterMode

from atoll.errors import GraphError
from atoll.graph.build import build_graph
from atoll.graph.graph import GraphIndex
from atoll.graph.spec import ModelSpec
from atoll.runtime.capture import Captured, build_stage, capture, initial_value, initialise, load_weights
from atoll.runtime.capture.deferred import deferred
from atoll.runtime.capture.models import model_source

torch.set_num_threads(1)

LLAMA: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                         "intermediate_size": 112, "vocab_size": 100}
NEOX: dict[str, Any] = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
GPT2: dict[str, Any] = {"n_embd": 48, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}
ALL = {"llama": LLAMA, "qwen2": LLAMA, "qwen3": LLAMA, "gpt_neox": NEOX, "gpt2": GPT2}
TIED = {"tie_word_embeddings": True}
CASES = [
    ("gpt2", {}, "float32"), ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu", "n_inner": 80}, "float64"),
    ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, "bfloat16"),
    ("llama", {}, "bfloat16"), ("llama", {**TIED, "num_key_value_heads": 4, "head_dim": 32}, "float32"),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1, "hidden_act": "relu"}, "float64"),
    ("qwen2", {}, "float32"), ("qwen2", TIED, "bfloat16"),
    ("qwen3", {}, "float32"), ("qwen3", {**TIED, "head_dim": 16, "attention_bias": True}, "bfloat16"),
    ("gpt_neox", {}, "bfloat16"),
    ("gpt_neox", {**TIED, "use_parallel_residual": False, "attention_bias": False}, "float32"),
    ("gpt_neox", {"rotary_pct": 1.0, "hidden_act": "gelu_fast"}, "float64"),
]


@cache
def family_captured(family: str) -> Captured:
    return capture(ModelSpec(family=family, config=ALL[family]), 24)


def user(name: str, **arguments: Any) -> ModelSpec:
    return ModelSpec(module=f"models:{name}", arguments=arguments)


@pytest.mark.parametrize(("family", "config", "dtype"), CASES)
def test_analytic_graph_equals_captured(family: str, config: dict[str, Any], dtype: str) -> None:
    """Names, order, kinds, tensors, parameters, FLOPs, saved, read and written bytes: the whole record."""
    spec = ModelSpec(family=family, config={**ALL[family], **config})
    analytic, captured = build_graph(spec, 24, dtype), capture(spec, 24, 1, dtype).graph
    assert analytic is not None
    for mine, theirs in zip(analytic.operators, captured.operators, strict=True):
        assert mine == theirs
    assert analytic == msgspec.structs.replace(captured, source="analytic")
    assert GraphIndex(analytic).cut_bytes == GraphIndex(captured).cut_bytes


@pytest.mark.parametrize("family", ALL)
def test_flops_are_those_of_the_plain_model(family: str) -> None:
    """FlopCounterMode over the real model: all but attention, which it does not count on a CPU."""
    spec = ModelSpec(family=family, config=ALL[family])
    graph = family_captured(family).graph
    module = model_source(spec, 24).build()
    tokens = torch.randint(0, 100, (2, 24))
    with FlopCounterMode(display=False) as forward:
        loss = module(tokens, tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    plain = [operator for operator in graph.operators if operator.kind != "attention"]
    assert forward.get_total_flops() == 2 * sum(operator.forward_flops for operator in plain)
    assert backward.get_total_flops() == 2 * sum(o.backward_input_flops + o.backward_weight_flops for o in plain)


@pytest.mark.parametrize("family", ALL)
def test_saved_bytes_are_those_of_the_plain_model(family: str) -> None:
    """What autograd keeps for two samples more, in the real model on real tensors."""
    spec = ModelSpec(family=family, config=ALL[family])
    graph = family_captured(family).graph
    module = model_source(spec, 24).build()

    def kept(samples: int) -> int:
        tokens, targets = (torch.randint(0, 100, (samples, 24)) for _ in range(2))
        owned = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), tokens, targets)}
        sizes: dict[int, int] = {}
        alive = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in owned:
                sizes[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = module(tokens, targets)
        assert loss.requires_grad
        return sum(sizes.values())

    per_sample = sum(operator.saved_bytes for operator in graph.operators) - 4  # the weight sum of the loss, once a batch
    assert kept(4) - kept(2) == 2 * per_sample


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_number_of_samples_runs(dtype: str) -> None:
    captured = capture(ModelSpec(family="qwen3", config=LLAMA), 24, 3, dtype)
    stage = build_stage(captured, 0, len(captured.graph.operators), device="cpu")
    initialise(stage.parameters, captured, 1)
    tokens = torch.randint(0, 100, (5, 24))
    together = stage({"tokens": tokens, "targets": tokens})["loss"]
    one_by_one = [stage({"tokens": row[None], "targets": row[None]})["loss"] for row in tokens]
    torch.testing.assert_close(together, torch.stack(one_by_one).sum(), rtol=1e-6 if dtype == "float32" else 1e-3, atol=0)


def test_hidden_state_alone_crosses_the_cuts_of_a_transformer() -> None:
    """Positions, masks and rotary tables are made again in every stage."""
    graph = family_captured("llama").graph
    index = GraphIndex(graph)
    for name in ("model.layers.0.input_layernorm", "model.layers.1.input_layernorm", "model.norm"):
        assert index.cut_bytes[index.cut_before(name)] == 24 * 64 * 4
    assert index.inputs_of(1, len(graph.operators) - 1) == ()


def test_names_are_the_models_own() -> None:
    for family, config in ALL.items():
        spec = ModelSpec(family=family, config=config)
        captured = family_captured(family)
        theirs = dict(model_source(spec, 24).build().model.named_parameters())
        assert [(each.name, each.shape) for each in captured.graph.parameters] == [
            (name, tuple(tensor.shape)) for name, tensor in theirs.items()]


def test_skips_cross_two_cuts_and_go_straight_to_their_readers() -> None:
    index = GraphIndex(capture(user("SkipModel"), 16).graph)
    end = len(index.graph.operators)
    cuts = (0, index.cut_after("blocks.1.1"), index.cut_after("blocks.3.1"), index.cut_before("norm"), end)
    pairs = {(edge.source, edge.target): [tensor.name for tensor in edge.tensors] for edge in index.edges(cuts)}
    assert pairs == {(0, 1): ["blocks.1.1"], (0, 2): ["blocks.1.1", "blocks.0.1"], (1, 2): ["blocks.3.1"],
                     (2, 3): ["blocks.5.1"]}


def test_a_functional_module_is_cut_after_every_product() -> None:
    graph = capture(user("FunctionalModel", depth=3), 16).graph
    assert [operator.name for operator in graph.operators] == ["forward", "forward#2", "forward#3", "forward#4", "loss"]
    assert [operator.parameters for operator in graph.operators[:4]] == [
        ("table", "weights.0"), ("weights.1",), ("weights.2",), ("table", "scale")]


def test_convolutions_and_float_inputs() -> None:
    graph = capture(user("SmallUNet"), 1).graph
    assert [tensor.name for tensor in graph.inputs] == ["image", "noise"]
    by_name = {operator.name: operator for operator in graph.operators}
    assert by_name["enter"].inputs == ("image", "noise") and by_name["enter"].backward_input_flops == 0
    assert by_name["enter"].forward_flops == 2 * 8 * 8 * 4 * 3 * 9  # 2 · pixels · out · in · 3 · 3
    assert by_name["leave"].backward_input_flops == by_name["leave"].forward_flops
    assert by_name["forward#3"].inputs == ("up", "forward")  # the skip
    assert capture(user("TwoTowers"), 4).graph.operators[4].outputs[0].dtype == "int64"


@pytest.mark.parametrize(("name", "words"), [
    ("Dropped", ["dropout", "set its probability to 0"]), ("BatchNormed", ["'norm'", "GroupNorm"]),
    ("Counting", ["calls", "without writing to a buffer"]), ("Mean", ["[1, 16, 32]", "scalar loss"]),
    ("Frozen", ["embed.weight", "frozen"]), ("Branching", ["torch.export", "branches"]),
    ("Nothing", ["no class 'Nothing'", "BatchNormed"]),
    ("Odd", ["length", "example_inputs"]), ("Shadowing", ["'tokens'", "rename the part"]),
])
def test_what_cannot_be_cut_is_refused_in_one_sentence(name: str, words: list[str]) -> None:
    with pytest.raises(GraphError) as caught:
        capture(user(name), 16)
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message


@pytest.mark.parametrize(("spec", "words"), [
    (ModelSpec(family="mamba"), ["mamba", "known: gpt2"]), (ModelSpec(module="nowhere.at:All"), ["cannot be imported"]),
    (ModelSpec(module="models"), ["package.file:Class"]), (user("SkipModel", wide=3), ["cannot be built", "wide"]),
    (ModelSpec(family="qwen3", config={**LLAMA, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
     ["sliding window of 8"]),
])
def test_a_wrong_spec_is_refused(spec: ModelSpec, words: list[str]) -> None:
    with pytest.raises(GraphError) as caught:
        capture(spec, 16)
    assert all(word in str(caught.value) for word in words)


def test_a_stage_outside_the_graph_is_refused() -> None:
    captured = capture(user("SkipModel"), 16)
    with pytest.raises(GraphError, match=r"no stage 3\.\.3"):
        build_stage(captured, 3, 3, device="cpu")
    with pytest.raises(GraphError, match="compiled"):
        build_stage(captured, 0, 3, device="cpu", compile=True, split_backward=True)


def test_weights_depend_on_seed_and_name_alone() -> None:
    captured = family_captured("gpt2")
    count = len(captured.graph.operators)
    whole = build_stage(captured, 0, count, device="cpu")
    initialise(whole.parameters, captured, 7)
    for low, high in ((0, 5), (5, count)):
        part = build_stage(captured, low, high, device="cpu")
        assert len(part.parameters) < len(whole.parameters)
        initialise(part.parameters, captured, 7)
        for name, parameter in part.parameters.items():
            assert torch.equal(parameter, whole.parameters[name])
    again = capture(ModelSpec(family="gpt2", config=GPT2), 24, 2, "bfloat16")
    name = "transformer.h.1.attn.c_attn.weight"
    assert torch.equal(initial_value(again, name, 7), whole.parameters[name])
    assert not torch.equal(initial_value(again, name, 8), whole.parameters[name])


def test_weights_are_drawn_as_the_module_draws_them() -> None:
    captured = capture(ModelSpec(family="gpt2", config={**GPT2, "n_embd": 256, "n_head": 4}), 24)
    values = {name: initial_value(captured, name, 0) for name in (
        "transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.ln_1.weight", "transformer.h.0.mlp.c_fc.bias")}
    spread = {name: value.std().item() for name, value in values.items()}
    assert spread["transformer.wte.weight"] == pytest.approx(0.02, rel=0.02)
    assert spread["transformer.h.0.attn.c_attn.weight"] == pytest.approx(0.02, rel=0.02)
    assert spread["transformer.h.0.attn.c_proj.weight"] == pytest.approx(0.02 / 2, rel=0.02)  # / sqrt(2 layers)
    assert bool((values["transformer.h.0.ln_1.weight"] == 1).all()) and not values["transformer.h.0.mlp.c_fc.bias"].any()


def test_a_users_own_initialisation_is_replayed() -> None:
    captured = capture(user("NanoGPT", width=64), 16)
    head = initial_value(captured, "wte.weight", 3)  # tied to the head, which is drawn by trunc_normal_
    assert head.std().item() == pytest.approx(0.02, rel=0.1) and head.abs().max() < 0.12
    assert bool((initial_value(captured, "qkv.bias", 3) == 0.5).all())
    assert initial_value(captured, "wpe.weight", 3).std().item() == pytest.approx(1, rel=0.1)  # nn.Embedding's own
    made = capture(user("FunctionalModel", width=64), 16)
    assert initial_value(made, "weights.1", 3).std().item() == pytest.approx(0.125, rel=0.1)
    assert bool((initial_value(made, "scale", 3) == 1).all())


def test_deferred_construction_gives_every_tensor_its_value() -> None:
    before = torch.get_rng_state()
    with deferred() as tape:
        model = NanoGPT()
        padded = torch.nn.Embedding(6, 4, padding_idx=2)
        square = torch.nn.Parameter(torch.empty(5, 5))
        torch.nn.init.orthogonal_(square)
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
    assert torch.equal(before, torch.get_rng_state())
    assert all(tensor.device.type == "meta" for tensor in model.parameters()) and rates == [0, 0.5, 1]
    assert torch.equal(tape.value(model.causal), torch.tril(torch.ones(32, 32)))
    rows = tape.value(padded.weight, 1)
    assert not rows[2].any() and bool(rows[3].any())
    torch.testing.assert_close((value := tape.value(square, 1)) @ value.T, torch.eye(5))


def saved_folder(folder: Path, family: str, config: dict[str, Any], shard: str = "10GB") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config, eos_token_id=None, bos_token_id=None))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=shard)
    return model.eval()


@pytest.mark.parametrize(("family", "more", "shard"), [
    ("gpt2", {}, "10GB"), ("gpt2", {"tie_word_embeddings": False}, "20KB"), ("llama", {}, "30KB"), ("qwen3", TIED, "10GB"),
    ("gpt_neox", {}, "10GB"),
])
def test_weights_of_a_folder_give_its_logits(tmp_path: Path, family: str, more: dict[str, Any], shard: str) -> None:
    """Three stages, each reading only its own tensors, against transformers."""
    model = saved_folder(tmp_path, family, {**ALL[family], **more}, shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard != "10GB")
    captured = capture(ModelSpec(folder=str(tmp_path), weights="folder"), 24)
    count = len(captured.graph.operators)
    tokens, targets = (torch.randint(0, 100, (2, 24)) for _ in range(2))
    known: dict[str, torch.Tensor] = {"tokens": tokens, "targets": targets}
    with torch.no_grad():
        for low, high in ((0, count // 3), (count // 3, count - 1), (count - 1, count)):
            stage = build_stage(captured, low, high, device="cpu")
            load_weights(stage.parameters, captured, tmp_path)
            known.update(stage(known))
        expected = model(tokens).logits
    torch.testing.assert_close(known["lm_head"], expected, rtol=1e-5, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(known["loss"], loss)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    saved_folder(tmp_path, "gpt2", GPT2)
    other = capture(ModelSpec(family="gpt2", config={**GPT2, "n_embd": 64}), 24)
    stage = build_stage(other, 0, 2, device="cpu")
    with pytest.raises(GraphError, match="shape"):
        load_weights(stage.parameters, other, tmp_path)
    llama = family_captured("llama")
    with pytest.raises(GraphError, match=r"has no weight 'model\.embed_tokens\.weight'"):
        load_weights(build_stage(llama, 0, 2, device="cpu").parameters, llama, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    captured = capture(ModelSpec(folder=str(tmp_path)), 24)
    with pytest.raises(GraphError, match="cannot be read"):
        load_weights(build_stage(captured, 0, 2, device="cpu").parameters, captured, tmp_path)
    path.unlink()
    with pytest.raises(GraphError, match="neither"):
        load_weights(build_stage(captured, 0, 2, device="cpu").parameters, captured, tmp_path)


def test_a_base_model_folder_is_understood(tmp_path: Path) -> None:
    """GPT-2's published files lack the leading "transformer."."""
    from safetensors.torch import load_file, save_file

    model = saved_folder(tmp_path, "gpt2", GPT2)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    captured = capture(ModelSpec(folder=str(tmp_path)), 24)
    stage = build_stage(captured, 0, len(captured.graph.operators), device="cpu")
    load_weights(stage.parameters, captured, tmp_path)
    assert torch.equal(stage.parameters["transformer.wte.weight"], model.lm_head.weight)


def test_layers_of_70b_are_captured_and_one_built_without_the_others() -> None:
    """Two layers of Llama 70B (14 GB of float32 with embeddings): the graph and one stage within 2 GiB more than torch."""
    program = """
import json, resource, torch
import transformers.models.llama.modeling_llama
from atoll.graph.spec import ModelSpec
from atoll.runtime.capture import capture, build_stage, initialise
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
captured = capture(ModelSpec(preset="llama-3-70b", config={"num_hidden_layers": 2}), 128, 1, "bfloat16")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
at = [operator.name for operator in captured.graph.operators].index("model.layers.1.self_attn.k_proj")
stage = build_stage(captured, at, at + 1, device="cpu")
initialise(stage.parameters, captured, 0)
print(json.dumps([sum(p.elements for p in captured.graph.parameters), after - before, list(stage.parameters),
                  stage.parameters["model.layers.1.self_attn.k_proj.weight"].float().std().item(),
                  resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    elements, captured_kib, names, spread, built_kib = json.loads(done.stdout.splitlines()[-1])
    assert elements == 2 * 128256 * 8192 + 8192 + 2 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192)
    assert captured_kib < 200 * 1024 and built_kib < 400 * 1024
    assert names == ["model.layers.1.self_attn.k_proj.weight"] and spread == pytest.approx(0.02, rel=0.01)
