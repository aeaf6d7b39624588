"""Hand-made traces for the tests of the report, and a demo: ``python tests/report_demo.py FOLDER`` writes a run and its report.

The little event loop here is the tests' own (1F1B of a pipeline of workers with links between neighbours), so that the report
is tested without the simulator and the runtime.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.trace.files import write_trace
from atoll.trace.span import Span, Trace, TraceHeader

WORKERS = ("ant", "bee", "cat", "dog")
ISLANDS = {"ant": "home", "bee": "home", "cat": "lab", "dog": "lab"}
SPEEDS = {"ant": 1.0, "bee": 0.5, "cat": 1.0, "dog": 0.7}
MS = 1_000_000


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    warm = min(ranks - rank - 1, microbatches)
    order = [("F", m) for m in range(warm)]
    for m in range(microbatches - warm):
        order += [("F", warm + m), ("B", m)]
    return order + [("B", m) for m in range(microbatches - warm, microbatches)]


def make_step(step: int, start_ns: int, workers: Sequence[str] = WORKERS, islands: Mapping[str, str] = ISLANDS,
              microbatches: int = 8, noise: float = 0.0, slow_ms: float = 48.0, seed: int = 0) -> list[Span]:
    """Spans of one step: loads, 1F1B, sends and receives between neighbours, vote to the first worker, commit, update."""
    shake = random.Random(f"{seed}-{step}")
    ranks = len(workers)
    spans: list[Span] = []
    index = dict.fromkeys(workers, 0)
    free: dict[tuple[str, str], int] = {}
    done: dict[tuple[str, int, int], int] = {}

    def run(worker: str, name: str, lane: str, ready: int, ms: float, size: int = 0) -> int:
        begin = max(ready, free.get((worker, lane), start_ns))
        end = begin + int(ms * MS * (1 + noise * shake.uniform(-0.5, 1.0)))
        free[worker, lane] = end
        spans.append(Span(worker=worker, step=step, instruction=index[worker], name=name, lane=lane, start_ns=begin,
                          end_ns=end, size_bytes=size))
        index[worker] += 1
        return end

    def send(source: str, target: str, sent: str, received: str, ready: int, size: int) -> int:
        slow = islands.get(source) != islands.get(target)
        end = run(source, sent, f"out:{target}", ready, slow_ms if slow else 2.0, size)
        arrival = end + (25 * MS if slow else 0)
        begin = max(min(ready, arrival), free.get((target, f"in:{source}"), start_ns))
        spans.append(Span(worker=target, step=step, instruction=index[target], name=received, lane=f"in:{source}",
                          start_ns=begin, end_ns=max(arrival, begin), size_bytes=size))
        free[target, f"in:{source}"] = max(arrival, begin)
        index[target] += 1
        return max(arrival, begin)

    queues = {rank: one_f_one_b(rank, ranks, microbatches) for rank in range(ranks)}
    for m in range(microbatches):
        done["F", -1, m] = run(workers[0], f"LOAD 0.{m}", "disk", start_ns, 1.0, 4096)
    while any(queues.values()):
        for rank, queue in queues.items():
            if not queue:
                continue
            kind, m = queue[0]
            need = ("F", rank - 1, m) if kind == "F" else ("B", rank + 1, m)
            if kind == "B" and rank == ranks - 1:
                need = ("F", rank, m)
            if need not in done:
                continue
            queue.pop(0)
            worker = workers[rank]
            ms = (20.0 if kind == "F" else 41.0) / SPEEDS.get(worker, 1.0)
            end = run(worker, f"{rank}{kind}{m}", "compute", done[need], ms)
            ahead = rank + 1 if kind == "F" else rank - 1
            done[kind, rank, m] = send(worker, workers[ahead], f"{rank}SEND_{kind}{m}",
                                       f"{ahead}RECV_{kind}{m}", end, 262_144) if 0 <= ahead < ranks else end
            if kind == "F" and rank == ranks - 1:
                done["F", rank, m] = end
    votes = [run(worker, "VOTE", "compute", start_ns, 0.3) for worker in workers]
    gathered = max([votes[0], *(send(worker, workers[0], f"SEND vote[{worker}]", f"RECV vote[{worker}]", vote, 32)
                                for worker, vote in zip(workers[1:], votes[1:], strict=True))])
    total = run(workers[0], "REDUCE total", "copy", gathered, 0.1, 32 * ranks)
    for rank, worker in enumerate(workers):
        told = total if rank == 0 else send(workers[0], worker, "SEND total", "RECV total", total, 32)
        run(worker, "COMMIT", "compute", told, 0.05)
        run(worker, f"UPDATE adamw {rank}", "compute", told, 9.0 / SPEEDS.get(worker, 1.0))
    return spans


def make_trace(clock: str, steps: int, noise: float = 0.0, workers: Sequence[str] = WORKERS,
               islands: Mapping[str, str] = ISLANDS, microbatches: int = 8) -> Trace:
    spans: list[Span] = []
    start = 5_000 * MS if clock == "measured" else 0
    for step in range(steps):
        made = make_step(step, start, workers, islands, microbatches, noise)
        spans += made
        start = max(span.end_ns for span in made) + MS
    return Trace(header=TraceHeader(program="0" * 16, clock=clock, workers=tuple(workers)), spans=tuple(spans))


def make_memory(trace: Trace, size: int = 48 << 20) -> dict[str, list[tuple[int, int]]]:
    """Live activations of the first step: F allocates, B frees (times from the step's start)."""
    first = [span for span in trace.spans if span.step == trace.spans[0].step]
    origin = min(span.start_ns for span in first)
    result: dict[str, list[tuple[int, int]]] = {}
    for worker in trace.header.workers:
        live, curve = 0, [(0, 0)]
        for span in sorted((s for s in first if s.worker == worker and s.lane == "compute"), key=lambda s: s.start_ns):
            if "F" in span.name:
                live += size
                curve.append((span.start_ns - origin, live))
            elif "B" in span.name:
                live -= size
                curve.append((span.end_ns - origin, live))
        result[worker] = curve
    return result


CLUSTER: dict[str, Any] = {
    "name": "home-and-lab",
    "islands": {"home": {"bandwidth": "1 Gbit/s"}, "lab": {"bandwidth": "10 Gbit/s"}},
    "machines": [{"name": name, "island": ISLANDS[name], "devices": [{"kind": "cpu-core", "speed": SPEEDS[name]}]}
                 for name in WORKERS],
    "links": [{"between": ["home", "lab"], "bandwidth": "50 Mbit/s", "latency": "25 ms"}],
    "emulation": {"cpu_share": 0.5},
}


SUMMARY: dict[str, Any] = {
    "step_ns": 1650 * MS, "tokens_per_s": 1240.0, "makespan_bubble": 0.6, "span_bubble": 0.51,
    "workers": {name: {"device": "cpu-core", "speed": SPEEDS[name], "exposed_ns": 5 * MS, "busy_share": {"compute": 0.4},
                       "memory": {"peak_bytes": 1 << 28, "weights_bytes": 1 << 26, "gradients_bytes": 1 << 26,
                                  "optimizer_bytes": 1 << 26, "working_bytes": 0, "activations_bytes": 1 << 26,
                                  "buffers_bytes": 0, "capacity_bytes": 1 << 30}} for name in WORKERS},
    "links": {"home>lab": {"size_bytes": 2 << 20, "busy_share": 0.23, "bytes_per_s": 6_250_000}},
}


def write_run(folder: Path, steps: int = 40, microbatches: int = 8) -> Path:
    """A whole run folder as the driver leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    predicted = make_trace("simulated", 3, microbatches=microbatches)
    measured = make_trace("measured", steps, noise=0.05, microbatches=microbatches)
    write_trace(folder / "predicted.trace.jsonl", predicted)
    write_trace(folder / "trace.jsonl", measured)
    (folder / "cluster.yaml").write_text(json.dumps(CLUSTER))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "predicted.memory.json").write_text(json.dumps(make_memory(predicted)))
    (folder / "job.yaml").write_text(json.dumps({
        "name": "demo", "model": {"family": "gpt2", "layers": 6}, "sequence_length": 128, "global_batch": 2 * microbatches,
        "steps": steps, "precision": "fp32", "optimizer": {"rule": "adamw", "rate": 0.0006}}))
    (folder / "plan.yaml").write_text(json.dumps({
        "job": "demo", "cluster": "c", "graph": "g", "schedule": "1f1b", "chunks": 1, "microbatch_samples": 2,
        "replicas": [{"microbatches": microbatches, "stages": [
            {"first": f"h.{2 * i}", "last": f"h.{2 * i + 1}", "worker": name, "recompute": False}
            for i, name in enumerate(WORKERS)]}], "bucket_bytes": 1 << 22, "collective": "ring", "native": False}))
    (folder / "explain.txt").write_text(
        "One replica of four stages: ant, bee, cat, dog; eight microbatches of two sequences, schedule 1f1b.\n"
        "bee limits the step: at half speed its forward and backward take 122 ms a microbatch.\n"
        "Two replicas were refused: gradients over the 50 Mbit/s link would add 1.9 s a step.\n")
    lines: list[dict[str, Any]] = []
    tokens = 256 * microbatches
    for step in range(steps):
        spans = [span for span in measured.spans if span.step == step]
        start, end = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
        lines.append({"step": step, "loss": 5.6 * 0.96 ** step + 2 + random.Random(step).uniform(-0.1, 0.1), "tokens": tokens,
                      "gradient_norm": 1.0, "learning_rate": 6e-4, "step_ns": end - start,
                      "tokens_per_s": tokens * 1e9 / (end - start), "time_ns": end})
        if step % 10 == 9:
            lines.append({"step": step, "validation_loss": 5.6 * 0.96 ** step + 2.08})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


if __name__ == "__main__":
    from atoll.report.page import write_report

    print(write_report(write_run(Path(sys.argv[1]))))
