"""From documents to a ``Problem``: the graph by analytic builder where the family is known, else as captured by the caller."""

from __future__ import annotations

from pathlib import Path

from atoll.cluster.calibration import Calibration
from atoll.cluster.cluster import Cluster
from atoll.errors import DocumentError, GraphError
from atoll.graph.build import build_graph
from atoll.graph.config import model_config, position_limit
from atoll.graph.graph import Graph
from atoll.graph.spec import ModelSpec
from atoll.plan.job import PRECISIONS, Job
from atoll.planner.times import Problem

__all__ = ["longest_sequence", "named_model", "problem_of"]


def problem_of(job: Job, cluster: Cluster, calibrations: tuple[Calibration, ...] = (), graph: Graph | None = None) -> Problem:
    """``graph``: needed for a user's own module, which only capture can read. Raises ``GraphError`` without it."""
    precision = PRECISIONS[job.precision]
    graph = graph or build_graph(job.model, job.sequence_length, precision.compute)
    if graph is None:
        raise GraphError(f"model {job.model.module}: a module of your own is read by running it once without weights; "
                         "atoll train and atoll plan with a job.yaml do that (torch is needed)")
    return Problem(graph, cluster, precision, calibrations)


def named_model(name: str) -> ModelSpec:
    """A preset by name, a config.json or a folder that holds one by path."""
    path = Path(name)
    if path.name == "config.json":
        path = path.parent
    if (path / "config.json").is_file():
        return ModelSpec(folder=str(path))
    if "/" in name or name.endswith(".json"):
        raise DocumentError(f"--model: there is no config.json at {name}")
    return ModelSpec(preset=name)


def longest_sequence(spec: ModelSpec) -> int:
    """Positions of a known family. Raises ``GraphError`` for an unknown one."""
    resolved = model_config(spec)
    if resolved is None:
        raise DocumentError("--sequence-length: needed for a module of your own")
    return position_limit(*resolved)
