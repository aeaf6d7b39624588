"""From a ``ModelSpec`` to something that can be traced: a module that takes the model's inputs and returns its loss.

Known families go through ``transformers``; a user's own module comes by import path. Nothing here allocates weights:
the caller decides under which device context ``ModelSource.build`` runs.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from atoll.errors import GraphError
from atoll.graph.build import model_name
from atoll.graph.config import model_config, position_limit
from atoll.graph.spec import ModelSpec

__all__ = ["LanguageModelLoss", "ModelSource", "imported", "model_source"]

ATTENTION = "atoll"
_SUPPORTED_ATTENTION = ("scaling", "dropout", "is_causal", "position_ids", "use_cache", "cache_position", "output_attentions")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """``prefix``: what precedes the model's own parameter names in ``build()``. ``inputs``: name -> meta tensor for
    ``samples`` = 1 (axis 0 is the batch). ``cast_buffers``: buffers follow the compute dtype, as in ``module.to(dtype)``."""

    name: str
    build: Callable[[], nn.Module]
    prefix: str
    inputs: Mapping[str, torch.Tensor]
    cast_buffers: bool


class LanguageModelLoss(nn.Module):
    """A Hugging Face causal model with the loss training descends: cross entropy summed over all tokens.

    ``tokens``, ``targets``: int64, (samples, sequence); targets of -100 count nothing. Logits are taken to float32.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens, use_cache=False).logits
        if logits.dtype != torch.float64:
            logits = logits.float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def model_source(spec: ModelSpec, sequence_length: int) -> ModelSource:
    """Return how to build the model of ``spec`` for sequences of ``sequence_length``.

    Raises ``GraphError`` for an unknown preset, family, field or import path, a sequence beyond the positions the model
    has, and a module whose inputs cannot be told.
    """
    resolved = model_config(spec)
    if resolved is None:
        return _user_source(spec, sequence_length)
    family, config = resolved
    limit = position_limit(family, config)
    if sequence_length > limit:
        raise GraphError(f"job.sequence_length: {sequence_length} is longer than the {limit} positions of {model_name(spec)}; "
                         "shorten it or raise the model's positions")

    def build() -> nn.Module:
        return LanguageModelLoss(_transformers_model(family, config))

    tokens = torch.empty(1, sequence_length, dtype=torch.int64, device="meta")
    return ModelSource(name=model_name(spec), build=build, prefix="model.", inputs={"tokens": tokens, "targets": tokens},
                       cast_buffers=False)


def _transformers_model(family: str, config: dict[str, Any]) -> nn.Module:
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
    fields = {name: value for name, value in config.items() if value is not None}
    for name in ("bos_token_id", "eos_token_id"):
        fields.setdefault(name, None)  # the families' defaults may lie outside a small vocabulary
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=torch.float32,
                                                            attn_implementation=ATTENTION)
        if hasattr(model, "initialize_weights"):
            model.initialize_weights()  # transformers 5 skips it under a meta device; the tape must see it
    except Exception as error:  # an activation it does not know, a rope_type without its fields, ...
        raise GraphError(f"model.config: transformers cannot build this {family}: {type(error).__name__}: {error}") from error
    return model.train()


def _attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
               attention_mask: torch.Tensor | None, **options: Any) -> tuple[torch.Tensor, None]:
    """Causal attention of packed sequences by SDPA. query (B, H, S, D), key and value (B, H_kv, S, D)."""
    window = options.pop("sliding_window", None)
    if window is not None and window < query.shape[2]:
        raise GraphError(f"model: attention within a sliding window of {window} is not supported for sequences of "
                         f"{query.shape[2]}; set use_sliding_window to false or shorten the sequences")
    strange = [name for name, given in options.items() if given is not None and name not in _SUPPORTED_ATTENTION]
    if strange or options.get("dropout"):
        raise GraphError(f"model: its attention asks for {', '.join(strange) or 'dropout'}, which is not supported")
    grouped = key.shape[1] != query.shape[1]
    result = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.get("scaling"),
                                                     enable_gqa=grouped)
    return result.transpose(1, 2).contiguous(), None


def _user_source(spec: ModelSpec, sequence_length: int) -> ModelSource:
    path = str(spec.module)
    kind = imported(path)

    def build() -> nn.Module:
        try:
            module = kind(**spec.arguments)
        except Exception as error:  # whatever the user's constructor makes of its arguments
            raise GraphError(f"model.arguments: {path} cannot be built: {type(error).__name__}: {error}") from error
        if not isinstance(module, nn.Module):
            raise GraphError(f"model.module: {path} gives {type(module).__name__}, expected a torch.nn.Module")
        return module.train()

    return ModelSource(name=model_name(spec), build=build, prefix="", inputs=_user_inputs(path, kind, sequence_length),
                       cast_buffers=True)


def imported(path: str) -> Any:
    """The class (or function) at "package.file:Class". Raises ``GraphError`` when it is not there or cannot be called."""
    file, _, name = path.partition(":")
    if not name:
        raise GraphError(f"model.module: found {path!r}, expected 'package.file:Class'")
    try:
        found = importlib.import_module(file)
    except ImportError as error:
        raise GraphError(f"model.module: {path!r} cannot be imported: {error}; run where the package can be found") from None
    except Exception as error:  # whatever the user's file does when it is read
        raise GraphError(f"model.module: {file} cannot be imported: {type(error).__name__}: {error}") from error
    kind = getattr(found, name, None)
    if not callable(kind):
        raise GraphError(f"model.module: {file!r} has no class {name!r}; it has "
                         f"{', '.join(sorted(other for other in vars(found) if other[0].isupper()))[:200] or 'none'}")
    return kind


def _user_inputs(path: str, kind: Any, sequence_length: int) -> dict[str, torch.Tensor]:
    forward = kind.forward if inspect.isclass(kind) else kind.__call__
    names = [name for name, parameter in inspect.signature(forward).parameters.items()
             if name != "self" and parameter.default is inspect.Parameter.empty]
    example = getattr(kind, "example_inputs", None)
    if example is not None:
        inputs = {name: tensor.to("meta") for name, tensor in example(1, sequence_length).items()}
        missing = [name for name in names if name not in inputs]
        if missing:
            raise GraphError(f"model.module: {path} has example_inputs without {', '.join(missing)}, which forward needs")
        return inputs
    strange = [name for name in names if name not in ("tokens", "targets")]
    if strange or not names:
        raise GraphError(f"model.module: {path}.forward takes {', '.join(strange) or 'nothing'}; name its inputs tokens and "
                         "targets, or give the class a static method example_inputs(samples, sequence_length) that returns "
                         "its inputs by name")
    return {name: torch.empty(1, sequence_length, dtype=torch.int64, device="meta") for name in names}
