"""``atoll report``: make the report of a run again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.common import JsonOption, Output

__all__ = ["report"]


def report(run: Annotated[Path, typer.Argument(help="Folder of a run (runs/NAME).")], as_json: JsonOption = False) -> None:
    """Write report.html, the pictures and the Perfetto trace of a run, also of one that died half-way.

    Example:  atoll report runs/demo
    """
    from atoll.report.page import write_report

    output = Output(as_json)
    paths = write_report(run)
    output.show(f"report: {paths.html}", f"timeline: {paths.timeline_png}",
                f"trace for ui.perfetto.dev: {paths.perfetto_json}")
    output.finish(paths)
