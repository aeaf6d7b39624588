"""``job.yaml``: what is wanted. Nothing in it depends on the machines."""

from __future__ import annotations

from atoll.errors import DocumentError
from atoll.graph.spec import ModelSpec
from atoll.policies.data.spec import KINDS, SMALLEST_VOCABULARY, DataSpec
from atoll.policies.optim.spec import OptimizerSpec
from atoll.records import Record
from atoll.units import Count, Duration, NotNegative, Positive, format_duration

__all__ = ["PRECISIONS", "RECOMPUTE", "SHORTEST_PAUSE_NS", "CheckpointSpec", "EvaluationSpec", "Job", "Precision", "Wishes"]

RECOMPUTE = ("auto", "always", "never")


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


SHORTEST_PAUSE_NS = 50 * 10**6
"""Below this ``max_pause`` no heartbeat is regular enough."""


class EvaluationSpec(Record):
    """Every ``every`` steps (0: only at the end) the loss over ``samples`` held-out sequences."""

    every: NotNegative = 0
    samples: Positive = 16


class CheckpointSpec(Record):
    """Every ``every`` steps (0: only at the end); the newest ``keep`` are kept."""

    every: NotNegative = 0
    keep: Positive = 2


class Wishes(Record):
    """Narrows what the planner may choose; everything left out is its choice."""

    schedule: str | None = None
    chunks: Positive | None = None
    replicas: Positive | None = None
    stages: Positive | None = None
    microbatch: Positive | None = None
    recompute: str = "auto"
    """"auto", "always" or "never"."""

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise DocumentError(f"job.plan.recompute: found {self.recompute!r}, allowed: {', '.join(RECOMPUTE)}")
        if self.schedule is None:
            return
        import difflib  # late: neither is needed for a job that leaves it to the planner

        from atoll.policies.schedules.table import SCHEDULES

        if self.schedule not in SCHEDULES:
            near = difflib.get_close_matches(self.schedule.lower(), SCHEDULES, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise DocumentError(f"job.plan.schedule: found {self.schedule!r}; {hint}known: {', '.join(SCHEDULES)}")


class Job(Record):
    """``global_batch``: sequences per step. Give ``steps`` or ``tokens``.

    ``max_pause``: the longest silence of a machine that is borne; all time-outs derive from it.
    """

    name: str = "job"
    model: ModelSpec
    data: DataSpec = DataSpec()
    sequence_length: Positive
    global_batch: Positive
    steps: Positive | None = None
    tokens: Count | None = None
    seed: NotNegative = 0
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
        for field in ("sequence_length", "global_batch", "steps", "tokens"):
            found = getattr(self, field)
            if found is not None and found < 1:
                raise DocumentError(f"job.{field}: found {found}, expected at least 1")
        if self.max_pause < SHORTEST_PAUSE_NS:
            raise DocumentError(f"job.max_pause: found {format_duration(self.max_pause)}, expected at least "
                                f"{format_duration(SHORTEST_PAUSE_NS)}; 20 s suits most runs")
        _check_name(self.name)
        _check_data(self.data)

    @property
    def step_tokens(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def total_steps(self) -> int:
        return self.steps if self.steps is not None else -(-int(self.tokens or 0) // self.step_tokens)


def _check_name(name: str) -> None:
    """The run's folder bears the name of the job."""
    strange = any(character in "/\\" or not character.isprintable() for character in name)
    if not name.strip() or name.startswith(".") or strange or len(name.encode()) > 100:
        raise DocumentError(f"job.name: found {name[:60]!r}, expected the name of a folder: 1 to 100 bytes, no slash, no dot "
                            "in front")


def _check_data(data: DataSpec) -> None:
    tokenizer = data.tokenizer
    if not data.source.strip():
        raise DocumentError("job.data.source: found nothing, expected 'stdlib' or the path of text files, .jsonl, .parquet or "
                            "a Hugging Face data set")
    if tokenizer.kind not in KINDS:
        raise DocumentError(f"job.data.tokenizer.kind: found {tokenizer.kind!r}, allowed: {', '.join(KINDS)}")
    if tokenizer.kind == "bpe" and tokenizer.vocabulary < SMALLEST_VOCABULARY:
        raise DocumentError(f"job.data.tokenizer.vocabulary: found {tokenizer.vocabulary}, expected at least "
                            f"{SMALLEST_VOCABULARY} (256 bytes and the end of a document)")
    if (tokenizer.kind == "path") != (tokenizer.path is not None):
        raise DocumentError("job.data.tokenizer: kind 'path' and the field path belong together: give both or neither")
