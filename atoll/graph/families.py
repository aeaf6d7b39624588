"""The known model families as graphs, written down instead of traced: no torch, no transformers, milliseconds.

Operators, their order and names are those of the Hugging Face implementations (transformers 5), which is what capture
finds; a test holds the two against each other operator by operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.graph.blocks import ACTIVATIONS, Sketch
from atoll.graph.graph import Graph

__all__ = ["BUILDERS"]

Config = dict[str, Any]


def gpt2(name: str, config: Config, length: int, dtype: str) -> Graph | None:
    """GPT-2 (Radford et al. 2019): learned positions, LayerNorm first, one matrix for q, k and v."""
    kind, h, inner, heads = config["activation_function"], config["n_embd"], config["n_inner"], config["n_head"]
    if kind not in ACTIVATIONS or config["add_cross_attention"] or config["reorder_and_upcast_attn"]:
        return None
    sketch, tied = Sketch(length, dtype), config["tie_word_embeddings"]
    sketch.parameter("transformer.wte.weight", config["vocab_size"], h, aliases=("lm_head.weight",) if tied else ())
    sketch.parameter("transformer.wpe.weight", config["n_positions"], h)
    tokens = sketch.embedding("transformer.wte", "transformer.wte.weight", "tokens", h)
    positions = sketch.embedding("transformer.wpe", "transformer.wpe.weight", None, h)
    x = sketch.add("transformer", (tokens, positions), h)
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        for leaf, shape in (("ln_1", (h,)), ("attn.c_attn", (h, 3 * h)), ("attn.c_proj", (h, h)), ("ln_2", (h,)),
                            ("mlp.c_fc", (h, inner)), ("mlp.c_proj", (inner, h))):
            sketch.parameter(f"{at}.{leaf}.weight", *shape)
            sketch.parameter(f"{at}.{leaf}.bias", shape[-1])
        y = sketch.layer_norm(f"{at}.ln_1", x, h)
        y = sketch.linear(f"{at}.attn.c_attn", y, h, 3 * h, bias=True)
        y = sketch.attention(f"{at}.attn", (y,), heads, heads, h // heads, fused=True)
        y = sketch.linear(f"{at}.attn.c_proj", y, h, h, bias=True, kept=True)
        x = sketch.add(at, (y, x), h)
        y = sketch.layer_norm(f"{at}.ln_2", x, h)
        y = sketch.linear(f"{at}.mlp.c_fc", y, h, inner, bias=True)
        y = sketch.activation(f"{at}.mlp.act", y, inner, kind)
        y = sketch.linear(f"{at}.mlp.c_proj", y, inner, h, bias=True, kept=ACTIVATIONS[kind].keeps_output)
        x = sketch.add(f"{at}#2", (x, y), h)
    for leaf in ("weight", "bias"):
        sketch.parameter(f"transformer.ln_f.{leaf}", h)
    x = sketch.layer_norm("transformer.ln_f", x, h)
    return _head(sketch, name, x, h, config, "lm_head", "transformer.wte.weight")


def llama(name: str, config: Config, length: int, dtype: str) -> Graph | None:
    """Llama (Touvron et al. 2023), Qwen2 and Qwen3: RMSNorm, rotary positions, grouped keys and values, gated MLP."""
    kind, h, f = config["hidden_act"], config["hidden_size"], config["intermediate_size"]
    if kind not in ACTIVATIONS or _windowed(config, length):
        return None
    sketch = Sketch(length, dtype)
    tied = config["tie_word_embeddings"]
    sketch.parameter("model.embed_tokens.weight", config["vocab_size"], h, aliases=("lm_head.weight",) if tied else ())
    x = sketch.embedding("model.embed_tokens", "model.embed_tokens.weight", "tokens", h)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        _llama_parameters(sketch, at, config)
        y = sketch.rms_norm(f"{at}.input_layernorm", x, h)
        y = _llama_attention(sketch, f"{at}.self_attn", y, config)
        x = sketch.add(at, (x, y), h)
        y = sketch.rms_norm(f"{at}.post_attention_layernorm", x, h)
        biased = bool(config.get("mlp_bias"))
        gate = sketch.linear(f"{at}.mlp.gate_proj", y, h, f, bias=biased)
        gate = sketch.activation(f"{at}.mlp.act_fn", gate, f, kind)
        up = sketch.linear(f"{at}.mlp.up_proj", y, h, f, bias=biased, kept=True)
        y = sketch.gate(f"{at}.mlp", gate, up, f, kept=ACTIVATIONS[kind].keeps_output)
        y = sketch.linear(f"{at}.mlp.down_proj", y, f, h, bias=biased)
        x = sketch.add(f"{at}#2", (x, y), h)
    sketch.parameter("model.norm.weight", h)
    x = sketch.rms_norm("model.norm", x, h)
    return _head(sketch, name, x, h, config, "lm_head", "model.embed_tokens.weight")


def _windowed(config: Config, length: int) -> bool:
    window = config.get("sliding_window")
    return bool(config.get("use_sliding_window")) and window is not None and window < length


def _biases(config: Config) -> tuple[bool, bool]:
    """Whether q, k, v have a bias, and whether the output projection has one (Qwen2: always, never)."""
    return (bool(config["attention_bias"]), bool(config["attention_bias"])) if "attention_bias" in config else (True, False)


def _llama_parameters(sketch: Sketch, at: str, config: Config) -> None:
    h, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    inward, outward = _biases(config)
    mlp = bool(config.get("mlp_bias"))
    for leaf, rows, columns, biased in (
            ("self_attn.q_proj", q, h, inward), ("self_attn.k_proj", kv, h, inward), ("self_attn.v_proj", kv, h, inward),
            ("self_attn.o_proj", h, q, outward)):
        sketch.parameter(f"{at}.{leaf}.weight", rows, columns)
        if biased:
            sketch.parameter(f"{at}.{leaf}.bias", rows)
    if _normed(config):
        sketch.parameter(f"{at}.self_attn.q_norm.weight", d)
        sketch.parameter(f"{at}.self_attn.k_norm.weight", d)
    for leaf, rows, columns in (("gate_proj", f, h), ("up_proj", f, h), ("down_proj", h, f)):
        sketch.parameter(f"{at}.mlp.{leaf}.weight", rows, columns)
        if mlp:
            sketch.parameter(f"{at}.mlp.{leaf}.bias", rows)
    sketch.parameter(f"{at}.input_layernorm.weight", h)
    sketch.parameter(f"{at}.post_attention_layernorm.weight", h)


def _normed(config: Config) -> bool:
    """Qwen3 normalises each head's q and k; it is the family with both a window and an attention_bias field."""
    return "use_sliding_window" in config and "attention_bias" in config


def _llama_attention(sketch: Sketch, at: str, x: str, config: Config) -> str:
    h, d = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    inward, outward = _biases(config)
    normed = _normed(config)
    ready = []
    for leaf, count in (("q", heads), ("k", kv_heads)):
        split = (1, count, sketch.length, d)
        y = sketch.linear(f"{at}.{leaf}_proj", x, h, count * d, bias=inward, kept=leaf == "k",
                          shape=(1, sketch.length, count, d) if normed else split)
        ready.append(sketch.rms_norm(f"{at}.{leaf}_norm", y, d, rows=count, shape=split) if normed else y)
    value = sketch.linear(f"{at}.v_proj", x, h, kv_heads * d, bias=inward, kept=True)
    y = sketch.attention(at, (value, *ready), heads, kv_heads, d, rotated=d)
    return sketch.linear(f"{at}.o_proj", y, heads * d, h, bias=outward, kept=True)


def gpt_neox(name: str, config: Config, length: int, dtype: str) -> Graph | None:
    """GPT-NeoX (Black et al. 2022) and Pythia: attention and MLP side by side, partly rotary positions."""
    kind, h, f, heads = (config[key] for key in ("hidden_act", "hidden_size", "intermediate_size", "num_attention_heads"))
    if kind not in ACTIVATIONS:
        return None
    sketch, tied, biased = Sketch(length, dtype), config["tie_word_embeddings"], bool(config["attention_bias"])
    rotated = int(h // heads * config["rope_parameters"]["partial_rotary_factor"])
    sketch.parameter("gpt_neox.embed_in.weight", config["vocab_size"], h, aliases=("lm_head.weight",) if tied else ())
    x = sketch.embedding("gpt_neox.embed_in", "gpt_neox.embed_in.weight", "tokens", h)
    for layer in range(config["num_hidden_layers"]):
        at = f"gpt_neox.layers.{layer}"
        for leaf, shape, has_bias in (
                ("input_layernorm", (h,), True), ("post_attention_layernorm", (h,), True),
                ("attention.query_key_value", (3 * h, h), biased), ("attention.dense", (h, h), biased),
                ("mlp.dense_h_to_4h", (f, h), True), ("mlp.dense_4h_to_h", (h, f), True)):
            sketch.parameter(f"{at}.{leaf}.weight", *shape)
            if has_bias:
                sketch.parameter(f"{at}.{leaf}.bias", shape[0])
        y = sketch.layer_norm(f"{at}.input_layernorm", x, h)
        y = sketch.linear(f"{at}.attention.query_key_value", y, h, 3 * h, bias=biased)
        y = sketch.attention(f"{at}.attention", (y,), heads, heads, h // heads, rotated=rotated, fused=True, copies=True)
        attended = sketch.linear(f"{at}.attention.dense", y, h, h, bias=biased)
        parallel = config["use_parallel_residual"]
        if not parallel:
            attended = sketch.add(at, (attended, x), h)
        y = sketch.layer_norm(f"{at}.post_attention_layernorm", x if parallel else attended, h, kept=parallel)
        y = sketch.linear(f"{at}.mlp.dense_h_to_4h", y, h, f, bias=True)
        y = sketch.activation(f"{at}.mlp.act", y, f, kind)
        y = sketch.linear(f"{at}.mlp.dense_4h_to_h", y, f, h, bias=True, kept=ACTIVATIONS[kind].keeps_output)
        x = sketch.add(at, (y, attended, x), h) if parallel else sketch.add(f"{at}#2", (y, attended), h)
    for leaf in ("weight", "bias"):
        sketch.parameter(f"gpt_neox.final_layer_norm.{leaf}", h)
    x = sketch.layer_norm("gpt_neox.final_layer_norm", x, h)
    return _head(sketch, name, x, h, config, "lm_head", "gpt_neox.embed_in.weight")


def _head(sketch: Sketch, name: str, x: str, h: int, config: Config, head: str, embedding: str) -> Graph:
    vocabulary, tied = config["vocab_size"], config["tie_word_embeddings"]
    if not tied:
        sketch.parameter(f"{head}.weight", vocabulary, h)
    logits = sketch.linear(head, x, h, vocabulary, weight=embedding if tied else None)
    return sketch.finish(name, logits, vocabulary)


BUILDERS: dict[str, Callable[[str, Config, int, str], Graph | None]] = {
    "gpt2": gpt2, "llama": llama, "qwen2": llama, "qwen3": llama, "gpt_neox": gpt_neox,
}
