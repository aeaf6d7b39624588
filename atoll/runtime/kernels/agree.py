"""The end of a step: every worker says what it has, all learn the sums, and only then weights may change.

A vote is four float64 on the host: sum of squared gradients, sum of losses, tokens, count of workers that saw something
that is not finite.
"""

from __future__ import annotations

import math

import torch

from atoll.program.instructions import Commit, Update, Vote
from atoll.runtime.kernels.move import land, tensor_of
from atoll.runtime.state import sum_of_squares
from atoll.runtime.worker_state import StepState

__all__ = ["commit", "update", "vote"]


def vote(state: StepState, instruction: Vote) -> int:
    """Write this worker's vote: squares of the buckets it counts, its loss and its tokens."""
    store = state.world.store
    squares = 0.0
    for bucket in instruction.counted:
        if any(("reduced", bucket, index) in state.values for index in range(store.buckets[bucket].chunks)):
            pieces = [tensor_of(state, ("reduced", bucket, index)) for index in range(store.buckets[bucket].chunks)]
        else:
            pieces = [store.flats[bucket]]
        squares += sum(float(sum_of_squares(piece)) for piece in pieces)
    loss = 0.0 if state.loss is None else float(state.loss)
    broken = not (math.isfinite(squares) and math.isfinite(loss))
    state.values["vote", instruction.worker] = torch.tensor([squares, loss, state.tokens, broken], dtype=torch.float64)
    return 0


def commit(state: StepState, instruction: Commit) -> int:
    """Read everyone's sums; the step counts if all of them are finite."""
    squares, loss, tokens, broken = tensor_of(state, ("total",)).tolist()
    state.loss_sum, state.total_tokens = loss, round(tokens)
    state.gradient_norm = math.sqrt(squares) if squares >= 0 else squares
    state.committed = broken == 0 and math.isfinite(squares) and math.isfinite(loss)
    state.values["commit",] = state.committed
    return 0


def update(state: StepState, instruction: Update) -> int:
    """Clip by the global norm and take one optimizer step; nothing when the step is not committed."""
    world = state.world
    if not state.committed:
        return 0
    land(state, instruction.gradients)
    limit = world.optimizer_spec.clip_norm
    if 0 < limit < state.gradient_norm:
        world.store.scale(limit / state.gradient_norm)
    world.optimizer.update(state.learning_rate)
    world.store.publish()
    return 0
