"""From documents to a ``Problem``: the graph by analytic builder where the family is known, else as captured by the caller."""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.cluster.calibration import Profile
from atoll.cluster.cluster import Cluster
from atoll.errors import DocumentError, GraphError
from atoll.graph.build import build_graph, model_name
from atoll.graph.config import model_config, position_limit
from atoll.graph.graph import Graph
from atoll.graph.spec import ModelSpec
from atoll.plan.job import PRECISIONS, Job
from atoll.planner.times import Problem
from atoll.policies.data.spec import SMALLEST_VOCABULARY

__all__ = ["likely_vocabulary", "longest_sequence", "named_model", "problem_of", "with_vocabulary"]


def problem_of(job: Job, cluster: Cluster, profile: Profile | None = None, graph: Graph | None = None) -> Problem:
    """``graph``: needed for a user's own module, which only capture can read. Raises ``GraphError`` without it."""
    precision = PRECISIONS[job.precision]
    graph = graph or build_graph(job.model, job.sequence_length, precision.compute)
    if graph is None:
        raise GraphError(f"model {model_name(job.model)}: only capture can read it (a module of your own, or an option that is "
                         "not written down for its family): hand over the captured graph")
    return Problem(graph, cluster, precision, profile)


def likely_vocabulary(job: Job) -> int | None:
    """Tokens that the job's tokenizer will have (bpe on a tiny corpus: fewer); None for one that lies at a path."""
    tokenizer = job.data.tokenizer
    return {"byte": SMALLEST_VOCABULARY, "bpe": tokenizer.vocabulary}.get(tokenizer.kind)


def with_vocabulary(job: Job, vocabulary: int | None = None) -> Job:
    """Give a model without a vocabulary of its own that of the tokenizer (None: its likely one). Presets and folders keep
    theirs."""
    model = job.model
    vocabulary = likely_vocabulary(job) if vocabulary is None else vocabulary
    if model.family is None or "vocab_size" in model.config or vocabulary is None:
        return job
    return msgspec.structs.replace(job, model=msgspec.structs.replace(
        model, config={**model.config, "vocab_size": vocabulary}))


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
