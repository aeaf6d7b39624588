"""The page itself: one HTML file with its style and pictures inside, for phone, desk and paper, light and dark."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.records import Record
from atoll.report.compare import Comparison
from atoll.report.run import RunRecord
from atoll.report.tables import (
    Table,
    cluster_tables,
    kind_table,
    lane_table,
    memory_table,
    plan_table,
    signed,
    step_table,
    worker_table,
)
from atoll.units import format_count, format_duration

if TYPE_CHECKING:
    from atoll.report.page import TrainingFigures

__all__ = ["Figure", "page"]

STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --muted: #66717f; --rule: #dfe3e8; --paper: #fbfbf9; --card: #ffffff;
  --accent: #b4541f; --good: #2f7a4d; --bad: #a8323f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --muted: #97a1ad; --rule: #333b45; --paper: #14181d;
  --card: #1b2027; --accent: #e08a55; --good: #6fbf8d; --bad: #e5808b; }
  figure img { filter: invert(0.895) hue-rotate(180deg) saturate(0.9); } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; font-size: 16px;
  font-family: system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2.2rem 1.25rem 4rem; }
h1 { font: 600 2rem/1.15 Charter, "Iowan Old Style", Georgia, serif; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font: 600 1.3rem/1.25 Charter, "Iowan Old Style", Georgia, serif; margin: 3rem 0 .7rem; padding-top: .9rem;
  border-top: 1px solid var(--rule); }
h3 { font-size: .8rem; font-weight: 600; letter-spacing: .04em; text-transform: uppercase; color: var(--muted);
  margin: 1.6rem 0 .4rem; }
p, ol, ul { max-width: 70ch; margin: .5rem 0; }
.lead { font-size: 1.12rem; }
.muted { color: var(--muted); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1px; margin: 1.5rem 0 0;
  padding: 0; background: var(--rule); border: 1px solid var(--rule); }
.figures div { background: var(--card); padding: .75rem .9rem; }
.figures dt { font-size: .78rem; color: var(--muted); }
.figures dd { margin: .1rem 0 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.figures small { display: block; font-size: .78rem; color: var(--muted); }
figure { margin: 1rem 0; }
figure .wide, .scroll { overflow-x: auto; border: 1px solid var(--rule); background: var(--card); }
figure img { display: block; width: 100%; height: auto; }
figure .wide img { min-width: 1000px; }
figure .plain img { min-width: 0; }
@media (min-width: 1240px) { figure.bleed { margin-left: calc((100% - min(100vw - 4rem, 1560px)) / 2);
  width: min(100vw - 4rem, 1560px); } }
figcaption { font-size: .88rem; color: var(--muted); margin-top: .5rem; max-width: 78ch; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 600; color: var(--muted); vertical-align: bottom; }
th.word, td.word { text-align: left; }
td { white-space: nowrap; }
tbody tr:last-child td { border-bottom: 0; }
ol.reasons li { margin: .25rem 0; }
.verdict { border-left: 3px solid var(--good); padding: .1rem 0 .1rem .8rem; }
.verdict.no { border-color: var(--bad); }
.notes { border-left: 3px solid var(--accent); padding: .1rem 0 .1rem .8rem; }
a { color: var(--accent); }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
details summary { cursor: pointer; color: var(--muted); font-size: .92rem; margin: .8rem 0; }
footer { margin-top: 3rem; font-size: .82rem; color: var(--muted); }
@media (max-width: 640px) { body { font-size: 15px; } h1 { font-size: 1.6rem; } main { padding: 1.4rem .9rem 3rem; }
  .figures { grid-template-columns: repeat(2, 1fr); }
  figure .plain img { min-width: 640px; } }
@media print { :root { --ink: #000; --muted: #555; --rule: #ccc; --paper: #fff; --card: #fff; --accent: #8a3d12; }
  body { font-size: 10.5pt; } main { max-width: none; padding: 0; } figure img { filter: none; }
  figure .wide img { min-width: 0; } .scroll, figure .wide { overflow: visible; border: 0; }
  table { font-size: 8pt; } th, td { padding: .15rem .35rem; } td { white-space: normal; }
  figure, table { break-inside: avoid; } h2, h3 { break-after: avoid; } }
"""


class Figure(Record):
    """A PNG on disk that the page takes in."""

    path: str


def page(run: RunRecord, comparison: Comparison, training: TrainingFigures, figures: Mapping[str, Figure],
         notes: Sequence[str], troubles: Sequence[str]) -> str:
    """The whole document as text."""
    parts = [f"<h1>{escape(run.name)}</h1>", f'<p class="lead">{escape(_lead(comparison, training))}</p>',
             _key_figures(comparison, training), _gaps(notes, troubles), _plan(run), _training(run, figures),
             _timeline(figures), _links(comparison, figures), _workers(run, comparison, figures), _agreement(comparison),
             _cluster(run), _files(run, figures)]
    return ("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">"
            f"<title>{escape(run.name)} · Atoll</title><style>{STYLE}</style></head>\n<body><main>\n"
            + "\n".join(part for part in parts if part)
            + "\n<footer>Written by Atoll from the traces and records of the run.</footer>\n</main></body></html>\n")


def _lead(comparison: Comparison, training: TrainingFigures) -> str:
    """What happened, in two sentences."""
    sentences = []
    if training.steps:
        wanted = f" of {training.planned_steps}" if training.planned_steps and training.planned_steps != training.steps else ""
        sentence = f"{training.steps}{wanted} steps over {format_count(training.tokens)} tokens"
        if training.first_loss is not None and training.last_loss is not None:
            sentence += f" took the training loss from {training.first_loss:.3f} to {training.last_loss:.3f}"
        sentences.append(sentence + ".")
    else:
        sentences.append("No training step was logged.")
    step = comparison.step
    if step.predicted_ns is not None and step.measured_ns is not None:
        sentences.append(f"A step took {format_duration(step.measured_ns)} where {format_duration(step.predicted_ns)} was "
                         f"predicted ({signed(step.error_percent)}).")
    elif step.predicted_ns is not None:
        sentences.append(f"A step was predicted to take {format_duration(step.predicted_ns)}; none was measured.")
    elif step.measured_ns is not None:
        sentences.append(f"A step took {format_duration(step.measured_ns)}; there was no prediction.")
    return " ".join(sentences)


def _key_figures(comparison: Comparison, training: TrainingFigures) -> str:
    step = comparison.step
    entries = []
    if step.measured_ns is not None:
        entries.append(("step time, measured", format_duration(step.measured_ns), f"median of {step.steps} steps"))
    if step.predicted_ns is not None:
        entries.append(("step time, predicted", format_duration(step.predicted_ns),
                        f"off by {signed(step.error_percent)}" if step.error_percent is not None else ""))
    if training.tokens_per_s is not None:
        entries.append(("throughput", format_count(training.tokens_per_s), "tokens/s, median"))
    if training.last_loss is not None:
        entries.append(("training loss", f"{training.last_loss:.3f}", "last step"))
    if training.validation_loss is not None:
        entries.append(("validation loss", f"{training.validation_loss:.3f}", "last evaluation"))
    if step.measured_bubble_makespan is not None:
        entries.append(("bubble", f"{100 * step.measured_bubble_makespan:.0f} %", "of the step, mean over workers"))
    cells = "".join(f"<div><dt>{escape(word)}</dt><dd>{escape(value)}<small>{escape(small)}</small></dd></div>"
                    for word, value, small in entries)
    return f'<dl class="figures">{cells}</dl>' if cells else ""


def _gaps(notes: Sequence[str], troubles: Sequence[str]) -> str:
    lines = [*notes, *troubles]
    if not lines:
        return ""
    return f'<div class="notes"><h3>What this report lacks</h3>{_bullets(lines)}</div>'


def _bullets(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _plan(run: RunRecord) -> str:
    stages = plan_table(run.plan) if run.plan else None
    if not run.explanation and stages is None:
        return ""
    facts = [f"{word} {run.plan[key]}" for key, word in (("schedule", "schedule"), ("microbatch_samples", "microbatches of"),
             ("collective", "gradients summed by")) if key in run.plan]
    lines = "".join(f"<li>{escape(line)}</li>" for line in run.explanation)
    reasons = f'<ol class="reasons">{lines}</ol>' if lines else ""
    return ("<h2>The plan and its reasons</h2>" + reasons
            + (f'<p class="muted">{escape(", ".join(facts))}</p>' if facts else "") + _table(stages))


def _training(run: RunRecord, figures: Mapping[str, Figure]) -> str:
    loss = _figure(figures, "loss", "Loss of each training step and of each evaluation on held-out text.")
    rate = _figure(figures, "throughput",
                   "Tokens per second of each step; the prediction is a step's tokens over its predicted time.")
    return f"<h2>Training</h2>{loss}{rate}" if loss or rate else ""


def _timeline(figures: Mapping[str, Figure]) -> str:
    drawn = _figure(figures, "timeline", (
        "One step, predicted over measured on one time axis. A row is a worker, a box an instruction with its microbatch "
        "number; the violet curve is live memory (or the count of live microbatches where bytes are not known). Link rows show "
        "what occupied a link from the sender's side; links between islands have coloured names."), wide=True)
    return f"<h2>Timeline</h2>{drawn}" if drawn else ""


def _links(comparison: Comparison, figures: Mapping[str, Figure]) -> str:
    table = lane_table(comparison, links_only=True)
    drawn = _figure(figures, "links", (
        "Bytes of one step and share of the step in which each directed link was taken, from the sender's side. Collectives "
        "that a library does whole stand under their worker, with the size of what they sum."))
    return f"<h2>Links</h2>{drawn}{_folded('Links in figures', table)}" if drawn or table.rows else ""


def _workers(run: RunRecord, comparison: Comparison, figures: Mapping[str, Figure]) -> str:
    table = worker_table(comparison)
    peaks = memory_table(run.summary)
    memory = f"<h3>Predicted peak memory</h3>{_table(peaks)}" if peaks else ""
    drawn = _figure(figures, "workers", (
        "How each worker spent the step. Exposed communication: nothing computed while a message to this worker was under way. "
        "Waiting: nothing computed and nothing under way, until the named peer sent."))
    return f"<h2>Workers</h2>{drawn}{_folded('Workers in figures', table)}{memory}" if drawn or table.rows or memory else ""


def _agreement(comparison: Comparison) -> str:
    if comparison.step.predicted_ns is None and comparison.step.measured_ns is None:
        return ""
    twin = comparison.twin
    verdict = "" if twin.holds is not False else " no"
    lines = [*twin.differences, *([f"and {twin.more} more"] if twin.more else [])]
    return ("<h2>Predicted beside measured</h2>" + _table(step_table(comparison))
            + f'<p class="verdict{verdict}">{escape(twin.sentence)}</p>' + (_bullets(lines) if lines else "")
            + _folded("Instructions, mean duration on each worker", kind_table(comparison))
            + _folded("Every lane of every worker", lane_table(comparison)))


def _cluster(run: RunRecord) -> str:
    if not run.cluster:
        return ""
    tables = "".join(f"<h3>{escape(table.title)}</h3>{_table(table)}" for table in cluster_tables(run.cluster) if table.rows)
    return f"<h2>The machines</h2>{tables}"


def _files(run: RunRecord, figures: Mapping[str, Figure]) -> str:
    root = Path(run.folder)
    items = []
    if (root / "report" / "trace.perfetto.json").exists():
        items.append('<li><a href="report/trace.perfetto.json">trace.perfetto.json</a>: open <code>ui.perfetto.dev</code> in a '
                     "browser and drop the file there; the prediction lies under the measured step of the picture above</li>")
    items += [f'<li><a href="report/{name}.png">{name}.png</a></li>' for name in figures]
    items.append('<li><a href="report/report.json">report.json</a>: every figure of this page</li>')
    if run.checkpoints:
        shown = ", ".join(f"<code>{escape(name)}</code>" for name in run.checkpoints[-4:])
        items.append(f"<li>checkpoints: {shown}</li>")
    return f"<h2>Files</h2><ul>{''.join(items)}</ul>"


def _figure(figures: Mapping[str, Figure], name: str, caption: str, *, wide: bool = False) -> str:
    found = figures.get(name)
    if found is None:
        return ""
    data = base64.b64encode(Path(found.path).read_bytes()).decode()
    return (f'<figure{" class=bleed" if wide else ""}><div class="{"wide" if wide else "wide plain"}">'
            f'<img alt="{escape(caption, quote=True)}" src="data:image/png;base64,{data}"></div>'
            f"<figcaption>{escape(caption)}</figcaption></figure>")


def _folded(title: str, table: Table) -> str:
    return f"<details><summary>{escape(title)}</summary>{_table(table)}</details>" if table.rows else ""


def _table(table: Table | None) -> str:
    if table is None or not table.rows:
        return ""

    def cells(tag: str, row: Sequence[Any]) -> str:
        return "".join(f'<{tag}{" class=word" if index < table.labels else ""}>{escape(str(cell))}</{tag}>'
                       for index, cell in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    return f'<div class="scroll"><table><thead><tr>{cells("th", table.columns)}</tr></thead><tbody>{body}</tbody></table></div>'
