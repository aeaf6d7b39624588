"""Fill parameters by name: from a seed, or from a Hugging Face folder. Neither depends on how the model is cut."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from atoll.errors import GraphError
from atoll.runtime.capture.stage import Captured

__all__ = ["initial_value", "initialise", "load_weights", "seed_of"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_STORED_AS = {"lm_head.weight": "embed_out.weight"}  # GPT-NeoX files keep the name of the first release


def seed_of(seed: int, name: str) -> int:
    """The seed of one parameter: 63 bits of SHA-256 of the job's seed and the parameter's name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1


def initial_value(captured: Captured, name: str, seed: int) -> torch.Tensor:
    """The first value of parameter ``name``: float32, on the CPU.

    It is drawn as the module's own construction draws it (``reset_parameters``, ``nn.init``, Hugging Face's
    ``_init_weights``: the recorded construction is replayed for this tensor alone), from a seed of its own.
    """
    return captured.traced.tape.value(captured.traced.origins[name], seed_of(seed, name))


def initialise(parameters: Mapping[str, torch.Tensor], captured: Captured, seed: int) -> None:
    """Fill ``parameters`` in place from ``seed``. Made in float32 on the CPU and then cast, so every device, dtype and
    plan starts from the same numbers. Needs memory for one parameter at a time."""
    for name, parameter in parameters.items():
        with torch.no_grad():
            parameter.copy_(initial_value(captured, name, seed))


def load_weights(parameters: Mapping[str, torch.Tensor], captured: Captured, folder: str | Path) -> None:
    """Fill ``parameters`` in place from the safetensors of a Hugging Face folder, reading only those tensors.

    A tied weight is found under any of its names; a folder saved from the base model alone (names without the leading
    "transformer." or "model.") is understood. Raises ``GraphError`` for a missing file or name and a wrong shape.
    """
    from safetensors import SafetensorError, safe_open

    where = _files(Path(folder))
    found = {name: _stored_name(name, captured, where, folder) for name in parameters}
    for path in sorted({where[stored] for stored in found.values()}):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name, stored in found.items():
                    if where[stored] == path:
                        _fill(parameters[name], file.get_tensor(stored), name, path)
        except (OSError, SafetensorError) as error:
            raise GraphError(f"model.folder: {path} cannot be read: {error}; download it again") from None


def _fill(parameter: torch.Tensor, value: torch.Tensor, name: str, path: Path) -> None:
    if value.shape != parameter.shape:
        raise GraphError(f"model.folder: {path} holds {name} with shape {list(value.shape)}, but config.json asks for "
                         f"{list(parameter.shape)}; they do not belong together")
    with torch.no_grad():
        parameter.copy_(value)


def _files(folder: Path) -> dict[str, Path]:
    """Stored tensor name -> the file that holds it."""
    from safetensors import SafetensorError, safe_open

    if (folder / INDEX).exists():
        try:
            index = json.loads((folder / INDEX).read_text())["weight_map"]
        except (OSError, ValueError, KeyError):
            raise GraphError(f"model.folder: {folder / INDEX} is not an index of safetensors; download it again") from None
        return {name: folder / file for name, file in index.items()}
    if not (folder / SINGLE).exists():
        raise GraphError(f"model.folder: {folder} has neither {SINGLE} nor {INDEX}; save the model as safetensors "
                         "(model.save_pretrained) or use weights: seed")
    try:
        with safe_open(folder / SINGLE, framework="pt", device="cpu") as file:
            return dict.fromkeys(file.keys(), folder / SINGLE)
    except (OSError, SafetensorError) as error:
        raise GraphError(f"model.folder: {folder / SINGLE} cannot be read: {error}; download it again") from None


def _stored_name(name: str, captured: Captured, where: Iterable[str], folder: str | Path) -> str:
    names = (name, *captured.traced.aliases[name])
    elsewhere = [_STORED_AS[other] for other in names if other in _STORED_AS]
    for candidate in (*names, *elsewhere, *(other.partition(".")[2] for other in names)):
        if candidate in where:
            return candidate
    raise GraphError(f"model.folder: {folder} has no weight {' or '.join(map(repr, names))}; it belongs to another model")
