"""What every benchmark prints and leaves behind: one JSON object as the last line, a JSON file and a picture under
``build/benchmarks/``, exit code 0 only if every goal holds."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["finish", "holds", "quick"]

FOLDER = Path(__file__).resolve().parent.parent / "build" / "benchmarks"

Goal = tuple[str, float]
"""("<=" or ">=", the number to compare the figure of the same name with)."""


def quick(description: str, arguments: list[str] | None = None) -> bool:
    """Parse the command line of a benchmark that has no option but ``--quick`` (a run under a minute)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a run under a minute")
    return bool(parser.parse_args(arguments).quick)


def holds(figures: Mapping[str, float], goals: Mapping[str, Goal]) -> bool:
    """Whether every goal's figure was measured, is a finite number and is on the right side."""
    for name, (relation, bound) in goals.items():
        if relation not in ("<=", ">="):
            raise ValueError(f"goal {name!r}: found relation {relation!r}, allowed: <=, >=")
        value = figures.get(name)
        if value is None or not math.isfinite(value):
            return False
        if not (value <= bound if relation == "<=" else value >= bound):
            return False
    return True


def finish(
    name: str,
    figures: Mapping[str, float],
    goals: Mapping[str, Goal],
    picture: Callable[[Figure], None] | None = None,
) -> int:
    """Write ``build/benchmarks/NAME.json`` and, drawn by ``picture`` on an empty figure, ``NAME.png``; print the JSON
    object as the last line. Returns the exit code: 0 if every goal holds, else 1."""
    kept = holds(figures, goals)
    result = {
        "benchmark": name,
        "figures": {key: value if math.isfinite(value) else None for key, value in figures.items()},
        "goals": {key: list(goal) for key, goal in goals.items()},
        "holds": kept,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    if picture is not None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5), layout="constrained")
        FigureCanvasAgg(figure)
        picture(figure)
        figure.savefig(FOLDER / f"{name}.png", dpi=120)
    print(json.dumps(result), flush=True)
    return 0 if kept else 1
