"""From a model spec to its graph without torch, where the family is known."""

from __future__ import annotations

from atoll.errors import GraphError
from atoll.graph.config import model_config, position_limit
from atoll.graph.families import BUILDERS
from atoll.graph.graph import DTYPE_BYTES, Graph
from atoll.graph.spec import ModelSpec

__all__ = ["build_graph", "check_positions", "model_name"]


def model_name(spec: ModelSpec) -> str:
    """The name a graph of this model bears, whoever builds it."""
    return str(spec.preset or spec.family or spec.folder or spec.module)


def build_graph(spec: ModelSpec, sequence_length: int, compute_dtype: str) -> Graph | None:
    """Return the graph of one sequence of ``sequence_length`` tokens, equal to the captured one but for ``source``.

    None when only capture can tell: a user's own module, or an option of a family that is not written down here.
    Raises ``GraphError`` for an unknown preset, family, field or dtype, and a sequence beyond the model's positions.
    """
    if compute_dtype not in DTYPE_BYTES:
        raise GraphError(f"graph: compute dtype {compute_dtype!r} is not known; use float32, bfloat16 or float64")
    check_positions(spec, sequence_length)
    resolved = model_config(spec)
    if resolved is None:
        return None
    family, config = resolved
    return BUILDERS[family](model_name(spec), config, sequence_length, compute_dtype)


def check_positions(spec: ModelSpec, sequence_length: int) -> None:
    """Raise ``GraphError`` when the model is not known or has fewer positions than ``sequence_length``."""
    resolved = model_config(spec)
    if resolved is None:
        return
    limit = position_limit(*resolved)
    if not 1 <= sequence_length <= limit:
        raise GraphError(f"job.sequence_length: {sequence_length} is not within the {limit} positions of {model_name(spec)}; "
                         "shorten it or raise the model's positions")
