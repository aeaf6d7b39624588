"""From what a job says about its model to one family and its complete configuration, without torch or transformers."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from atoll.errors import GraphError
from atoll.graph.presets import PRESETS
from atoll.graph.spec import ModelSpec

__all__ = ["FAMILIES", "model_config", "position_limit"]

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_NO_SHAPE = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "use_cache", "rope_theta", "rope_scaling",
             "layer_types", "architectures")

# Defaults as in the configuration classes of transformers; None: derived (see ``_derive``).
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
             "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
             "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
             "add_cross_attention": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
              "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
              "rope_parameters": _ROPE, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
              "attention_dropout": 0.0},
    "qwen2": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": None, "hidden_act": "silu",
              "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
              "rope_parameters": _ROPE, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28,
              "attention_dropout": 0.0},
    "qwen3": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu",
              "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
              "rope_parameters": _ROPE, "attention_bias": False, "use_sliding_window": False, "sliding_window": None,
              "max_window_layers": 28, "attention_dropout": 0.0},
    "gpt_neox": {"vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
                 "num_attention_heads": 64, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
                 "tie_word_embeddings": False, "use_parallel_residual": True, "attention_bias": True,
                 "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}, "rotary_pct": None, "rotary_emb_base": None,
                 "attention_dropout": 0.0, "hidden_dropout": 0.0, "classifier_dropout": 0.0},
}

_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout", "classifier_dropout")


def model_config(spec: ModelSpec) -> tuple[str, dict[str, Any]] | None:
    """Return (family, all configuration fields) of a Hugging Face model; None for the user's own module.

    Dropout is off whatever a folder's config.json says: losses must not depend on how the model is cut. Raises
    ``GraphError`` for an unknown preset, family or field, for an unreadable folder, and when the job asks for dropout.
    """
    if spec.module is not None:
        return None
    if spec.preset is not None:
        if spec.preset not in PRESETS:
            likely = difflib.get_close_matches(spec.preset, PRESETS, n=12, cutoff=0.0)
            raise GraphError(f"model.preset: there is no {spec.preset!r}{_near(spec.preset, PRESETS)}; known: "
                             f"{', '.join(likely)} and {len(PRESETS) - len(likely)} more; or name a family with its config")
        family, fields = PRESETS[spec.preset]
    elif spec.folder is not None:
        family, fields = _folder_config(spec.folder)
    else:
        family, fields = str(spec.family).replace("-", "_"), {}
    if family not in FAMILIES:
        raise GraphError(f"model.family: {family!r} is not known; known: {', '.join(FAMILIES)}; wrap any other model in an "
                         "nn.Module that returns its loss and name it with model.module")
    known = FAMILIES[family]
    _check_values(f"model.folder: {spec.folder}", known, fields)
    for name, value in spec.config.items():
        if name not in known and name not in _NO_SHAPE:
            raise GraphError(f"model.config: {family} has no field {name!r}{_near(name, known)}; "
                             f"allowed: {', '.join((*known, *_NO_SHAPE))}")
        if name in _DROPOUTS and value:
            raise GraphError(f"model.config.{name}: found {value}; stages are cut out of one deterministic graph, so "
                             f"dropout cannot be reproduced under every plan; set {name} to 0")
    _check_values("model.config", known, spec.config)
    merged = {**known, **fields, **spec.config}
    merged.update(dict.fromkeys((name for name in _DROPOUTS if name in known), 0.0))
    return family, _derive(family, merged)


def _check_values(where: str, known: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raise ``GraphError`` for a value that no model can have: the default of a field says of what kind it is."""
    for name, value in fields.items():
        default = known.get(name)
        expected = _expected(name, default, value) if name in known or name in _NUMBERS else None
        if expected:
            raise GraphError(f"{where}.{name}: found {repr(value)[:60]}, expected {expected}")


_NUMBERS = ("rope_theta", "rotary_pct", "rotary_emb_base")
_FEW = {"n_layer": 10_000, "num_hidden_layers": 10_000}


def _expected(name: str, default: Any, value: Any) -> str:
    """What ``value`` should have been, or "" when it may stand."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, str):
        return "" if isinstance(value, str) else f"a name such as {default!r}"
    if isinstance(default, dict):
        return "" if isinstance(value, dict) else f"fields such as {', '.join(default)}"
    if value is None and (default is None or name in _NUMBERS):
        return ""
    if isinstance(default, float) or name in _NUMBERS:
        fine = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e30
        return "" if fine else "a number of at least 0"
    least, most = int(name != "max_window_layers"), _FEW.get(name, 2**40)  # no layer at all may be without a window
    fine = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    return "" if fine else f"a whole number from {least} to {most}" + (", or nothing" if default is None else "")


def position_limit(family: str, config: dict[str, Any]) -> int:
    """Longest sequence the family's position encoding was made for."""
    return int(config["n_positions"] if family == "gpt2" else config["max_position_embeddings"])


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _folder_config(folder: str) -> tuple[str, dict[str, Any]]:
    path = Path(folder)
    path = path if path.suffix == ".json" else path / "config.json"
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise GraphError(f"model.folder: {path} cannot be read: {error.strerror}; name a Hugging Face folder") from None
    except ValueError as error:
        raise GraphError(f"model.folder: {path} is not JSON: {error}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise GraphError(f"model.folder: {path} has no model_type; expected the config.json of a Hugging Face model")
    family = fields["model_type"]
    wanted = {**FAMILIES.get(family, {}), **dict.fromkeys(_NO_SHAPE)}
    return family, {name: value for name, value in fields.items() if name in wanted}


def _check_rope(rope: dict[str, Any]) -> None:
    for name, most in (("rope_theta", 1e12), ("partial_rotary_factor", 1.0), ("factor", 1e6)):
        value = rope.get(name, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise GraphError(f"model.config.rope_parameters.{name}: found {repr(value)[:60]}, expected a number above 0 and at "
                             f"most {most:g}")


def _derive(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Fill in what follows from other fields, and bring the position encoding of older files into one form."""
    if family == "gpt2":
        config["n_inner"] = config["n_inner"] or 4 * config["n_embd"]
        hidden, heads = config["n_embd"], config["n_head"]
    else:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        scaling = config.pop("rope_scaling", None) or {}
        if not isinstance(scaling, dict):
            raise GraphError(f"model.config.rope_scaling: found {repr(scaling)[:60]}, expected fields such as rope_type and "
                             "factor")
        rope = {**config["rope_parameters"], **scaling}
        rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
        if config.get("rope_theta") is not None:
            rope["rope_theta"] = config["rope_theta"]
        config.pop("rope_theta", None)
        if family == "gpt_neox":
            for old, new in (("rotary_pct", "partial_rotary_factor"), ("rotary_emb_base", "rope_theta")):
                if config.get(old) is not None:
                    rope[new] = config[old]
                config.pop(old, None)
            rope.setdefault("partial_rotary_factor", 0.25)
        _check_rope(rope)
        config["rope_parameters"] = rope
    if "num_key_value_heads" in config:
        config["num_key_value_heads"] = config["num_key_value_heads"] or heads
    if "head_dim" in config:
        config["head_dim"] = config["head_dim"] or hidden // heads
    if ("head_dim" not in config and hidden % heads) or heads % config.get("num_key_value_heads", 1):
        raise GraphError(f"model.config: {heads} attention heads do not divide hidden size {hidden} or are not divided by "
                         f"{config.get('num_key_value_heads', heads)} key-value heads; change one of them")
    return config
