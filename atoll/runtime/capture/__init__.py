"""A torch module becomes a graph, and any range of its operators a stage that stands alone."""

from atoll.runtime.capture.stage import Captured, Stage, build_stage, capture
from atoll.runtime.capture.weights import initial_value, initialise, load_weights

__all__ = ["Captured", "Stage", "build_stage", "capture", "initial_value", "initialise", "load_weights"]
