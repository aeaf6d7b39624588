"""A checkpoint as a Hugging Face folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from atoll.errors import CheckpointError, GraphError, WorkplaceError
from atoll.graph.config import model_config
from atoll.runtime.checkpoint.shards import sync_folder
from atoll.runtime.checkpoint.trained import Trained, open_trained

__all__ = ["export", "hugging_face_model"]


def export(run: str | os.PathLike[str], out: str | os.PathLike[str], *, max_shard: str = "5GB",
           say: Callable[[str], None] | None = None) -> Path:
    """Write the newest sound checkpoint of ``run`` (or the checkpoint folder itself) to the new folder ``out``.

    Holds config.json, generation_config.json, model.safetensors (several and an index beyond ``max_shard``) in the dtype
    of the master weights, and the tokenizer. ``say`` is given a sentence for each thing the user should know. Written
    under another name first: ``out`` is whole or not there. Raises ``CheckpointError``, ``GraphError`` for a module that
    has no Hugging Face form, ``WorkplaceError`` when ``out`` exists or cannot be written.
    """
    target = Path(out)
    if target.exists():
        raise WorkplaceError(f"export: {target} already exists; name a folder that does not")
    trained = open_trained(run)
    for note in trained.checkpoint.notes:
        if say is not None:
            say(note)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with _quiet():
            temporary.mkdir(parents=True)
            model = hugging_face_model(trained, on_meta=True)
            model.save_pretrained(temporary, max_shard_size=max_shard)
            if trained.tokenizer is not None:
                trained.tokenizer.save(temporary)
        os.rename(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full; free space there" if full else error.strerror or str(error)
        raise WorkplaceError(f"export: {target} cannot be written: {reason}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep ``transformers`` from printing."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def hugging_face_model(trained: Trained, *, on_meta: bool = False) -> Any:
    """The ``transformers`` model of a checkpoint, in evaluation mode, with its weights.

    ``on_meta``: only the weights are real (enough to save them). Raises ``GraphError`` for a user's module and
    ``CheckpointError`` when a weight is missing, unknown or of another shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    resolved = model_config(trained.spec)
    if resolved is None:
        raise GraphError(f"model.module {trained.spec.module!r} has no Hugging Face form; its weights are in the "
                         "safetensors "
                         f"shards of {trained.checkpoint.folder} under their own names")
    family, config = resolved
    fields = {name: value for name, value in config.items() if value is not None}
    fields.update(dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")))
    if trained.tokenizer is not None and trained.tokenizer.end < config["vocab_size"]:
        fields.update(dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), trained.tokenizer.end))
    weights = trained.weights()
    dtype = next((tensor.dtype for tensor in weights.values()), torch.float32)
    with torch.device("meta" if on_meta else "cpu"), torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=dtype,
                                                 attn_implementation="sdpa")
    _fill(model, weights, trained)
    return model.eval()


def _fill(model: Any, weights: dict[str, torch.Tensor], trained: Trained) -> None:
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, tensor in weights.items():
        if own.get(name) != tuple(tensor.shape):
            found = f"expected shape {own[name]}" if name in own else "the model has no such weight"
            raise CheckpointError(f"checkpoint {trained.checkpoint.folder}: {name} of shape {tuple(tensor.shape)}: "
                                  f"{found}")
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    given = {id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False) if name in weights}
    for name, parameter in model.named_parameters():
        if id(parameter) not in given:
            raise CheckpointError(f"checkpoint {trained.checkpoint.folder}: the weight {name} is missing")
