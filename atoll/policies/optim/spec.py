"""What a job says about its optimizer and learning-rate schedule (pure arithmetic; the update itself is a kernel)."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta

from atoll.errors import DocumentError
from atoll.records import Record
from atoll.units import NotNegative, PositiveRate, Rate, Share

__all__ = ["RULES", "OptimizerSpec", "learning_rate"]

RULES = ("adamw",)
_Beta = Annotated[float, Meta(ge=0, lt=1)]


class OptimizerSpec(Record):
    """AdamW (Loshchilov and Hutter, 2019) with linear warm-up, then cosine decay to ``final_fraction`` of the peak.

    ``clip_norm``: global gradient norm at which gradients are scaled down (0: never). Loss spikes early: more
    ``warmup_steps`` or a smaller ``learning_rate``; loss flat: a larger ``learning_rate``.
    """

    rule: str = "adamw"
    learning_rate: Rate = 3e-4
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    epsilon: PositiveRate = 1e-8
    weight_decay: Rate = 0.1
    warmup_steps: NotNegative = 10
    final_fraction: Share = 0.1
    clip_norm: Rate = 1.0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise DocumentError(f"job.optimizer.rule: found {self.rule!r}, allowed: {', '.join(RULES)}")


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """The rate of step ``step`` (0-based) of ``steps``."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    progress = min(1.0, (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return spec.learning_rate * (spec.final_fraction + (1 - spec.final_fraction) * cosine)
