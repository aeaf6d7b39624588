"""Sampling from a checkpoint. Shape legend: S tokens so far, V vocabulary."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from atoll.errors import CheckpointError, DataError, GraphError
from atoll.graph.config import model_config, position_limit
from atoll.graph.spec import ModelSpec
from atoll.runtime.checkpoint.trained import Trained, open_trained
from atoll.runtime.export import hugging_face_model

__all__ = ["check_sampling", "choose", "generate"]

NextLogits = Callable[[list[int]], torch.Tensor]
"""All tokens so far in, logits (V,) of the next one out."""


def generate(run: str | os.PathLike[str], prompt: str = "", tokens: int = 200, temperature: float = 0.8,
             top_k: int | None = 50, top_p: float | None = None, seed: int = 0, *, device: str = "cpu",
             say: Callable[[str], None] | None = None) -> str:
    """Continue ``prompt`` by up to ``tokens`` tokens and return the prompt with its continuation.

    Stops early where the model ends the document. ``temperature`` 0 takes the likeliest token; ``top_k`` and ``top_p``
    (Holtzman et al., 2020) narrow the choice. The same arguments give the same text. ``say`` is given the notes of the
    checkpoint. Raises ``CheckpointError``, ``DataError`` for impossible arguments, ``GraphError`` for a module without a
    ``logits`` method.
    """
    _check(tokens, temperature, top_k, top_p)
    trained = open_trained(run)
    for note in trained.checkpoint.notes:
        if say is not None:
            say(note)
    tokenizer = trained.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{trained.checkpoint.folder}: no tokenizer was kept with this run, so no text can be "
                              "made of it")
    source = torch.Generator().manual_seed(seed)
    begun = [int(token) for token in tokenizer.encode(prompt)] or [tokenizer.end]
    written = list(begun)
    with torch.inference_mode():
        logits_of = _next_logits(trained, device)
        for _ in range(tokens):
            token = choose(logits_of(written)[:tokenizer.size], temperature, top_k, top_p, source)
            if token == tokenizer.end:
                break
            written.append(token)
    return tokenizer.decode(written)


def _check(tokens: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if tokens < 0:
        raise DataError(f"generate: tokens is {tokens}, expected at least 0")
    if not temperature >= 0:
        raise DataError(f"generate: temperature is {temperature}, expected 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise DataError(f"generate: top_k is {top_k}, expected at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise DataError(f"generate: top_p is {top_p}, expected more than 0 and at most 1")


def choose(logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None,
           source: torch.Generator) -> int:
    """One token from ``logits`` (V,). ``top_p``: the fewest likeliest tokens whose probabilities reach it."""
    logits = logits.detach().double().cpu()
    if temperature == 0:
        return int(logits.argmax())
    ranked, order = (logits / temperature).sort(descending=True, stable=True)
    if top_k is not None:
        ranked = ranked[:top_k]
    probabilities = ranked.softmax(0)
    if top_p is not None:
        before = probabilities.cumsum(0) - probabilities
        probabilities = probabilities[before < top_p]
    return int(order[torch.multinomial(probabilities, 1, generator=source)])


def _next_logits(trained: Trained, device: str) -> NextLogits:
    resolved = model_config(trained.spec)
    if resolved is None:
        return _of_module(trained, device)
    return _of_hugging_face(hugging_face_model(trained).to(device), position_limit(*resolved), device)


def _of_hugging_face(model: Any, limit: int, device: str) -> NextLogits:
    """With a key-value cache; past ``limit`` positions the older half of the context is let go."""
    from transformers import DynamicCache

    word = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # renamed in 5.24
    cache, start, seen = DynamicCache(config=model.config), 0, 0

    def next_logits(tokens: list[int]) -> torch.Tensor:
        nonlocal cache, start, seen
        if len(tokens) - start > limit:
            cache, start = DynamicCache(config=model.config), len(tokens) - max(1, limit // 2)
            seen = start
        fresh = torch.tensor([tokens[seen:]], device=device)
        seen = len(tokens)
        logits: torch.Tensor = model(fresh, use_cache=True, **{word: cache}).logits[0, -1]
        return logits

    return next_logits


def check_sampling(spec: ModelSpec) -> None:
    """Raise ``GraphError`` when no text can be sampled from a module of the user's own."""
    from atoll.runtime.capture.models import imported

    if spec.module is not None and not callable(getattr(imported(spec.module), "logits", None)):
        raise GraphError(f"generate: {spec.module} has no method logits(tokens) that returns (samples, sequence, vocabulary); "
                         "add one to sample from this model, or leave out job.sample")


def _of_module(trained: Trained, device: str) -> NextLogits:
    """A user's module by its ``logits(tokens)`` method: int64 (1, S) in, (1, S, V) out; no cache."""
    from atoll.runtime.capture.models import model_source

    check_sampling(trained.spec)
    module: Any = model_source(trained.spec, trained.sequence_length).build()
    weights = trained.weights()
    module = module.to(next((tensor.dtype for tensor in weights.values()), torch.float32))
    result = module.load_state_dict(weights, strict=False)
    if result.unexpected_keys:
        raise CheckpointError(f"checkpoint {trained.checkpoint.folder}: {trained.spec.module} has no weight "
                              f"{result.unexpected_keys[0]}")
    module = module.to(device).eval()

    def next_logits(tokens: Sequence[int]) -> torch.Tensor:
        window = torch.tensor([list(tokens[-trained.sequence_length:])], device=device)
        logits: torch.Tensor = module.logits(window)[0, -1]
        return logits

    return next_logits
