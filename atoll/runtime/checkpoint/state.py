"""What of a worker goes into a checkpoint and comes back: "parameter/NAME" and "MOMENT/NAME" for each weight."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.store import Checkpoint
from atoll.runtime.state import ParameterStore
from atoll.runtime.worker_state import OptimizerKernel

__all__ = ["restore_worker", "worker_tensors"]

PARAMETER = "parameter"


def worker_tensors(store: ParameterStore, optimizer: OptimizerKernel,
                   names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """The live tensors to save: masters and moments of ``names`` (default: all the worker has). Copies nothing."""
    moments = optimizer.moments()
    tensors: dict[str, torch.Tensor] = {}
    for name in store.masters if names is None else names:
        tensors[f"{PARAMETER}/{name}"] = store.masters[name].detach()
        for kind, tensor in moments.get(name, {}).items():
            tensors[f"{kind}/{name}"] = tensor
    return tensors


def restore_worker(checkpoint: Checkpoint, store: ParameterStore, optimizer: OptimizerKernel) -> None:
    """Give a worker its weights and moments, whoever saved them. Raises ``CheckpointError`` when one is missing."""
    kinds = {name.partition("/")[0] for name in checkpoint.names} - {PARAMETER}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, master in store.masters.items():
        value = checkpoint.read(f"{PARAMETER}/{name}")
        if value.shape != master.shape:
            raise CheckpointError(f"{checkpoint.folder}: {name} has shape {tuple(value.shape)}, the model wants "
                                  f"{tuple(master.shape)}")
        store.load(name, value)
        moments[name] = {kind: checkpoint.read(f"{kind}/{name}") for kind in sorted(kinds)}
    if moments:
        optimizer.load(moments, checkpoint.facts.updates)
