"""Everything one worker may touch (``World``), what one step holds while it runs (``StepState``), what it yields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from atoll.graph.graph import Edge
from atoll.policies.optim.spec import OptimizerSpec
from atoll.program.instructions import Buffer, Forward, Save
from atoll.program.program import Program
from atoll.runtime.clock import Clock
from atoll.runtime.state import ParameterStore
from atoll.runtime.world import Batches, Channel, Pace, StageModule, Stop
from atoll.trace.span import Span

__all__ = ["OptimizerKernel", "StepResult", "StepState", "World", "first_sample"]


class OptimizerKernel(Protocol):
    """The arithmetic of one update rule over the masters of a store."""

    steps: int
    """Updates done so far (a step that is not committed does none)."""

    def update(self, learning_rate: float) -> None:
        """One update from the ``.grad`` of the masters."""
        ...

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Per logical name the state tensors by their names, of the masters' shape and dtype, live (not copies)."""
        ...

    def load(self, moments: Mapping[str, Mapping[str, torch.Tensor]], steps: int) -> None:
        """Take over the state of those names after ``steps`` updates."""
        ...


@dataclass(slots=True, kw_only=True)
class World:
    """One worker's own things; nothing in it is shared with another worker.

    ``program``: the training program (others may be handed to the engine; same stages). ``edges`` of this worker's
    replica by (source, target). ``loss``: name of the loss tensor. ``step_tokens``: tokens of a whole step over all
    replicas: every microbatch's backward starts from loss_sum / step_tokens, so that gradients simply add up.
    ``save`` writes this worker's state and returns the bytes written.
    """

    name: str
    program: Program
    stages: Mapping[int, StageModule]
    edges: Mapping[tuple[int, int], Edge]
    loss: str
    store: ParameterStore
    optimizer: OptimizerKernel
    optimizer_spec: OptimizerSpec
    total_steps: int
    step_tokens: int
    tokens_per_sample: int
    channel: Channel
    batches: Batches
    stop: Stop
    clock: Clock
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pace: Pace | None = None
    save: Callable[[Save, int], int] | None = None


@dataclass(slots=True, kw_only=True)
class StepState:
    """What lives during one step. ``values`` holds every buffer but weights and gradients; the engine removes a buffer
    once its last reader is done. ``first``: number, in the global batch, of the replica's first sample."""

    world: World
    step: int
    split: str
    samples: int
    first: int
    in_place: frozenset[Buffer]
    values: dict[Buffer, Any] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    tokens: int = 0
    gradients_clear: bool = False
    loss_sum: float = 0.0
    total_tokens: int = 0
    gradient_norm: float = 0.0
    learning_rate: float = 0.0
    committed: bool = False

    def label(self, buffer: Buffer) -> str:
        """The name under which a buffer travels: both ends compute it alike."""
        return f"{self.split}:{self.step}:{'.'.join(map(str, buffer))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """``loss_sum`` and ``tokens`` over all replicas; ``gradient_norm`` before clipping; ``committed``: False when a loss or
    gradient was not finite anywhere, and then no weight changed on any worker."""

    step: int
    split: str
    spans: tuple[Span, ...]
    loss_sum: float
    tokens: int
    gradient_norm: float
    learning_rate: float
    committed: bool

    @property
    def loss(self) -> float:
        """Mean loss per token."""
        return self.loss_sum / self.tokens if self.tokens else float("nan")


def first_sample(program: Program, worker: str) -> int:
    """Number, in the step's global batch, of the first sample of the worker's replica: replicas take theirs in order."""
    microbatches: dict[int, int] = {}
    for part in program.workers:
        counts = [instruction.microbatch + 1 for instruction in part.instructions if isinstance(instruction, Forward)]
        microbatches[part.replica] = max([microbatches.get(part.replica, 0), *counts])
    own = program.part(worker).replica
    return sum(count for replica, count in microbatches.items() if replica < own) * program.microbatch_samples
