"""``job.yaml``: what is wanted. Nothing in it depends on the machines."""

from __future__ import annotations

from atoll.errors import DocumentError
from atoll.graph.spec import ModelSpec
from atoll.policies.data.spec import DataSpec
from atoll.policies.optim.spec import OptimizerSpec
from atoll.records import Record
from atoll.units import Count, Duration

__all__ = ["PRECISIONS", "CheckpointSpec", "EvaluationSpec", "Job", "Precision", "Wishes"]


class Precision(Record):
    """``compute``: dtype of weights, activations and what travels between stages; ``master``: dtype of the optimizer's
    copy, of gradients while they are accumulated and of gradients on the wire."""

    compute: str
    master: str


PRECISIONS = {
    "fp32": Precision(compute="float32", master="float32"),
    "bf16": Precision(compute="bfloat16", master="float32"),
    "fp64": Precision(compute="float64", master="float64"),
}


class EvaluationSpec(Record):
    """Every ``every`` steps (0: only at the end) the loss over ``samples`` held-out sequences."""

    every: int = 0
    samples: int = 16


class CheckpointSpec(Record):
    """Every ``every`` steps (0: only at the end); the newest ``keep`` are kept."""

    every: int = 0
    keep: int = 2


class Wishes(Record):
    """Narrows what the planner may choose; everything left out is its choice."""

    schedule: str | None = None
    chunks: int | None = None
    replicas: int | None = None
    stages: int | None = None
    microbatch: int | None = None
    recompute: str = "auto"
    """"auto", "always" or "never"."""


class Job(Record):
    """``global_batch``: sequences per step. Give ``steps`` or ``tokens``.

    ``max_pause``: the longest silence of a machine that is borne; all time-outs derive from it.
    """

    name: str = "job"
    model: ModelSpec
    data: DataSpec = DataSpec()
    sequence_length: int
    global_batch: int
    steps: int | None = None
    tokens: Count | None = None
    seed: int = 0
    precision: str = "fp32"
    optimizer: OptimizerSpec = OptimizerSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    plan: Wishes = Wishes()
    max_pause: Duration = Duration(30 * 10**9)
    compile: bool = False
    sample: str | None = None
    """A prompt to continue with the trained model at the end."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise DocumentError(f"job.precision: found {self.precision!r}, allowed: {', '.join(PRECISIONS)}")
        if (self.steps is None) == (self.tokens is None):
            raise DocumentError("job: give either steps or tokens")
        for field in ("sequence_length", "global_batch"):
            if getattr(self, field) < 1:
                raise DocumentError(f"job.{field}: found {getattr(self, field)}, expected at least 1")

    @property
    def step_tokens(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def total_steps(self) -> int:
        return self.steps if self.steps is not None else -(-int(self.tokens or 0) // self.step_tokens)
