"""Known shapes: name -> (family, configuration fields that differ from the family's defaults).

Sources: GPT-2: Radford et al. 2019 and the configurations published with the weights. GPT-3: Brown et al. 2020, table 2.1
(with 5120 for the paper's 5140, and 16 heads for the 1.3B model, whose printed 24 do not divide 2048). LLaMA: Touvron et
al. 2023a; Llama 2: Touvron et al. 2023b; Llama 3, 3.1, 3.2: Dubey et al. 2024 and the published config.json files.
Qwen2.5: Yang et al. 2024; Qwen3: Yang et al. 2025, with their config.json files. Pythia: Biderman et al. 2023, table 1.
GPT-NeoX-20B: Black et al. 2022.
"""

from __future__ import annotations

from typing import Any

__all__ = ["PRESETS"]


def _gpt2(layers: int, hidden: int, heads: int, positions: int = 1024) -> tuple[str, dict[str, Any]]:
    return "gpt2", {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": positions}


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, positions: int,
           **more: Any) -> tuple[str, dict[str, Any]]:
    return "llama", {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
                     "num_key_value_heads": kv_heads, "intermediate_size": intermediate,
                     "max_position_embeddings": positions, **more}


def _llama3(layers: int, hidden: int, heads: int, intermediate: int, positions: int = 131072, factor: float | None = 8.0,
            **more: Any) -> tuple[str, dict[str, Any]]:
    """``factor``: how far the frequencies of 8192 positions are stretched (None: not at all)."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500000.0}
    if factor is not None:
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return _llama(layers, hidden, heads, 8, intermediate, positions, vocab_size=128256, rms_norm_eps=1e-5,
                  rope_parameters=rope, **more)


def _qwen(family: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, tied: bool,
          positions: int, eps: float = 1e-6) -> tuple[str, dict[str, Any]]:
    config = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
              "num_key_value_heads": kv_heads, "intermediate_size": intermediate, "vocab_size": vocabulary,
              "tie_word_embeddings": tied, "max_position_embeddings": positions, "rms_norm_eps": eps,
              "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
    return family, config | ({"head_dim": 128} if family == "qwen3" else {})


def _qwen25(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, tied: bool,
            positions: int, eps: float = 1e-6) -> tuple[str, dict[str, Any]]:
    return _qwen("qwen2", layers, hidden, heads, kv_heads, intermediate, vocabulary, tied, positions, eps)


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int, tied: bool) -> tuple[str, dict[str, Any]]:
    return _qwen("qwen3", layers, hidden, heads, 8, intermediate, 151936, tied, 40960)


def _pythia(layers: int, hidden: int, heads: int, vocabulary: int = 50304) -> tuple[str, dict[str, Any]]:
    return "gpt_neox", {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
                        "intermediate_size": 4 * hidden, "vocab_size": vocabulary}


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-small": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-125m": _gpt2(12, 768, 12, 2048),
    "gpt3-350m": _gpt2(24, 1024, 16, 2048),
    "gpt3-760m": _gpt2(24, 1536, 16, 2048),
    "gpt3-1.3b": _gpt2(24, 2048, 16, 2048),
    "gpt3-2.7b": _gpt2(32, 2560, 32, 2048),
    "gpt3-6.7b": _gpt2(32, 4096, 32, 2048),
    "gpt3-13b": _gpt2(40, 5120, 40, 2048),
    "gpt3-175b": _gpt2(96, 12288, 96, 2048),
    "llama-7b": _llama(32, 4096, 32, 32, 11008, 2048),
    "llama-13b": _llama(40, 5120, 40, 40, 13824, 2048),
    "llama-30b": _llama(60, 6656, 52, 52, 17920, 2048),
    "llama-65b": _llama(80, 8192, 64, 64, 22016, 2048),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 4096, rms_norm_eps=1e-5),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 4096, rms_norm_eps=1e-5),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 4096, rms_norm_eps=1e-5),
    "llama-3-8b": _llama3(32, 4096, 32, 14336, positions=8192, factor=None),
    "llama-3-70b": _llama3(80, 8192, 64, 28672, positions=8192, factor=None),
    "llama-3.1-8b": _llama3(32, 4096, 32, 14336),
    "llama-3.1-70b": _llama3(80, 8192, 64, 28672),
    "llama-3.1-405b": _llama3(126, 16384, 128, 53248),
    "llama-3.2-1b": _llama3(16, 2048, 32, 8192, factor=32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama3(28, 3072, 24, 8192, factor=32.0, head_dim=128, tie_word_embeddings=True),
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, 151936, True, 32768),
    "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, 151936, True, 131072),
    "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11008, 151936, True, 32768),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18944, 152064, False, 131072),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13824, 152064, False, 131072, 1e-5),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27648, 152064, False, 131072, 1e-5),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29568, 152064, False, 131072, 1e-5),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, False),
    "pythia-70m": _pythia(6, 512, 8),
    "pythia-160m": _pythia(12, 768, 12),
    "pythia-410m": _pythia(24, 1024, 16),
    "pythia-1b": _pythia(16, 2048, 8),
    "pythia-1.4b": _pythia(24, 2048, 16),
    "pythia-2.8b": _pythia(32, 2560, 32),
    "pythia-6.9b": _pythia(32, 4096, 32, 50432),
    "pythia-12b": _pythia(36, 5120, 40, 50688),
    "gpt-neox-20b": ("gpt_neox", {"num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64,
                                  "intermediate_size": 24576, "vocab_size": 50432, "hidden_act": "gelu_fast"}),
}
