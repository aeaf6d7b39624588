"""Find what a run left: its newest sound checkpoint, its model, its tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll.errors import CheckpointError
from atoll.graph.spec import ModelSpec
from atoll.records import from_plain
from atoll.runtime.checkpoint.state import PARAMETER
from atoll.runtime.checkpoint.store import MANIFEST, Checkpoint, open_checkpoint, open_latest
from atoll.runtime.data.tokenizer import Tokenizer, load_tokenizer

__all__ = ["CHECKPOINTS", "TOKENIZER", "Trained", "open_trained"]

CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """``tokenizer`` is None when the run kept none (a module with inputs of its own)."""

    checkpoint: Checkpoint
    spec: ModelSpec
    sequence_length: int
    tokenizer: Tokenizer | None

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters by logical name, as the optimizer holds them (master dtype)."""
        start = f"{PARAMETER}/"
        return {name.removeprefix(start): self.checkpoint.read(name)
                for name in self.checkpoint.names if name.startswith(start)}


def open_trained(path: str | os.PathLike[str]) -> Trained:
    """Open a run folder (``checkpoints/``, ``tokenizer/``), a folder of checkpoints, or one ``step-...`` folder.

    Raises ``CheckpointError`` when there is no sound checkpoint.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder; name a run (runs/NAME) or one of its checkpoints")
    if (path / MANIFEST).is_file():
        checkpoint = open_checkpoint(path)
    else:
        checkpoint = open_latest(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)
    job = checkpoint.facts.job
    spec = from_plain(job["model"], ModelSpec, source=f"{checkpoint.folder}/{MANIFEST}: model")
    near = (checkpoint.folder.parent, checkpoint.folder.parent.parent)
    found = next((folder / TOKENIZER for folder in near if (folder / TOKENIZER / "tokenizer.json").is_file()), None)
    return Trained(checkpoint=checkpoint, spec=spec, sequence_length=int(job["sequence_length"]),
                   tokenizer=None if found is None else load_tokenizer(found))
