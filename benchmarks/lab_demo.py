"""The demo job twice, under one plan: on four network namespaces through ``atoll train`` and ``atoll worker`` (rates and
latency by the kernel, CPU shares by control groups), and emulated in processes (links shaped, devices paced inside them).

Needs root for the first. Quick: two of the machines and fewer steps (a little over a minute: starting four Pythons on a
share of a core is most of it).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from contract import finish, quick
from rig import Combo, emulated, in_lab, plan_for

from atoll import records
from atoll.cluster.cluster import Cluster
from atoll.cluster.network import load_cluster
from atoll.lab.lab import obstacle
from atoll.plan.job import EvaluationSpec, Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"
WARM = 2
COMBO = Combo("1f1b", (("coral", "sponge"), ("perch", "shrimp")), 8)
SHORT = Combo("1f1b", (("perch", "shrimp"),), 4)


def steps(result: dict[str, Any]) -> list[float]:
    """Seconds of each step after the first ones."""
    return [ns / 1e9 for ns in result["step_ns"][WARM:]]


def main() -> int:
    brief = quick(__doc__ or "")
    why_not = obstacle()
    if why_not:
        print(f"no lab: {why_not}")
        return finish("lab_demo", {"in_lab": 0}, {"in_lab": (">=", 1)})
    cluster, combo = load_cluster(DEMO / "cluster.yaml"), SHORT if brief else COMBO
    job = msgspec.structs.replace(combo.job(records.load(DEMO / "job.yaml", Job), 6 if brief else 22),
                                  evaluation=EvaluationSpec(samples=combo.microbatches * combo.samples), sample=None)
    if brief:
        kept = tuple(machine for machine in cluster.machines if machine.island == "lagoon")
        cluster = Cluster(name="lagoon", islands={"lagoon": cluster.islands["lagoon"]}, machines=kept,
                          emulation=cluster.emulation)
    plan = plan_for(job, cluster, combo)
    with tempfile.TemporaryDirectory(prefix="atoll-demo-") as folder:
        results = {"emulated": emulated(job, cluster, plan, Path(folder), "emulated"),
                   "lab": in_lab(job, cluster, plan, Path(folder), "lab")}
    times = {name: steps(result) for name, result in results.items()}
    medians = {name: statistics.median(found) for name, found in times.items()}
    pairs = list(zip(results["lab"]["losses"], results["emulated"]["losses"], strict=True))
    figures: dict[str, float] = {
        "in_lab": 1, "steps": len(times["lab"]), "step_s_lab": medians["lab"], "step_s_emulated": medians["emulated"],
        "step_time_ratio": medians["lab"] / medians["emulated"],
        "step_time_apart": abs(medians["lab"] / medians["emulated"] - 1),
        "losses_apart": max(abs(one - other) / abs(other) for one, other in pairs),
        "same_spans": all(result["comparison"]["twin"]["holds"] for result in results.values()),
        "predicted_error_lab": results["lab"]["comparison"]["step"]["error_percent"] / 100,
        "predicted_error_emulated": results["emulated"]["comparison"]["step"]["error_percent"] / 100}

    def picture(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        for name, found in times.items():
            left.plot(range(WARM, WARM + len(found)), found, marker=".", label=f"{name}, median {medians[name]:.2f} s")
            right.plot(results[name]["losses"], marker="." if name == "lab" else "o", fillstyle="none", label=name)
        left.set(xlabel="step", ylabel="s", ylim=(0, None), title="Step time, one plan")
        right.set(xlabel="step", ylabel="nats a token", title="Loss")
        left.legend(fontsize=8)
        right.legend(fontsize=8)

    return finish("lab_demo", figures, {"in_lab": (">=", 1), "step_time_apart": ("<=", 0.10), "losses_apart": ("<=", 0.0),
                                        "same_spans": (">=", 1)}, picture)


if __name__ == "__main__":
    sys.exit(main())
