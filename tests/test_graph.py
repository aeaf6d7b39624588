"""Analytic graphs, presets and closed forms: no torch. That they equal captured graphs is tested in test_capture.py."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from atoll.errors import GraphError
from atoll.graph import formulas
from atoll.graph.build import build_graph
from atoll.graph.config import FAMILIES, model_config
from atoll.graph.graph import Graph, GraphIndex, Operator, TensorSpec
from atoll.graph.presets import PRESETS
from atoll.graph.spec import ModelSpec

# Exact sizes of the published weights (model cards, and the sum over the published shapes).
PUBLISHED = {
    "gpt2-small": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192, "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "qwen2.5-0.5b": 494_032_768, "qwen2.5-7b": 7_615_616_512, "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-8b": 8_190_735_360, "pythia-70m": 70_426_624, "pythia-1b": 1_011_781_632,
    "gpt-neox-20b": 20_554_567_680,
}


def graph_of(preset: str, length: int = 1024, dtype: str = "bfloat16", **config: object) -> Graph:
    graph = build_graph(ModelSpec(preset=preset, config=config), length, dtype)
    assert graph is not None
    return graph


def elements(graph: Graph) -> int:
    return sum(parameter.elements for parameter in graph.parameters)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(preset: str) -> None:
    assert elements(graph_of(preset)) == PUBLISHED[preset]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_becomes_a_graph(preset: str) -> None:
    graph = graph_of(preset)
    index = GraphIndex(graph)
    assert graph.operators[-1].name == "loss"
    assert index.stage_cost(0, len(graph.operators)).parameter_elements == elements(graph)
    family, config = PRESETS[preset]
    layers = config.get("n_layer", config.get("num_hidden_layers"))
    hidden = config.get("n_embd", config.get("hidden_size"))
    prefix = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}.get(family, "model.layers")
    last = f"{prefix}.{layers - 1}.ln_1" if family == "gpt2" else f"{prefix}.{layers - 1}.input_layernorm"
    assert index.cut_bytes[index.cut_before(last)] == 1024 * hidden * 2


def test_gpt_graph_agrees_with_the_closed_forms() -> None:
    for preset, (layers, hidden) in {"gpt2-small": (12, 768), "gpt3-175b": (96, 12288)}.items():
        graph = graph_of(preset)
        positions = 1024 if preset == "gpt2-small" else 2048
        assert elements(graph) == formulas.gpt_parameters(50257, positions, hidden, layers)
        forward = sum(operator.forward_flops for operator in graph.operators)
        assert 7 * 3 * forward == formulas.gpt_model_flops(7, 1024, hidden, layers, 50257)


@pytest.mark.parametrize("preset", ["llama-7b", "llama-2-70b", "llama-3-8b", "llama-3.1-405b", "llama-3.2-1b", "qwen2.5-72b"])
def test_llama_graph_agrees_with_the_closed_forms(preset: str) -> None:
    resolved = model_config(ModelSpec(preset=preset))
    assert resolved is not None
    family, config = resolved
    h, kv, f = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"], config["intermediate_size"]
    layers, vocabulary = config["num_hidden_layers"], config["vocab_size"]
    graph = graph_of(preset)
    biases = layers * (h + 2 * kv) if family == "qwen2" else 0
    assert elements(graph) == biases + formulas.llama_parameters(vocabulary, h, kv, f, layers, config["tie_word_embeddings"])
    forward = sum(operator.forward_flops for operator in graph.operators)
    assert 3 * forward == formulas.llama_model_flops(1, 1024, h, kv, f, layers, vocabulary)


def test_backward_is_two_products_and_attention_two_and_a_half() -> None:
    for operator in graph_of("llama-3-8b").operators:
        if operator.kind == "matmul":
            assert operator.backward_input_flops == operator.backward_weight_flops == operator.forward_flops > 0
        elif operator.kind == "attention":
            assert 2 * operator.backward_input_flops == 5 * operator.forward_flops
            assert operator.backward_weight_flops == 0


def test_gpt3_size_by_hand() -> None:
    # 50257·12288 + 2048·12288 + 96·(12·12288² + 13·12288) + 2·12288
    assert formulas.gpt_parameters(50257, 2048, 12288, 96) == 174_604_259_328


KORTHIKANTI = {  # layers, hidden, heads, sequences a step, GPUs, seconds a step, MFU % (2022, tables 3 and 5)
    "22B": (48, 6144, 64, 4, 8, "1.10", "41.5"), "175B": (96, 12288, 96, 64, 64, "13.75", "51.4"),
    "530B": (105, 20480, 128, 280, 280, "37.83", "56.0"), "1T": (128, 25600, 160, 512, 512, "71.49", "56.3"),
}


@pytest.mark.parametrize("size", KORTHIKANTI)
def test_model_flops_give_the_published_utilisation(size: str) -> None:
    layers, hidden, _, batch, gpus, seconds, utilisation = KORTHIKANTI[size]
    flops = formulas.gpt_model_flops(batch, 2048, hidden, layers, 51200)
    half = Fraction("0.005")  # both published figures are rounded
    highest = 100 * flops / ((Fraction(seconds) - half) * gpus * 312 * 10**12)
    lowest = 100 * flops / ((Fraction(seconds) + half) * gpus * 312 * 10**12)
    assert lowest - Fraction("0.05") <= Fraction(utilisation) <= highest + Fraction("0.05")


def test_hardware_flops_give_the_published_rates() -> None:
    # Narayanan et al. 2021, table 1: 39.1B on 512 GPUs at 138 TFLOP/s, 1T on 3072 at 163.
    rows = ((48, 8192, 1536, 512, 138, "14.45"), (128, 25600, 3072, 3072, 163, "102.6"))
    for layers, hidden, batch, gpus, rate, seconds in rows:
        flops = formulas.gpt_hardware_flops(batch, 2048, hidden, layers, 51200)
        assert round(float(flops / (gpus * rate * 10**12)), len(seconds.partition(".")[2])) == float(seconds)


def test_activation_bytes_by_hand() -> None:
    # 22B: s·b·h = 2048·4·6144 = 50 331 648; 5as/h of it = 5·64·2048²·4 = 5 368 709 120
    whole = formulas.activation_bytes_per_layer(2048, 4, 6144, 64)
    assert whole == 34 * 50_331_648 + 5_368_709_120 == 7_079_985_152
    assert formulas.activation_bytes_per_layer(2048, 4, 6144, 64, 8) == 13 * 50_331_648 + 5_368_709_120 // 8 == 1_325_400_064
    assert formulas.activation_bytes_per_layer(2048, 4, 6144, 64, 8, sequence_parallel=True) == 7_079_985_152 // 8
    assert formulas.activation_bytes_selective(2048, 4, 6144, 8) == 213_909_504
    assert formulas.activation_bytes_full(2048, 4, 6144) == 100_663_296


def test_score_share_is_the_published_one() -> None:
    # Korthikanti et al. 2022: 5as/h is 80 for GPT-3 and 64 for MT-NLG; leaving it out saves 70 % and 65 %.
    for size, share, saved in (("175B", 80, 70), ("530B", 64, 65)):
        _, hidden, heads, *_ = KORTHIKANTI[size]
        unit = 2048 * hidden
        whole = formulas.activation_bytes_per_layer(2048, 1, hidden, heads)
        assert whole == (34 + share) * unit
        assert round(100 * float(1 - formulas.activation_bytes_selective(2048, 1, hidden) / whole)) == saved
    assert formulas.first_stage_layers(96, 8) == 96
    assert formulas.first_stage_layers(96, 8, 3) == 96 * (1 + Fraction(7, 24)) == 124
    # interleaved 175B, tensor and sequence parallel over 8 ranks: 124 layers of 34 + 80 units of 2048·12288 / 8 bytes
    layer = formulas.activation_bytes_per_layer(2048, 1, 12288, 96, 8, sequence_parallel=True)
    assert formulas.first_stage_layers(96, 8, 3) * layer == 124 * 114 * 2048 * 12288 // 8 == 44_468_011_008


def test_model_states_by_hand() -> None:
    # 18 bytes a parameter (fp32 gradients): 12h²L of the 22B model over 8 tensor-parallel ranks
    blocks = 12 * 6144**2 * 48
    assert formulas.model_state_bytes(blocks, gradient_bytes=4) / 8 == 18 * 12 * 6144**2 * 48 // 8 == 48_922_361_856
    # Rajbhandari et al. 2020, figure 1: 7.5B on 64 ranks: 120, 31.4, 16.6, 1.9 GB
    shares = [float(formulas.model_state_bytes(7_500_000_000, zero=stage, workers=64)) / 1e9 for stage in range(4)]
    assert [round(share, 1) for share in shares] == [120.0, 31.4, 16.6, 1.9]


def test_collectives_by_hand() -> None:
    # 8 MB over 4 workers at 1 GB/s with 1 µs: a ring moves 2·3/4·8 MB in 12 ms and 6 hops
    assert formulas.ring_all_reduce_ns(8_000_000, 4, 10**9, 1000) == 12_000_000 + 6000
    assert formulas.all_gather_ns(8_000_000, 4, 10**9, 1000) == 6_000_000 + 3000
    assert formulas.all_to_all_ns(8_000_000, 4, 10**9, 1000) == 6_000_000 + 3000
    assert formulas.tree_all_reduce_ns(8_000_000, 4, 10**9, 1000) == 16_000_000 + 4000
    assert formulas.ring_all_reduce_ns(8_000_000, 1, 10**9, 1000) == formulas.tree_all_reduce_ns(1, 1, 1, 1) == 0


def test_boundary_bytes_by_hand() -> None:
    graph = graph_of("gpt3-175b", 2048)
    index = GraphIndex(graph)
    cut = index.cut_before("transformer.h.48.ln_1")
    assert 3 * index.cut_bytes[cut] == formulas.pipeline_bytes(2048, 3, 12288) == 150_994_944
    assert formulas.pipeline_bytes(2048, 3, 12288, tensor_parallel=8, chunks=2) == 150_994_944 // 4
    assert formulas.tensor_parallel_bytes_per_layer(2048, 1, 12288) == 4 * 50_331_648
    assert formulas.tensor_parallel_bytes_per_layer(2048, 1, 12288, full_recompute=True) == 6 * 50_331_648
    (edge,) = index.edges((0, cut, len(graph.operators)))
    assert edge.forward_bytes(3) == edge.backward_bytes(3) == 150_994_944
    assert index.inputs_of(cut, len(graph.operators)) == (graph.inputs[1],)


def test_tied_weight_is_one_parameter_held_by_both_ends() -> None:
    graph = graph_of("gpt2-small")
    index = GraphIndex(graph)
    first, last = index.parameters_of(0, 1), index.parameters_of(index.cut_before("lm_head"), len(graph.operators))
    assert first == last and first[0].aliases == ("lm_head.weight",)
    untied = graph_of("gpt2-small", tie_word_embeddings=False)
    assert elements(untied) == elements(graph) + 50257 * 768


def test_amounts_grow_with_length_as_they_should() -> None:
    short, long = (GraphIndex(graph_of("llama-3-8b", length)) for length in (1024, 2048))
    for name in short.position:
        one, two = (index.graph.operators[index.position[name]] for index in (short, long))
        assert two.saved_bytes == 2 * one.saved_bytes or one.kind == "loss"
        assert two.forward_flops == (4 if one.kind == "attention" else 2) * one.forward_flops


def test_options_nobody_wrote_down_are_left_to_capture() -> None:
    assert build_graph(ModelSpec(module="tests.models:SkipModel"), 16, "float32") is None
    assert build_graph(ModelSpec(preset="gpt2-small", config={"activation_function": "mish"}), 16, "float32") is None
    windowed = {"use_sliding_window": True, "sliding_window": 8}
    assert build_graph(ModelSpec(preset="qwen3-0.6b", config=windowed), 16, "float32") is None
    assert build_graph(ModelSpec(preset="qwen3-0.6b", config=windowed), 8, "float32") is not None


@pytest.mark.parametrize(("spec", "words"), [
    (ModelSpec(preset="llama-3-9b"), ["llama-3-9b", "did you mean 'llama-3-8b'", "llama-3-70b", "more"]),
    (ModelSpec(family="mamba"), ["mamba", *FAMILIES, "model.module"]),
    (ModelSpec(family="llama", config={"hiden_size": 8}), ["hiden_size", "did you mean 'hidden_size'"]),
    (ModelSpec(preset="gpt2-small", config={"resid_pdrop": 0.1}), ["resid_pdrop", "0.1", "set resid_pdrop to 0"]),
    (ModelSpec(family="llama", config={"num_attention_heads": 6, "num_key_value_heads": 4}), ["6", "4", "change"]),
    (ModelSpec(folder="nowhere"), ["nowhere", "config.json", "cannot be read"]),
])
def test_a_wrong_model_is_refused_in_one_sentence(spec: ModelSpec, words: list[str]) -> None:
    with pytest.raises(GraphError) as caught:
        build_graph(spec, 16, "float32")
    message = str(caught.value)
    assert all(word in message for word in words) and "\n" not in message


def test_a_sequence_beyond_the_positions_is_refused() -> None:
    with pytest.raises(GraphError, match=r"1025.*1024 positions of gpt2-small"):
        build_graph(ModelSpec(preset="gpt2-small"), 1025, "float32")


def test_a_folder_of_older_transformers_is_understood(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "vocab_size": 100, "rotary_pct": 0.5, "rotary_emb_base": 5000, "hidden_dropout": 0.1, "torch_dtype": "float16"}))
    resolved = model_config(ModelSpec(folder=str(folder)))
    assert resolved is not None
    assert resolved[1]["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000, "partial_rotary_factor": 0.5}
    assert resolved[1]["hidden_dropout"] == 0
    graph = build_graph(ModelSpec(folder=str(folder)), 16, "float32")
    assert graph is not None and len(graph.operators) == 1 + 2 * 9 + 3
    (folder / "config.json").write_text("{")
    with pytest.raises(GraphError, match="not JSON"):
        build_graph(ModelSpec(folder=str(folder)), 16, "float32")


def test_skip_connections_go_straight_to_their_readers() -> None:
    def tensor(name: str, width: int) -> TensorSpec:
        return TensorSpec(name=name, shape=(1, width), dtype="float32")

    graph = Graph(name="skip", inputs=(tensor("x", 4),), parameters=(), loss="d", operators=(
        Operator(name="a", kind="matmul", inputs=("x",), outputs=(tensor("a", 8),)),
        Operator(name="b", kind="matmul", inputs=("a",), outputs=(tensor("b", 16),)),
        Operator(name="c", kind="matmul", inputs=("b",), outputs=(tensor("c", 32),)),
        Operator(name="d", kind="loss", inputs=("c", "a"), outputs=(tensor("d", 1),)),
    ))
    index = GraphIndex(graph)
    assert index.cut_bytes == (0, 32, 32 + 64, 32 + 128, 0)
    assert [(edge.source, edge.target, edge.forward_bytes(2)) for edge in index.edges((0, 1, 2, 3, 4))] == [
        (0, 1, 64), (0, 3, 64), (1, 2, 128), (2, 3, 256)]


def test_planning_imports_neither_torch_nor_transformers() -> None:
    program = ("import sys; from atoll.graph.build import build_graph; from atoll.graph.spec import ModelSpec; "
               "build_graph(ModelSpec(preset='llama-3.1-405b'), 8192, 'bfloat16'); import atoll.graph.formulas; "
               "print(sorted({'torch', 'transformers', 'numpy', 'scipy'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
