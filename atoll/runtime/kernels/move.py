"""Moving and summing buffers.

The gradient chunk of a bucket and what a collective makes of it share one piece of memory where nobody else still reads
the chunk: ``reduced`` ends in the bucket itself, so a sum over replicas costs no second copy of the gradients.
"""

from __future__ import annotations

from typing import cast

import torch

from atoll.errors import ProgramError
from atoll.program.instructions import Buffer, Load, Native, Receive, Reduce, Save, Send
from atoll.runtime.worker_state import StepState

__all__ = ["chunk_of", "land", "load", "native", "receive", "reduce", "save", "send", "tensor_of"]

_LISTS = frozenset({"activation", "delta"})
_CHUNKS = frozenset({"gradient", "incoming", "partial", "reduced"})


def chunk_of(state: StepState, buffer: Buffer) -> torch.Tensor:
    """The piece of the gradient bucket that a chunk buffer stands for."""
    return state.world.store.chunk(int(buffer[1]), int(buffer[2]))


def tensor_of(state: StepState, buffer: Buffer) -> torch.Tensor:
    """The one tensor of a buffer that is neither activation nor delta."""
    value = state.values.get(buffer)
    if value is not None:
        return cast(torch.Tensor, value)
    if buffer[0] in ("gradient", "partial", "reduced"):
        return chunk_of(state, buffer)
    raise ProgramError(f"{buffer} is read before it is written")


def send(state: StepState, instruction: Send) -> int:
    """Hand a buffer to the link; returns the payload bytes."""
    buffer = instruction.buffer
    tensors = state.values[buffer] if buffer[0] in _LISTS else [tensor_of(state, buffer)]
    return state.world.channel.send(instruction.peer, state.label(buffer), tensors)


def receive(state: StepState, instruction: Receive) -> int:
    """Take the next message of the peer; a finished sum goes straight into the gradient bucket."""
    buffer = instruction.buffer
    tensors = state.world.channel.receive(instruction.peer, state.label(buffer))
    size = sum(tensor.nbytes for tensor in tensors)
    if buffer[0] in _LISTS:
        state.values[buffer] = [tensor.to(state.world.device) for tensor in tensors]
    elif buffer[0] == "reduced":
        # A finished sum contains this worker's own chunk, so that chunk has long left: it may be overwritten.
        chunk_of(state, buffer).copy_(tensors[0])
    elif buffer[0] in _CHUNKS:
        state.values[buffer] = tensors[0].to(state.world.device)
    else:
        state.values[buffer] = tensors[0]
    return size


def reduce(state: StepState, instruction: Reduce) -> int:
    """Add the sources in the order given. Returns the bytes read."""
    sources = [tensor_of(state, buffer) for buffer in instruction.sources]
    size = sum(source.nbytes for source in sources)
    target = chunk_of(state, instruction.target) if instruction.target in state.in_place else torch.empty_like(sources[0])
    if len(sources) == 1:
        target.copy_(sources[0])
    else:
        total = sources[0]
        for source in sources[1:-1]:
            total = total + source
        torch.add(total, sources[-1], out=target)
    if instruction.target not in state.in_place:
        state.values[instruction.target] = target
    return size


def native(state: StepState, instruction: Native) -> int:
    """A sum over the group by the library, in place. Returns the bytes of the vector."""
    tensor = tensor_of(state, instruction.source)
    if instruction.target not in state.in_place:
        tensor = tensor.clone()
        state.values[instruction.target] = tensor
    state.world.channel.all_reduce(instruction.group, tensor)
    return tensor.nbytes


def land(state: StepState, gradients: tuple[Buffer, ...]) -> None:
    """Bring sums that were made outside the bucket into it. The step is committed by now: whoever needed the chunk that is
    overwritten has voted, so has received it."""
    for buffer in gradients:
        if buffer[0] == "reduced" and buffer in state.values:
            chunk_of(state, buffer).copy_(state.values[buffer])


def load(state: StepState, instruction: Load) -> int:
    """Fetch what the data set supplies to the stage for one microbatch. Returns its bytes."""
    world = state.world
    first = state.first + instruction.microbatch * state.samples
    batch = world.batches.microbatch(state.split, state.step, first, state.samples)
    wanted = world.stages[instruction.stage].inputs
    tensors = {name: tensor.to(world.device) for name, tensor in batch.items() if name in wanted}
    state.values["input", instruction.stage, instruction.microbatch] = tensors
    return sum(tensor.nbytes for tensor in tensors.values())


def save(state: StepState, instruction: Save) -> int:
    """Write this worker's state to the checkpoint store. Returns the bytes written."""
    if state.world.save is None:
        raise ProgramError("the program saves, but this worker was given no checkpoint store")
    return state.world.save(instruction, state.step)
