"""The twin law in time: how far is the predicted step from the measured one, over schedules, stages and microbatches?

Whatever is predicted is read off the program that is executed, so spans and bytes agree by construction of the law (and
are checked here again). Times do not: this measures their error, (predicted - measured) / measured of the median step.

In full: every combination is a whole ``atoll train`` of its own (its profile, plan file, run and report), in the lab
where root allows: one network namespace a machine, links shaped by the kernel, CPU shares by control groups; else emulated
in processes. Quick: the emulation with threads for processes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contract import finish, quick
from rig import Combo, emulated, in_lab, plan_for

from atoll import records
from atoll.cluster.cluster import Cluster
from atoll.lab.lab import obstacle
from atoll.plan.job import Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS, QUICK_STEPS = 9, 5

CLUSTER = """
name: twin
islands:
  reef:   {bandwidth: 1 Gbit/s, latency: 200 us}
  lagoon: {bandwidth: 1 Gbit/s, latency: 200 us}
machines:
  - {name: coral,  island: reef,   devices: [{kind: cpu-core, speed: 1.0, memory: 2 GiB}]}
  - {name: sponge, island: reef,   devices: [{kind: cpu-core, speed: 0.6, memory: 2 GiB}]}
  - {name: perch,  island: lagoon, devices: [{kind: cpu-core, speed: 0.9, memory: 2 GiB}]}
  - {name: shrimp, island: lagoon, devices: [{kind: cpu-core, speed: 0.7, memory: 2 GiB}]}
links:
  - {between: [reef, lagoon], bandwidth: 100 Mbit/s, latency: 10 ms}
emulation: {cpu_share: 0.5}
"""
JOB = """
name: twin
model:
  family: gpt2
  config: {n_layer: 8, n_embd: 192, n_head: 6, n_positions: 128, vocab_size: 2048}
data: {source: stdlib, tokenizer: {kind: bpe, vocabulary: 2048}, validation: 0}
sequence_length: 128
global_batch: 32
steps: 9
seed: 1
max_pause: 60 s
"""
ALL = ("coral", "sponge", "shrimp", "perch")
COMBOS = (
    Combo("1f1b", (ALL,), 8),
    Combo("gpipe", (ALL,), 8),
    Combo("zb-h1", (ALL,), 8),
    Combo("1f1b", (("coral", "sponge"), ("perch", "shrimp")), 8),
    Combo("interleaved-1f1b", (("coral", "sponge"),), 4, chunks=2),
    Combo("breadth-first", (("perch", "shrimp"),), 4, chunks=2),
    Combo("zb-v", (("coral", "sponge"),), 6, chunks=2),
    Combo("gpipe", (("coral", "perch", "shrimp"),), 6),
    Combo("zb-h1", (("sponge", "perch"),), 4),
    Combo("1f1b", (("coral",), ("sponge",), ("perch",)), 6),
)


def short(job: Job, cluster: Cluster) -> list[dict[str, Any]]:
    """All combinations in threads, with a narrower model and microbatches half as large."""
    import dataclasses
    import os

    import msgspec

    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # torch.set_num_threads leaves MKL on other threads alone
    import torch
    from twin_threads import measured, profiled

    from atoll.runtime.capture.stage import capture

    torch.set_num_threads(1)
    narrow = {**job.model.config, "n_embd": 128, "n_head": 4}
    job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, config=narrow))
    captured = capture(job.model, job.sequence_length)
    results = []
    for number, combo in enumerate(dataclasses.replace(combo, samples=2) for combo in COMBOS):
        if number % 4 == 0:  # a computer shared with others changes its pace: look again now and then
            calibration = profiled(job, cluster, captured, combo.samples, seconds=1.5)
        own = combo.job(job, QUICK_STEPS)
        comparison = measured(own, cluster, plan_for(own, cluster, combo), captured, calibration)
        results.append(_row(combo, records.to_plain(comparison)))
    return results


def full(job: Job, cluster: Cluster, lab: bool) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory(prefix="atoll-twin-") as folder:
        for number, combo in enumerate(COMBOS):
            own = combo.job(job, STEPS)
            run = (in_lab if lab else emulated)(own, cluster, plan_for(own, cluster, combo), Path(folder), f"run-{number}")
            results.append(_row(combo, run["comparison"]))
    return results


def _row(combo: Combo, comparison: dict[str, Any]) -> dict[str, Any]:
    step, twin = comparison["step"], comparison["twin"]
    row = {"name": combo.name, "predicted_s": step["predicted_ns"] / 1e9, "measured_s": step["measured_ns"] / 1e9,
           "low_s": step["low_ns"] / 1e9, "high_s": step["high_ns"] / 1e9, "error": step["error_percent"] / 100,
           "same": bool(twin["holds"])}
    print(f"{row['name']:52} predicted {row['predicted_s']:6.3f} s, measured {row['measured_s']:6.3f} s "
          f"({row['low_s']:.3f} to {row['high_s']:.3f}), error {row['error']:+7.1%}, spans and bytes "
          f"{'the same' if row['same'] else 'DIFFER'}", flush=True)
    return row


def main() -> int:
    brief = quick(__doc__ or "")
    cluster, job = records.parse(CLUSTER, Cluster), records.parse(JOB, Job)
    why_not = obstacle()
    where = "threads" if brief else "the lab" if why_not is None else "processes"
    print(f"measured in {where}" + (f" (no lab: {why_not})" if why_not and not brief else ""))
    rows = short(job, cluster) if brief else full(job, cluster, lab=why_not is None)
    errors = [abs(row["error"]) for row in rows]
    figures = {"combinations": len(rows), "same_spans": sum(row["same"] for row in rows), "in_lab": where == "the lab",
               "median_error": statistics.median(errors), "worst_error": max(errors),
               "mean_signed_error": statistics.fmean(row["error"] for row in rows)}
    figures |= {f"error: {row['name']}": row["error"] for row in rows}
    print(f"median error {figures['median_error']:.1%}, worst {figures['worst_error']:.1%}")

    def picture(figure: Figure) -> None:
        axes = figure.subplots()
        top = 1.1 * max(max(row["predicted_s"], row["high_s"]) for row in rows)
        axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color="0.92", label="within 10 %")
        axes.plot([0, top], [0, top], color="0.5", linewidth=1)
        for number, row in enumerate(rows):
            spread = [[row["measured_s"] - row["low_s"]], [row["high_s"] - row["measured_s"]]]
            axes.errorbar(row["measured_s"], row["predicted_s"], xerr=spread, marker="o", capsize=2, linestyle="none",
                          color=f"C{number}", label=f"{row['name']} ({row['error']:+.0%})")
        axes.set(xlim=(0, top), ylim=(0, top), xlabel="measured step, s (middle 80 %)", ylabel="predicted step, s",
                 title=f"Predicted and measured step time, in {where}: median error {figures['median_error']:.1%}")
        axes.legend(fontsize=7, loc="upper left")

    return finish("twin", figures, {"median_error": ("<=", 0.10), "combinations": (">=", 8),
                                    "same_spans": (">=", len(COMBOS))}, picture)


if __name__ == "__main__":
    sys.exit(main())
