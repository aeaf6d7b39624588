"""``write_report``: one page about a run, its pictures, its Perfetto trace and its figures as JSON.

The page (``report.html``) carries its pictures inside, so that it can be sent as one file; everything else lies beside it in
``report/``. Whatever cannot be made is said on the page and in the JSON, and the rest is made all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from atoll.errors import AtollError
from atoll.records import Record, to_json, write_atomically
from atoll.report.analysis import by_step
from atoll.report.compare import Comparison, compare
from atoll.report.curves import draw_links, draw_loss, draw_throughput, draw_workers
from atoll.report.html import Figure, page
from atoll.report.perfetto import export_perfetto
from atoll.report.run import RunRecord, load_run, worker_islands
from atoll.report.timeline import Panel, draw_panels, panel
from atoll.trace.span import Span, Trace

__all__ = ["ReportPaths", "ReportRecord", "TrainingFigures", "write_report"]


class ReportPaths(Record):
    """Where the report lies; a piece that could not be made is None (and the page says why)."""

    html: str
    timeline_png: str | None
    perfetto_json: str | None
    loss_png: str | None
    links_png: str | None
    json: str
    throughput_png: str | None = None
    workers_png: str | None = None


class TrainingFigures(Record):
    """Of the steps logged; ``tokens_per_s``: the median."""

    steps: int
    planned_steps: int | None
    tokens: int
    first_loss: float | None
    last_loss: float | None
    validation_loss: float | None
    tokens_per_s: float | None
    step_ns: float | None


class ReportRecord(Record):
    """``report.json``. ``notes``: what the run lacks; ``troubles``: what could not be drawn or written, and why."""

    run: str
    training: TrainingFigures
    comparison: Comparison
    files: dict[str, str]
    notes: tuple[str, ...]
    troubles: tuple[str, ...]


class _Desk:
    """Collects what was made and what went wrong while one report is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, Path] = {}
        self.troubles: list[str] = []

    def attempt(self, what: str, file: str, make: Callable[[Path], Any]) -> None:
        """Make one piece. Nothing it raises may cost the others their place, so everything is caught and said."""
        path = self.folder / file
        try:
            make(path)
            self.made[file] = path
        except AtollError as error:
            self.troubles.append(f"{what}: {error}.")
        except Exception as error:  # whatever a picture dies of, the other pieces are made
            self.troubles.append(f"{what}: could not be made ({type(error).__name__}: {error}).")
        if file not in self.made:
            path.unlink(missing_ok=True)

    def at(self, file: str) -> str | None:
        return str(self.made[file]) if file in self.made else None


def write_report(run_folder: str | os.PathLike[str]) -> ReportPaths:
    """Write the report of the run in ``run_folder``, also of one that died half-way.

    Raises ``DocumentError`` when the folder holds no run, ``OSError`` when it cannot be written to.
    """
    run = load_run(run_folder)
    root = Path(run_folder)
    desk = _Desk(root / "report")
    desk.folder.mkdir(parents=True, exist_ok=True)
    comparison = _compared(run, desk)
    training = _training(run)
    _draw(run, comparison, training, desk)
    record = ReportRecord(run=run.name, training=training, comparison=comparison,
                          files={name: str(path) for name, path in desk.made.items()}, notes=run.notes,
                          troubles=tuple(desk.troubles))
    write_atomically(desk.folder / "report.json", to_json(record))
    write_atomically(root / "report.html", page(run, comparison, training, _figures(desk), run.notes, tuple(desk.troubles)))
    return ReportPaths(
        html=str(root / "report.html"), timeline_png=desk.at("timeline.png"), perfetto_json=desk.at("trace.perfetto.json"),
        loss_png=desk.at("loss.png"), links_png=desk.at("links.png"), json=str(desk.folder / "report.json"),
        throughput_png=desk.at("throughput.png"), workers_png=desk.at("workers.png"))


def _compared(run: RunRecord, desk: _Desk) -> Comparison:
    try:
        return compare(run.predicted, run.measured)
    except Exception as error:  # a trace that breaks the comparison still leaves curves and pictures
        desk.troubles.append(f"The comparison could not be made ({type(error).__name__}: {error}).")
        return compare(None, None)


def _training(run: RunRecord) -> TrainingFigures:
    losses = [point.loss for point in run.steps if point.loss is not None]
    rates = [point.tokens_per_s for point in run.steps if point.tokens_per_s is not None]
    lengths = [point.step_ns for point in run.steps if point.step_ns is not None]
    return TrainingFigures(
        steps=len(run.steps), planned_steps=run.planned_steps, tokens=run.steps[-1].tokens_seen if run.steps else 0,
        first_loss=losses[0] if losses else None, last_loss=losses[-1] if losses else None,
        validation_loss=run.evaluations[-1].loss if run.evaluations else None,
        tokens_per_s=median(rates) if rates else None, step_ns=median(lengths) if lengths else None)


def _draw(run: RunRecord, comparison: Comparison, training: TrainingFigures, desk: _Desk) -> None:
    islands = worker_islands(run.cluster)
    predicted = _step_spans(run.predicted, comparison.predicted_step)
    measured = _step_spans(run.measured, comparison.measured_step)
    tokens = run.steps[-1].tokens if run.steps else 0
    rate = tokens * 1e9 / comparison.step.predicted_ns if tokens and comparison.step.predicted_ns else None

    def timeline(path: Path) -> Path:
        return draw_panels(path, _panels(run, comparison), islands=islands, name=run.name)

    desk.attempt("Timeline", "timeline.png", timeline)
    desk.attempt("Perfetto trace", "trace.perfetto.json", lambda path: export_perfetto(
        path, run.predicted, run.measured, step=comparison.measured_step, memory=run.memory))
    desk.attempt("Loss curve", "loss.png", lambda path: draw_loss(path, run.steps, run.evaluations))
    desk.attempt("Throughput", "throughput.png", lambda path: draw_throughput(path, run.steps, rate))
    desk.attempt("Links", "links.png", lambda path: draw_links(path, predicted, measured, islands))
    desk.attempt("Workers", "workers.png", lambda path: draw_workers(path, predicted, measured, run.workers))


def _panels(run: RunRecord, comparison: Comparison) -> list[Panel]:
    panels = []
    if run.predicted is not None and comparison.predicted_step is not None:
        panels.append(panel("Predicted", run.predicted, step=comparison.predicted_step, memory=run.memory or None))
    if run.measured is not None and comparison.measured_step is not None:
        panels.append(panel("Measured", run.measured, step=comparison.measured_step))
    return panels


def _step_spans(trace: Trace | None, step: int | None) -> tuple[Span, ...] | None:
    return by_step(trace).get(step) if trace is not None and step is not None else None


def _figures(desk: _Desk) -> dict[str, Figure]:
    return {name.removesuffix(".png"): Figure(path=str(path)) for name, path in desk.made.items() if name.endswith(".png")}
