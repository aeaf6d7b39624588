"""Instruction -> kernel: one line each, complete by test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.program.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Commit,
    Forward,
    Instruction,
    Load,
    Native,
    Receive,
    Recompute,
    Reduce,
    Save,
    Send,
    Update,
    Vote,
)
from atoll.runtime.kernels import agree, compute, move
from atoll.runtime.worker_state import StepState

__all__ = ["KERNELS", "Kernel"]

Kernel = Callable[[StepState, Any], int]
"""Executes one instruction on the step's state; returns the bytes it moved (0 for compute)."""

KERNELS: Mapping[type[Instruction], Kernel] = {
    Forward: compute.forward,
    Recompute: compute.recompute,
    Backward: compute.backward,
    BackwardInput: compute.backward_input,
    BackwardWeight: compute.backward_weight,
    Update: agree.update,
    Send: move.send,
    Receive: move.receive,
    Native: move.native,
    Reduce: move.reduce,
    Load: move.load,
    Save: move.save,
    Vote: agree.vote,
    Commit: agree.commit,
}
