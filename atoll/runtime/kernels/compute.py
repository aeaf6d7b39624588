"""Stage compute: forward, recompute, and backward whole or split. Autograd stays inside a stage.

A stage's inputs become fresh leaves, so one microbatch's graph ends at the stage's border; what crosses it is data.
Values in the step's table: ("input", s, m) is a dictionary name -> tensor; ("activation", s, t, m) and ("delta", s, t, m) are
lists in the order of the edge's tensors (deltas: only of those that carry a gradient).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atoll.graph.graph import Edge
from atoll.program.instructions import Backward, BackwardInput, BackwardWeight, Forward, Recompute
from atoll.runtime.worker_state import StepState

__all__ = ["backward", "backward_input", "backward_weight", "forward", "recompute"]


@dataclass(slots=True)
class Saved:
    """One microbatch's autograd graph at a stage: the leaves it begins with and the outputs it ends with."""

    leaves: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


def _gathered(state: StepState, instruction: Forward) -> dict[str, torch.Tensor]:
    """All named tensors that the stage reads for this microbatch, cut off from whoever made them. Activations of other
    stages ask for a gradient where they can have one; what the data set supplies does not."""
    stage, microbatch = instruction.stage, instruction.microbatch
    tensors: dict[str, torch.Tensor] = {}
    if instruction.takes_input:
        tensors.update(state.values["input", stage, microbatch])
    for source in instruction.sources:
        edge = state.world.edges[source, stage]
        received = state.values["activation", source, stage, microbatch]
        for spec, tensor in zip(edge.tensors, received, strict=True):
            tensors[spec.name] = tensor.detach().requires_grad_(spec.carries_gradient)
    return tensors


def forward(state: StepState, instruction: Forward) -> int:
    """Run a stage on one microbatch; ``keep`` decides what stays for the backward."""
    world, stage, microbatch = state.world, instruction.stage, instruction.microbatch
    tensors = _gathered(state, instruction)
    if instruction.keep == "saved":
        outputs = world.stages[stage](tensors)
        state.values["saved", stage, microbatch] = Saved(tensors, outputs)
    else:
        with torch.no_grad():
            outputs = world.stages[stage](tensors)
        if instruction.keep:
            state.values[instruction.keep, stage, microbatch] = tensors
    for target in instruction.targets:
        edge = world.edges[stage, target]
        state.values["activation", stage, target, microbatch] = [outputs[tensor.name].detach() for tensor in edge.tensors]
    if instruction.gives_loss:
        loss = outputs[world.loss].detach().double()
        state.loss = loss if state.loss is None else state.loss + loss
        state.tokens += state.samples * world.tokens_per_sample
    return 0


def recompute(state: StepState, instruction: Recompute) -> int:
    """Run the forward again from the kept inputs, this time for autograd; its loss was counted the first time."""
    place = (instruction.stage, instruction.microbatch)
    leaves = state.values[("kept", *place)]
    state.values[("saved", *place)] = Saved(leaves, state.world.stages[instruction.stage](leaves))
    return 0


def _differentiable(edge: Edge) -> list[str]:
    return [tensor.name for tensor in edge.tensors if tensor.carries_gradient]


def _deltas(state: StepState, instruction: Backward | BackwardInput, saved: Saved) -> dict[str, torch.Tensor]:
    """Gradient of each output; what several stages hand back is added in the order of the stages."""
    deltas: dict[str, torch.Tensor] = {}
    for target in sorted(instruction.targets):
        names = _differentiable(state.world.edges[instruction.stage, target])
        received = state.values["delta", instruction.stage, target, instruction.microbatch]
        for name, delta in zip(names, received, strict=True):
            deltas[name] = deltas[name] + delta if name in deltas else delta
    loss = saved.outputs.get(state.world.loss)
    if loss is not None:
        deltas[state.world.loss] = torch.ones_like(loss) / state.world.step_tokens
    return deltas


def _descend(state: StepState, instruction: Backward | BackwardInput) -> None:
    """Run autograd from the stage's outputs and hand the inputs' gradients to the stages they came from."""
    world, stage, microbatch = state.world, instruction.stage, instruction.microbatch
    if not state.gradients_clear:
        world.store.clear()
        state.gradients_clear = True
    saved: Saved = state.values["saved", stage, microbatch]
    deltas = _deltas(state, instruction, saved)
    roots = [name for name in deltas if saved.outputs[name].requires_grad]
    if roots:
        torch.autograd.backward([saved.outputs[name] for name in roots], [deltas[name] for name in roots])
    for source in instruction.sources:
        leaves = [saved.leaves[name] for name in _differentiable(world.edges[source, stage])]
        state.values["delta", source, stage, microbatch] = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    saved.leaves, saved.outputs = {}, {}


def backward(state: StepState, instruction: Backward) -> int:
    """Gradients of the stage's inputs and weights."""
    _descend(state, instruction)
    state.world.store.collect(instruction.stage)
    return 0


def backward_input(state: StepState, instruction: BackwardInput) -> int:
    """Gradients of the stage's inputs; matrix products leave their weights' gradients for ``backward_weight``."""
    stage = state.world.stages[instruction.stage]
    deferred = stage.start_deferring()
    try:
        _descend(state, instruction)
    finally:
        stage.stop_deferring()
    state.values["deferred", instruction.stage, instruction.microbatch] = deferred
    state.world.store.collect(instruction.stage)
    return 0


def backward_weight(state: StepState, instruction: BackwardWeight) -> int:
    """The weights' gradients that were put off."""
    deferred = state.values["deferred", instruction.stage, instruction.microbatch]
    with torch.no_grad():
        state.world.stages[instruction.stage].run_deferred(deferred)
    state.world.store.collect(instruction.stage)
    return 0
