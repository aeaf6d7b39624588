"""Closed forms of the literature: what a paper's tables are computed with, and a check on every graph.

Letters: B sequences a step, s sequence length, b sequences a microbatch, h hidden size, h_kv width of keys, f width of the
gated MLP, a attention heads, L layers, V vocabulary, p pipeline stages, v chunks a stage, t tensor-parallel ranks, n workers.
Sources: Narayanan et al. 2021 (SC21, hardware FLOPs with full recompute), Korthikanti et al. 2022 (activation bytes, model
FLOPs), Rajbhandari et al. 2020 (ZeRO), Thakur et al. 2005 (collectives).
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, log2

__all__ = [
    "activation_bytes_full", "activation_bytes_per_layer", "activation_bytes_selective", "all_gather_ns", "all_to_all_ns",
    "first_stage_layers", "gpt_hardware_flops", "gpt_model_flops", "gpt_parameters", "llama_model_flops", "llama_parameters",
    "model_state_bytes", "pipeline_bytes", "ring_all_reduce_ns", "tensor_parallel_bytes_per_layer", "tree_all_reduce_ns",
]


def gpt_parameters(vocabulary: int, positions: int, hidden: int, layers: int) -> int:
    """V·h + s_max·h + L(12h² + 13h) + 2h: tied embeddings, biases everywhere."""
    return (vocabulary + positions) * hidden + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


def llama_parameters(vocabulary: int, hidden: int, kv_width: int, intermediate: int, layers: int, tied: bool = False) -> int:
    """V·h (twice when untied) + L(2h² + 2h·h_kv + 3h·f + 2h) + h."""
    layer = 2 * hidden**2 + 2 * hidden * kv_width + 3 * hidden * intermediate + 2 * hidden
    return vocabulary * hidden * (1 if tied else 2) + layers * layer + hidden


def gpt_model_flops(batch: int, length: int, hidden: int, layers: int, vocabulary: int) -> int:
    """72·B·L·s·h²(1 + s/6h + V/12hL): forward and backward of a step, attention counted in full (not halved by causality)."""
    return batch * length * (72 * layers * hidden**2 + 12 * layers * length * hidden + 6 * hidden * vocabulary)


def gpt_hardware_flops(batch: int, length: int, hidden: int, layers: int, vocabulary: int) -> int:
    """96·B·L·s·h²(1 + s/6h + V/16hL): every layer's forward is done twice (full recompute), the head's is not."""
    return batch * length * (96 * layers * hidden**2 + 16 * layers * length * hidden + 6 * hidden * vocabulary)


def llama_model_flops(batch: int, length: int, hidden: int, kv_width: int, intermediate: int, layers: int,
                      vocabulary: int) -> int:
    """3·B·s·L(4h² + 4h·h_kv + 6h·f + 4s·h) + 6·B·s·h·V: gated MLP, grouped keys; attention counted in full."""
    layer = 4 * hidden**2 + 4 * hidden * kv_width + 6 * hidden * intermediate + 4 * length * hidden
    return batch * length * (3 * layers * layer + 6 * hidden * vocabulary)


def activation_bytes_per_layer(length: int, samples: int, hidden: int, heads: int, tensor_parallel: int = 1,
                               sequence_parallel: bool = False) -> Fraction:
    """Bytes a GPT layer keeps in 16 bit, dropout masks included and attention scores stored.

    s·b·h(34 + 5as/h); tensor parallel: s·b·h(10 + 24/t + 5as/(ht)); with sequence parallel: s·b·h/t·(34 + 5as/h).
    """
    scores = Fraction(5 * heads * length, hidden)
    unit, t = length * samples * hidden, tensor_parallel
    if sequence_parallel:
        return unit * (34 + scores) / t
    return unit * (10 + Fraction(24, t) + scores / t)


def activation_bytes_selective(length: int, samples: int, hidden: int, tensor_parallel: int = 1) -> Fraction:
    """s·b·h·34/t: attention scores computed again; with tensor and sequence parallelism."""
    return Fraction(34 * length * samples * hidden, tensor_parallel)


def activation_bytes_full(length: int, samples: int, hidden: int) -> int:
    """2·s·b·h: only a layer's input is kept."""
    return 2 * length * samples * hidden


def first_stage_layers(layers: int, stages: int, chunks: int = 1) -> Fraction:
    """How many layers' activations the first stage of 1F1B holds: L, and L(1 + (p-1)/pv) when interleaved."""
    return Fraction(layers) if chunks == 1 else layers * (1 + Fraction(stages - 1, stages * chunks))


def model_state_bytes(parameters: int, gradient_bytes: int = 2, zero: int = 0, workers: int = 1) -> Fraction:
    """Weights 2 + gradients 2 (4 when summed in float32) + Adam 12 bytes a parameter; ZeRO-1/2/3 divide the 12, the 12 and
    the gradients, and all of it, by ``workers``."""
    weights, gradients, states = Fraction(2), Fraction(gradient_bytes), Fraction(12)
    if zero >= 1:
        states /= workers
    if zero >= 2:
        gradients /= workers
    if zero >= 3:
        weights /= workers
    return parameters * (weights + gradients + states)


def ring_all_reduce_ns(size_bytes: int, workers: int, bytes_per_s: int, latency_ns: int) -> Fraction:
    """2(n-1)/n·S/bandwidth + 2(n-1)·latency."""
    return 2 * all_gather_ns(size_bytes, workers, bytes_per_s, latency_ns)


def all_gather_ns(size_bytes: int, workers: int, bytes_per_s: int, latency_ns: int) -> Fraction:
    """(n-1)/n·S/bandwidth + (n-1)·latency, S the whole (gathered or scattered) tensor; reduce-scatter is the same."""
    return Fraction((workers - 1) * size_bytes * 10**9, workers * bytes_per_s) + (workers - 1) * latency_ns


def all_to_all_ns(size_bytes: int, workers: int, bytes_per_s: int, latency_ns: int) -> Fraction:
    """(n-1)/n·S/bandwidth + (n-1)·latency, S what each worker holds."""
    return all_gather_ns(size_bytes, workers, bytes_per_s, latency_ns)


def tree_all_reduce_ns(size_bytes: int, workers: int, bytes_per_s: int, latency_ns: int) -> Fraction:
    """2·S/bandwidth + 2·log2(n)·latency (a tree of ceil(log2 n) levels)."""
    if workers == 1:
        return Fraction(0)
    return Fraction(2 * size_bytes * 10**9, bytes_per_s) + 2 * ceil(log2(workers)) * latency_ns


def pipeline_bytes(length: int, samples: int, hidden: int, tensor_parallel: int = 1, chunks: int = 1) -> Fraction:
    """s·b·h·2 bytes a microbatch and boundary in 16 bit; divided by t when scattered, times v when interleaved."""
    return Fraction(2 * length * samples * hidden * chunks, tensor_parallel)


def tensor_parallel_bytes_per_layer(length: int, samples: int, hidden: int, full_recompute: bool = False) -> int:
    """Bytes all-reduced per layer and microbatch: 4 times s·b·h·2 (two forward, two backward), 6 with full recompute."""
    return (6 if full_recompute else 4) * 2 * length * samples * hidden
