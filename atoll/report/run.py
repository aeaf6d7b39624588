"""Read a run folder as it was left, whole or not: what is missing or broken is said in ``notes``, nothing is raised for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from atoll.errors import AtollError, DocumentError
from atoll.records import Record
from atoll.trace.files import read_trace
from atoll.trace.span import Trace

__all__ = ["EvaluationPoint", "RunRecord", "StepPoint", "load_run", "worker_islands", "worker_machines"]

T = TypeVar("T")


class StepPoint(Record):
    """One training step as logged. ``tokens_seen``: from the start of the run to the end of this step; ``time_ns``: when it
    ended (from the run's origin, or the sum of step times where that was not logged)."""

    step: int
    loss: float | None
    tokens: int
    tokens_seen: int
    gradient_norm: float | None
    learning_rate: float | None
    step_ns: int | None
    tokens_per_s: float | None
    time_ns: int


class EvaluationPoint(Record):
    step: int
    loss: float
    tokens_seen: int


class RunRecord(Record):
    """``job``, ``cluster``, ``plan``, ``summary``: the documents as plain values ({} when missing). ``memory``: by worker,
    (ns from the start of the predicted step, live bytes). ``notes``: one sentence for each piece missing or broken."""

    folder: str
    name: str
    job: dict[str, Any]
    cluster: dict[str, Any]
    plan: dict[str, Any]
    summary: dict[str, Any]
    explanation: tuple[str, ...]
    predicted: Trace | None
    measured: Trace | None
    memory: dict[str, tuple[tuple[int, int], ...]]
    steps: tuple[StepPoint, ...]
    evaluations: tuple[EvaluationPoint, ...]
    checkpoints: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def workers(self) -> tuple[str, ...]:
        """In the order of the cluster, then as the traces name them."""
        names: dict[str, None] = dict.fromkeys(worker_islands(self.cluster))
        traced: dict[str, None] = {}
        for trace in (self.predicted, self.measured):
            if trace is not None:
                traced.update(dict.fromkeys(trace.header.workers))
        if not traced:
            return tuple(names)
        return tuple([name for name in names if name in traced] + [name for name in traced if name not in names])

    @property
    def planned_steps(self) -> int | None:
        """What the job asks for (None when the job is missing or cannot be read)."""
        steps, tokens = self.job.get("steps"), self.job.get("tokens")
        if isinstance(steps, int):
            return steps
        try:
            each = int(self.job["global_batch"]) * int(self.job["sequence_length"])
            return -(-int(tokens) // each) if isinstance(tokens, int) else None
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return None


def load_run(folder: str | os.PathLike[str]) -> RunRecord:
    """Read the run in ``folder``. Raises ``DocumentError`` only when there is no such folder or nothing of a run in it."""
    path = Path(folder)
    if not path.is_dir():
        raise DocumentError(f"{folder}: there is no such run folder; give the folder that `atoll train` printed, "
                            "such as runs/demo")
    notes: list[str] = []
    job = _document(path / "job.yaml", notes, "the job")
    cluster = _document(path / "cluster.yaml", notes, "the cluster")
    plan = _document(path / "plan.yaml", notes, "the plan")
    summary = _document(path / "summary.json", notes, "the predicted summary")
    predicted = _trace(path / "predicted.trace.jsonl", notes, "predicted trace")
    measured = _trace(path / "trace.jsonl", notes, "measured trace")
    steps, evaluations = _metrics(path / "metrics.jsonl", notes)
    if not (job or plan or predicted or measured or steps):
        raise DocumentError(f"{folder}: found none of job.yaml, plan.yaml, trace.jsonl, metrics.jsonl; "
                            "this is not a run folder")
    run = RunRecord(
        folder=str(path), name=str(job.get("name") or path.resolve().name), job=job, cluster=cluster, plan=plan,
        summary=summary, explanation=_lines(path / "explain.txt", notes), predicted=predicted, measured=measured,
        memory=_memory(path / "predicted.memory.json", notes), steps=steps, evaluations=evaluations,
        checkpoints=tuple(sorted(entry.name for entry in path.glob("checkpoints/*") if not entry.name.startswith("."))),
        notes=tuple(notes))
    wanted, done = run.planned_steps, len(steps)
    if wanted and done and steps[-1].step + 1 < wanted:
        return _noted(run, f"The run stopped after step {steps[-1].step}; the job asks for {wanted} steps.")
    return run


def _noted(run: RunRecord, note: str) -> RunRecord:
    import msgspec

    return msgspec.structs.replace(run, notes=(note, *run.notes))


def _attempt(read: Callable[[], T], path: Path, notes: list[str], what: str) -> T | None:
    """The value, or None and a note that says why."""
    if not path.exists():
        notes.append(f"{path.name} is missing, so {what} is not shown.")
        return None
    try:
        return read()
    except (AtollError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        notes.append(f"{path.name} cannot be read ({error}), so {what} is not shown.")
        return None


def _document(path: Path, notes: list[str], what: str) -> dict[str, Any]:
    def read() -> dict[str, Any]:
        import yaml

        try:
            value = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError as error:
            raise ValueError(f"not YAML: {getattr(error, 'problem', error)}") from None
        if not isinstance(value, dict):
            raise ValueError(f"found {type(value).__name__}, expected fields")
        return value

    return _attempt(read, path, notes, what) or {}


def _trace(path: Path, notes: list[str], what: str) -> Trace | None:
    trace = _attempt(lambda: read_trace(path), path, notes, f"the {what}")
    if trace is not None and not trace.spans:
        notes.append(f"{path.name} has a header but no span, so the {what} is not shown.")
        return None
    return trace


def _lines(path: Path, notes: list[str]) -> tuple[str, ...]:
    text = _attempt(lambda: path.read_text(encoding="utf-8"), path, notes, "why the plan is what it is") or ""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _memory(path: Path, notes: list[str]) -> dict[str, tuple[tuple[int, int], ...]]:
    """Optional, so its absence is no news."""
    if not path.exists():
        return {}
    plain = _attempt(lambda: {str(worker): tuple((int(time), int(value)) for time, value in curve)
                              for worker, curve in json.loads(path.read_bytes()).items()}, path, notes, "live memory in bytes")
    return plain or {}


def _metrics(path: Path, notes: list[str]) -> tuple[tuple[StepPoint, ...], tuple[EvaluationPoint, ...]]:
    lines = _attempt(lambda: path.read_bytes().splitlines(), path, notes, "the loss curve") or []
    trained: dict[int, dict[str, Any]] = {}
    evaluated: dict[int, float] = {}
    broken = 0
    for line in lines:
        try:
            entry = json.loads(line)
            step = int(entry["step"])
            if entry.get("validation_loss") is not None:
                evaluated[step] = float(entry["validation_loss"])
            if "loss" in entry or "tokens" in entry:
                trained[step] = entry
        except (ValueError, TypeError, KeyError):
            broken += 1
    if broken:
        many = broken > 1
        notes.append(f"metrics.jsonl: {broken} line{'s' * many} cannot be read and {'are' if many else 'is'} left out.")
    steps = _points(trained)
    seen = {point.step: point.tokens_seen for point in steps}
    evaluations = tuple(EvaluationPoint(step=step, loss=loss, tokens_seen=_seen_at(step, seen))
                        for step, loss in sorted(evaluated.items()))
    return steps, evaluations


def _seen_at(step: int, seen: dict[int, int]) -> int:
    return max((tokens for known, tokens in seen.items() if known <= step), default=0)


def _points(trained: dict[int, dict[str, Any]]) -> tuple[StepPoint, ...]:
    """A resumed run writes a step twice: the later line counts. ``tokens`` of a line are those of its step."""
    points: list[StepPoint] = []
    seen = clock = resumed_ns = 0
    for step in sorted(trained):
        entry = trained[step]
        tokens, took = int(_number(entry, "tokens") or 0), _number(entry, "step_ns")
        seen += tokens
        time_ns = int(_number(entry, "time_ns") or clock - resumed_ns + (took or 0))
        if time_ns + resumed_ns < clock:  # the clock of a resumed run begins anew
            resumed_ns = clock
        clock = time_ns + resumed_ns
        rate = _number(entry, "tokens_per_s") or (tokens * 1e9 / took if took else None)
        points.append(StepPoint(step=step, loss=_number(entry, "loss"), tokens=tokens, tokens_seen=seen,
                                gradient_norm=_number(entry, "gradient_norm"), learning_rate=_number(entry, "learning_rate"),
                                step_ns=int(took) if took is not None else None, tokens_per_s=rate, time_ns=clock))
    return tuple(points)


def _number(entry: dict[str, Any], key: str) -> float | None:
    value = entry.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def worker_machines(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By worker name ("a1", or "a1:0", "a1:1" for several devices): {"machine", "island", "device"}, read leniently."""
    found: dict[str, dict[str, Any]] = {}
    for machine in _rows(cluster.get("machines")):
        name, island = str(machine.get("name", "?")), str(machine.get("island", ""))
        devices = [device for device in _rows(machine.get("devices")) for _ in range(_count(device))] or [{}]
        for index, device in enumerate(devices):
            worker = name if len(devices) == 1 else f"{name}:{index}"
            found[worker] = {"machine": name, "island": island, "device": device}
    return found


def worker_islands(cluster: dict[str, Any]) -> dict[str, str]:
    return {worker: entry["island"] for worker, entry in worker_machines(cluster).items()}


def _rows(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list | tuple) else []


def _count(device: dict[str, Any]) -> int:
    count = device.get("count", 1)
    return count if isinstance(count, int) and count > 0 else 1
