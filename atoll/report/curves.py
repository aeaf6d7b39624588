"""Curves and bars of a run: loss over tokens, throughput over time, bytes and busy share of links, shares of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from atoll.errors import AtollError
from atoll.report import style
from atoll.report.analysis import Shares, latencies, link_use, window, worker_shares
from atoll.report.run import EvaluationPoint, StepPoint
from atoll.trace.span import Span
from atoll.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_links", "draw_loss", "draw_throughput", "draw_workers", "smoothed"]

MOST_BARS = 20
"""Rows of a bar picture; pairs beyond it are summed by islands."""

LinkUse = Mapping[tuple[str, str], tuple[int, int, int]]


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Mean over ``reach`` values to either side (fewer at the ends, as many on the left as on the right): it does not lag."""
    sums = [0.0, *accumulate(values)]
    result = []
    for index in range(len(values)):
        near = min(reach, index, len(values) - 1 - index)
        result.append((sums[index + near + 1] - sums[index - near]) / (2 * near + 1))
    return result


def draw_loss(path: Path, steps: Sequence[StepPoint], evaluations: Sequence[EvaluationPoint]) -> Path:
    """Training and validation loss over the tokens seen. Raises ``AtollError`` when no step was logged."""
    points = [(step.tokens_seen, step.loss) for step in steps if step.loss is not None]
    if not points:
        raise AtollError("loss curve: metrics.jsonl has no line with a loss")
    tokens = [point[0] for point in points]
    losses = [point[1] for point in points]
    with style.figure(9.0, 4.2) as figure:
        axes = figure.add_axes((0.075, 0.135, 0.80, 0.80))
        long = len(points) > 60
        axes.plot(tokens, losses, color=style.PREDICTED if long else style.MEASURED, linewidth=0.8 if long else 1.4,
                  label="training, each step")
        if long:
            axes.plot(tokens, smoothed(losses, max(2, len(losses) // 80)), color=style.MEASURED,
                      linewidth=1.6, label="training, smoothed")
        seen = [(point.tokens_seen, point.loss) for point in evaluations]
        if seen:
            axes.plot([x for x, _ in seen], [y for _, y in seen], color=style.ACCENT, linewidth=1.2, marker="o",
                      markersize=4 if len(seen) < 30 else 0, label="validation")
        last = [("training", losses[-1] if not long else sum(losses[-10:]) / len(losses[-10:]), style.MEASURED)]
        last += [("validation", seen[-1][1], style.ACCENT)] if seen else []
        _end_labels(axes, last)
        axes.set_ylabel("loss (nats a token)")
        axes.set_xlabel("tokens trained on")
        axes.xaxis.set_major_formatter(lambda value, _: format_count(value) if value else "0")
        axes.grid(True, axis="y")
        axes.set_xlim(0, max(tokens) * 1.01)
        axes.legend(loc="upper right", ncols=3)
        return style.save_png(figure, path)


def _end_labels(axes: Axes, labels: Sequence[tuple[str, float, str]]) -> None:
    """Name the last value of each curve at its right end, apart from each other."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.075
    at = high + gap
    for word, value, colour in sorted(labels, key=lambda label: -label[1]):
        at = min(value, at - gap)
        axes.annotate(f"{word} {value:.3f}", (1.0, at), xycoords=("axes fraction", "data"), xytext=(5, 0),
                      textcoords="offset points", va="center", fontsize=8, color=colour)
    axes.set_ylim(low, high)


def draw_throughput(path: Path, steps: Sequence[StepPoint], predicted_tokens_per_s: float | None = None) -> Path:
    """Tokens per second over wall time, with the median and, where known, the prediction."""
    points = [(step.time_ns, step.tokens_per_s) for step in steps if step.tokens_per_s is not None]
    if not points:
        raise AtollError("throughput: metrics.jsonl has no line with tokens_per_s")
    first = min(time for time, _ in points)
    rates = [rate for _, rate in points]
    with style.figure(9.0, 3.0) as figure:
        axes = figure.add_axes((0.095, 0.185, 0.74, 0.72))
        axes.plot([(time - first) / 1e9 for time, _ in points], rates, color=style.MEASURED, linewidth=1.1,
                  marker="o" if len(points) < 40 else None, markersize=2.5)
        middle = median(rates)
        labels = [(middle, f"median {format_count(middle)}", style.MEASURED)]
        if predicted_tokens_per_s:
            labels.append((predicted_tokens_per_s, f"predicted {format_count(predicted_tokens_per_s)}", style.ACCENT))
        top = max([*rates, predicted_tokens_per_s or 0.0]) * 1.08
        axes.set_ylim(0, top)
        at = top
        for value, word, colour in sorted(labels, reverse=True):
            axes.axhline(value, color=colour, linewidth=0.8, linestyle=(0, (4, 3)))
            at = min(value, at - top * 0.09)
            axes.annotate(word, (1.0, at), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
                          va="center", fontsize=8, color=colour)
        axes.yaxis.set_major_formatter(lambda value, _: format_count(value) if value else "0")
        axes.set_ylabel("tokens/s")
        axes.set_xlabel("time since the first step ended (s)")
        axes.grid(True, axis="y")
        return style.save_png(figure, path)


def draw_links(path: Path, predicted: Sequence[Span] | None, measured: Sequence[Span] | None,
               islands: Mapping[str, str] | None = None) -> Path:
    """Bytes and busy share of every directed link in one step, predicted next to measured.

    With more than ``MOST_BARS`` pairs of workers, pairs are summed by islands (their busy share is the mean of the pairs).
    """
    sides = [side for side in (predicted, measured) if side]
    latency_ns = latencies(predicted) if predicted else None
    uses = [link_use(side, latency_ns) for side in sides]
    if not any(uses):
        raise AtollError("links: no message travelled in the steps at hand (one worker, or an empty trace)")
    where = islands or {}
    keys = {key for use in uses for key in use}
    if len(keys) > MOST_BARS:
        uses = [_by_island(use, where) for use in uses]
        keys = {key for use in uses for key in use}
    ordered = sorted(keys, key=lambda key: (-max(use[key][1] for use in uses if key in use), key))[: 2 * MOST_BARS]
    colours = ([style.PREDICTED] if predicted else []) + ([style.MEASURED] if measured else [])
    words = (["predicted"] if predicted else []) + (["measured"] if measured else [])
    lengths = [max(window(side).length_ns, 1) for side in sides]
    most = max(use[key][1] for use in uses for key in use)
    scale, unit = next((pair for pair in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if most >= pair[0]), (1, "bytes"))
    height = 1.15 + 0.36 * len(ordered)
    with style.figure(9.0, height) as figure:
        bottom, tall = 0.5 / height, 1 - 1.05 / height
        left = figure.add_axes((0.155, bottom, 0.37, tall))
        right = figure.add_axes((0.595, bottom, 0.37, tall))
        for index, (use, colour, word, length) in enumerate(zip(uses, colours, words, lengths, strict=True)):
            thick = 0.76 / len(uses)
            at = [row - 0.38 + thick * (index + 0.5) for row in range(len(ordered))]
            amounts = [use.get(key, (0, 0, 0))[1] for key in ordered]
            busy = [100 * use.get(key, (0, 0, 0))[2] / length for key in ordered]
            left.barh(at, [amount / scale for amount in amounts], thick * 0.9, color=colour, label=word)
            right.barh(at, busy, thick * 0.9, color=colour)
            for axes, values, texts in ((left, [amount / scale for amount in amounts],
                                         [format_bytes(value) for value in amounts]),
                                        (right, busy, [f"{value:.1f} %" for value in busy])):
                for y, value, text in zip(at, values, texts, strict=True):
                    axes.annotate(text, (value, y), (3, 0), textcoords="offset points", va="center", fontsize=6.8,
                                  color=style.MUTED)
        names = [f"{source}, collectives" if not target else f"{source} → {target}" if source != target
                 else f"inside {source}" for source, target in ordered]
        for axes, title in ((left, f"sent in a step ({unit})"), (right, "busy, share of the step (%)")):
            _bar_axes(axes, title, len(ordered))
        left.set_yticks(range(len(ordered)), names, color=style.INK)
        for key, label in zip(ordered, left.get_yticklabels(), strict=True):
            if key[1] and where.get(key[0], key[0]) != where.get(key[1], key[1]):
                label.set_color(style.ACCENT)
        right.set_yticks([])
        left.set_xlim(0, left.get_xlim()[1] * 1.16)
        right.set_xlim(0, max(right.get_xlim()[1] * 1.14, 1))
        left.locator_params(axis="x", nbins=4)
        figure.legend(loc="upper right", ncols=2, bbox_to_anchor=(0.965, 1 - 0.06 / height))
        return style.save_png(figure, path)


def _by_island(use: LinkUse, islands: Mapping[str, str]) -> dict[tuple[str, str], tuple[int, int, int]]:
    summed: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for (source, target), figures in use.items():
        summed.setdefault((islands.get(source, "all"), islands.get(target, "all") if target else ""), []).append(figures)
    return {key: (sum(row[0] for row in rows), sum(row[1] for row in rows), sum(row[2] for row in rows) // len(rows))
            for key, rows in summed.items()}


def _bar_axes(axes: Axes, title: str, rows: int) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_ylim(rows - 0.4, -0.6)
    axes.grid(True, axis="x")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


PARTS = (("compute", style.KIND_COLOURS["F"]), ("exposed communication", style.EXPOSED), ("waiting", style.WAITING),
         ("idle", style.IDLE))


def draw_workers(path: Path, predicted: Sequence[Span] | None, measured: Sequence[Span] | None, workers: Sequence[str]) -> Path:
    """How each worker spent one step: compute, exposed communication, waiting (and for whom), idle."""
    sides = [(word, worker_shares(spans, workers), max(window(spans).length_ns, 1))
             for word, spans in (("predicted", predicted), ("measured", measured)) if spans]
    if not sides or not workers:
        raise AtollError("workers: there is no complete step to show")
    thick = min(0.34, max(0.12, 14 / (len(workers) * (len(sides) + 0.5))))
    pitch = thick * (len(sides) + 0.45)
    longest = max(length for _, _, length in sides)
    height = 1.15 + pitch * len(workers)
    with style.figure(9.0, height) as figure:
        axes = figure.add_axes((0.17, 0.48 / height, 0.80, 1 - 0.98 / height))
        inch = 9.0 * 0.80 / longest
        for row in range(len(workers)):
            for index, (word, shares, _) in enumerate(sides):
                y = row * pitch + thick * (index + 0.5)
                _share_bar(axes, shares[row], y, thick * 0.92, inch)
                if thick >= 0.17 and len(sides) > 1:
                    axes.annotate(word, (0, y), (-4, 0), textcoords="offset points", ha="right", va="center", fontsize=6.4,
                                  color=style.MUTED)
            axes.annotate(workers[row], (0, row * pitch + thick * len(sides) / 2), (-62 if len(sides) > 1 else -6, 0),
                          textcoords="offset points", ha="right", va="center", fontsize=min(9.0, thick * 60), fontweight="bold")
        axes.set_xlim(0, longest)
        axes.set_ylim(pitch * len(workers), -0.04)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: format_duration(value) if value else "0")
        axes.set_xlabel("time in the step")
        from matplotlib.patches import Patch

        figure.legend(handles=[Patch(color=colour, label=word) for word, colour in PARTS], loc="upper left", ncols=4,
                      bbox_to_anchor=(0.165, 1 - 0.08 / height), borderaxespad=0, handlelength=1.0, handleheight=0.9)
        return style.save_png(figure, path)


def _share_bar(axes: Axes, shares: Shares, y: float, thick: float, inch: float) -> None:
    parts = [(shares.compute_ns, PARTS[0][1], f"{100 * shares.compute_ns / max(shares.total_ns, 1):.0f} %"),
             (shares.exposed_ns, PARTS[1][1], f"{100 * shares.exposed_ns / max(shares.total_ns, 1):.0f} %")]
    words = {"native": "the collective", "copy": "own copies", "disk": "data"}
    parts += [(ns, PARTS[2][1], f"for {words.get(who, who)}")
              for who, ns in sorted(shares.waiting_ns.items(), key=lambda pair: -pair[1])]
    parts.append((shares.idle_ns, PARTS[3][1], ""))
    at = 0
    size = min(7.4, thick * 72 * 0.62)
    for length, colour, text in parts:
        axes.barh(y, length, thick, left=at, color=colour, edgecolor=style.PAPER, linewidth=0.5)
        if text and size >= 4.5 and length * inch * 72 > len(text) * size * 0.64 + 4:
            axes.text(at + length / 2, y, text, ha="center", va="center", fontsize=size, color=style.readable_on(colour))
        at += length
