"""The pipeline timeline as the field draws it: a row per worker, a box per instruction, predicted over measured.

Both panels show one step, begin at its start and share one scale, so that a box that moved is a box that moved. Under each
worker's compute row lie thin strips for its other lanes (collective, copy, disk) and, where live memory is known, its curve;
beneath the workers one row per directed link shows what occupied it. The y axis is in inches, which is how this file knows
whether a number fits into its box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import AtollError
from atoll.records import Record
from atoll.report import style
from atoll.report.analysis import (
    KINDS,
    activation_counts,
    bubbles,
    by_lane,
    by_step,
    kind_means_ns,
    occupied,
    parse_name,
    shown_step,
    step_lengths,
    window,
)
from atoll.report.rows import Layout, Row, lay_out
from atoll.trace.span import Span, Trace
from atoll.units import format_bytes, format_duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

__all__ = ["MemoryCurves", "Panel", "draw_panels", "draw_timeline", "panel"]

MemoryCurves = Mapping[str, Sequence[tuple[int, int]]]
"""By worker: (time in ns from the step's start, live bytes), a value holds until the next."""

WIDTH_IN = 13.0
LEFT_IN, RIGHT_IN = 1.3, 0.95
TITLE_IN, AXIS_IN, PAD_IN = 0.36, 0.5, 0.12
MOST_NUMBERS = 3000
BINS = 600


class Panel(Record):
    """One step of one trace, ready to be drawn; spans keep their times, ``origin_ns`` is what zero on the axis means.

    ``length_ns``: first start to last end. ``step_ns``: the step's time as tables give it (from the end of the one before).
    ``counted``: the curves count live microbatches, because bytes are not known.
    """

    title: str
    step: int
    spans: tuple[Span, ...]
    origin_ns: int
    length_ns: int
    step_ns: int
    memory: dict[str, tuple[tuple[int, int], ...]]
    counted: bool


def panel(title: str, trace: Trace, *, step: int | None = None, memory: MemoryCurves | None = None) -> Panel:
    """Choose ``step`` (default: ``analysis.shown_step``). ``memory``: live bytes; without it live microbatches are counted.

    Raises ``AtollError`` when the trace has no such complete step.
    """
    steps = by_step(trace)
    chosen = shown_step(trace, steps) if step is None else step
    if chosen is None or chosen not in steps:
        raise AtollError(f"{title.lower()} timeline: the trace has no step {'that is complete' if step is None else step}")
    spans = steps[chosen]
    whole = window(spans)
    curves = memory or activation_counts(spans)
    return Panel(title=title, step=chosen, spans=spans, origin_ns=whole.start_ns, length_ns=max(whole.length_ns, 1),
                 step_ns=step_lengths(steps)[chosen], memory={worker: tuple(curve) for worker, curve in curves.items()},
                 counted=not memory)


def draw_timeline(trace: Trace, path: Path, *, measured: Trace | None = None, step: int | None = None,
                  memory: MemoryCurves | None = None, islands: Mapping[str, str] | None = None, name: str = "") -> Path:
    """Draw one step of ``trace`` (``step``, or the steady one), and below it the steady step of ``measured``, as a PNG.

    ``memory``: live bytes of that step of ``trace``. Raises ``AtollError`` when there is no such complete step.
    """
    title = "Measured" if trace.header.clock == "measured" else "Predicted"
    panels = [panel(title, trace, step=step, memory=memory)]
    if measured is not None:
        panels.append(panel("Measured", measured))
    return draw_panels(path, panels, islands=islands, name=name)


def draw_panels(path: Path, panels: Sequence[Panel], *, islands: Mapping[str, str] | None = None, name: str = "") -> Path:
    """Draw the panels over each other on one time axis into the PNG ``path``.

    ``islands``: island by worker, for the order of rows and to tell links between islands from those inside.
    Works for 1 to about 64 workers; numbers that do not fit into their boxes are left out, as are strips and memory curves
    where rows become too thin, and links are drawn as occupancy between islands when there are too many pairs.
    """
    if not panels:
        raise AtollError("timeline: there is neither a predicted nor a measured trace to draw")
    everything = [span for one in panels for span in one.spans]
    layouts = [lay_out(everything, islands or {}, bool(one.memory)) for one in panels]
    handles = _handles(panels)
    columns = min(len(handles), 6)
    head = (0.38 if name else 0.12) + 0.165 * -(-len(handles) // max(columns, 1)) + 0.08
    height = head + AXIS_IN + sum(layout.height_in + TITLE_IN for layout in layouts) + (len(panels) - 1) * PAD_IN
    longest = max(one.length_ns for one in panels)
    scale, unit = _time_unit(longest)
    with style.figure(WIDTH_IN, height, dpi=150 if height < 18 else 110) as figure:
        if name:
            figure.text(LEFT_IN / WIDTH_IN, 1 - 0.2 / height, name, fontsize=12, fontweight="bold", va="center")
        figure.legend(handles=handles, loc="upper left", ncols=columns, fontsize=7.4, handlelength=1.0, handleheight=0.9,
                      columnspacing=1.4, borderaxespad=0, borderpad=0,
                      bbox_to_anchor=(LEFT_IN / WIDTH_IN, 1 - (0.38 if name else 0.12) / height))
        top = head
        for index, (one, layout) in enumerate(zip(panels, layouts, strict=True)):
            top += TITLE_IN
            axes = figure.add_axes((LEFT_IN / WIDTH_IN, 1 - (top + layout.height_in) / height,
                                    1 - (LEFT_IN + RIGHT_IN) / WIDTH_IN, layout.height_in / height))
            axes.set_xlim(0, longest / scale * 1.003)
            axes.set_ylim(layout.height_in, 0)
            _draw_panel(axes, one, layout, scale)
            _caption(axes, one, panels[0] if index else None)
            _time_axis(axes, f"time since the start of the step ({unit})" if index == len(panels) - 1 else "")
            top += layout.height_in + PAD_IN
        return style.save_png(figure, path)


def _time_unit(longest_ns: int) -> tuple[float, str]:
    for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if longest_ns >= 2 * scale:
            return scale, unit
    return 1.0, "ns"


def _draw_panel(axes: Axes, one: Panel, layout: Layout, scale: float) -> None:
    lanes = by_lane(one.spans)
    chunks = _chunks(one.spans)
    inch = (WIDTH_IN - LEFT_IN - RIGHT_IN) / (axes.get_xlim()[1] * scale)
    budget = MOST_NUMBERS
    most = max((value for curve in one.memory.values() for _, value in curve), default=0)
    for row in layout.rows:
        if row.kind == "compute":
            spans = lanes.get((row.worker, "compute"), [])
            axes.broken_barh([(0, one.length_ns / scale)], (row.top_in, row.height_in), facecolors=style.IDLE)
            colours = [_shade(span, chunks) for span in spans]
            budget = _boxes(axes, one, row, spans, colours, scale, inch, budget)
            _row_label(axes, row, one)
            _share_label(axes, row, one, spans)
        elif row.kind == "strip":
            spans = lanes.get((row.worker, row.lane), [])
            _boxes(axes, one, row, spans, [style.kind_colour(span) for span in spans], scale, inch, 0)
        elif row.kind == "memory" and row.worker in one.memory:
            _memory(axes, one, row, most, scale)
        elif row.kind == "link":
            spans = lanes.get((row.worker, row.lane), [])
            axes.broken_barh([(0, one.length_ns / scale)], (row.top_in, row.height_in), facecolors=style.IDLE)
            colours = [style.CONTENT[style.content_of(span)] for span in spans]
            budget = _boxes(axes, one, row, spans, colours, scale, inch, budget)
            _link_label(axes, row, one, spans)
        elif row.kind == "flow":
            _flow(axes, one, row, scale)
        elif row.kind == "heading":
            axes.text(-0.004, row.top_in + row.height_in / 2, row.label, transform=axes.get_yaxis_transform(), ha="right",
                      va="center", fontsize=6.8, color=style.MUTED, style="italic")
    axes.axvline(one.length_ns / scale, color=style.ACCENT, linewidth=0.9, linestyle=(0, (4, 2)))


def _chunks(spans: Sequence[Span]) -> dict[tuple[str, int], tuple[int, int]]:
    """By (worker, stage): which of the worker's stages it is, of how many."""
    stages: dict[str, set[int]] = {}
    for span in spans:
        stage = parse_name(span.name).stage
        if stage is not None and span.lane == "compute":
            stages.setdefault(span.worker, set()).add(stage)
    return {(worker, stage): (index, len(own)) for worker, own in stages.items() for index, stage in enumerate(sorted(own))}


def _shade(span: Span, chunks: Mapping[tuple[str, int], tuple[int, int]]) -> str:
    """Several stages on a worker: the first is pale, the last is deep (as interleaved schedules are drawn)."""
    colour = style.kind_colour(span)
    stage = parse_name(span.name).stage
    index, count = chunks.get((span.worker, stage), (0, 1)) if stage is not None else (0, 1)
    if count == 1:
        return colour
    depth = index / (count - 1)
    return style.mixed(colour, "#ffffff", 0.5 * (1 - depth)) if depth < 0.5 else style.mixed(colour, "#000000", 0.3 * depth)


def _boxes(axes: Axes, one: Panel, row: Row, spans: Sequence[Span], colours: Sequence[str], scale: float, inch: float,
           budget: int) -> int:
    """Draw boxes and what numbers fit (at most ``budget``); return what is left of the budget."""
    if not spans:
        return budget
    ranges = [((span.start_ns - one.origin_ns) / scale, (span.end_ns - span.start_ns) / scale) for span in spans]
    widths = sorted((span.end_ns - span.start_ns) * inch for span in spans)
    edge = 0.5 if widths[len(widths) // 2] > 0.05 else 0.25 if widths[len(widths) // 2] > 0.035 else 0.0
    axes.broken_barh(ranges, (row.top_in, row.height_in), facecolors=colours, edgecolors=style.PAPER, linewidth=edge)
    digits = max(len(str(parse_name(span.name).microbatch or 0)) for span in spans)
    for span, (left, width), colour in zip(spans, ranges, colours, strict=True):
        name = parse_name(span.name)
        if name.microbatch is None or budget <= 0:
            continue
        size = min(8.5, row.height_in * 72 * 0.66, (span.end_ns - span.start_ns) * inch * 72 * 0.82 / (0.64 * digits))
        if size >= 4.4:
            axes.text(left + width / 2, row.top_in + row.height_in * 0.52, str(name.microbatch), ha="center",
                      va="center", fontsize=size, color=style.readable_on(colour), clip_on=True)
            budget -= 1
    return budget


def _row_label(axes: Axes, row: Row, one: Panel) -> None:
    size = min(8.5, row.height_in * 72 * 0.8)
    middle = row.top_in + row.height_in / 2
    two_lines = bool(row.island) and row.height_in >= 0.28
    axes.text(-0.006, middle - (0.07 if two_lines else 0), row.label, transform=axes.get_yaxis_transform(), ha="right",
              va="center", fontsize=size, fontweight="bold")
    if two_lines:
        axes.text(-0.006, middle + 0.08, row.island, transform=axes.get_yaxis_transform(), ha="right", va="center",
                  fontsize=6.8, color=style.MUTED)


def _share_label(axes: Axes, row: Row, one: Panel, spans: Sequence[Span]) -> None:
    busy = sum(span.end_ns - span.start_ns for span in spans)
    axes.text(1.006, row.top_in + row.height_in / 2, f"{100 * busy / one.length_ns:.0f} % busy",
              transform=axes.get_yaxis_transform(), ha="left", va="center", fontsize=min(7.5, row.height_in * 72 * 0.8),
              color=style.INK)


def _link_label(axes: Axes, row: Row, one: Panel, spans: Sequence[Span]) -> None:
    size = min(7.2, row.height_in * 72 * 0.85)
    middle = row.top_in + row.height_in / 2
    axes.text(-0.006, middle, row.label, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=size,
              color=style.ACCENT if row.island else style.INK)
    busy = sum(span.end_ns - span.start_ns for span in spans)
    total = sum(span.size_bytes for span in spans)
    axes.text(1.006, middle, f"{100 * busy / one.length_ns:.0f} % · {format_bytes(total)}", fontsize=size,
              transform=axes.get_yaxis_transform(), ha="left", va="center", color=style.MUTED)


def _memory(axes: Axes, one: Panel, row: Row, most: int, scale: float) -> None:
    curve = [*one.memory[row.worker]]
    if not curve or not most:
        return
    times = [min(max(time, 0), one.length_ns) / scale for time, _ in curve] + [one.length_ns / scale]
    high = max(value for _, value in curve)
    bottom = row.top_in + row.height_in
    heights = [bottom - row.height_in * 0.92 * value / most for _, value in curve]
    heights.append(heights[-1])
    axes.fill_between(times, bottom, heights, step="post", color=style.MEMORY, linewidth=0)
    axes.step(times, heights, where="post", color=style.OTHER_COLOURS["update"], linewidth=0.7)
    axes.text(1.006, row.top_in + row.height_in / 2, f"peak {high} live" if one.counted else f"peak {format_bytes(high)}",
              transform=axes.get_yaxis_transform(), ha="left", va="center", fontsize=min(6.8, row.height_in * 72 * 0.85),
              color=style.OTHER_COLOURS["update"])


def _flow(axes: Axes, one: Panel, row: Row, scale: float) -> None:
    """Many links as one row: how many transfers were under way, as a share of the most there ever were."""
    spans = [span for span in one.spans if (span.worker, span.lane) in row.lanes]
    edges = [one.origin_ns + one.length_ns * index // BINS for index in range(BINS + 1)]
    load = occupied([(span.start_ns, span.end_ns) for span in spans], edges)
    most = max(max(load, default=0.0), 1.0)
    bottom = row.top_in + row.height_in
    axes.broken_barh([(0, one.length_ns / scale)], (row.top_in, row.height_in), facecolors=style.IDLE)
    axes.fill_between([(edge - one.origin_ns) / scale for edge in edges[:-1]], bottom,
                      [bottom - row.height_in * value / most for value in load], step="post",
                      color=style.EXPOSED if row.island else style.MUTED, linewidth=0)
    size = min(7.2, row.height_in * 72 * 0.85)
    axes.text(-0.006, bottom - row.height_in / 2, row.label, transform=axes.get_yaxis_transform(), ha="right", va="center",
              fontsize=size, color=style.ACCENT if row.island else style.INK)
    axes.text(1.006, bottom - row.height_in / 2, f"{format_bytes(sum(span.size_bytes for span in spans))}", fontsize=size,
              transform=axes.get_yaxis_transform(), ha="left", va="center", color=style.MUTED)


def _caption(axes: Axes, one: Panel, against: Panel | None) -> None:
    makespan, span = bubbles(one.spans)
    text = f"step {one.step}, {format_duration(one.step_ns)}; "
    text += f"bubble {100 * makespan:.0f} % of the step, {100 * span:.0f} % of each worker's own span"
    if against is not None:
        error = 100 * (against.step_ns - one.step_ns) / max(one.step_ns, 1)
        text += f"; the prediction for this step is off by {error:+.1f} %"
    axes.annotate(one.title, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points", fontsize=10.5,
                  fontweight="bold", va="bottom")
    axes.annotate(text, (0, 1), (82, 7.6), xycoords="axes fraction", textcoords="offset points", fontsize=8.2,
                  color=style.MUTED, va="bottom")


def _time_axis(axes: Axes, label: str) -> None:
    axes.set_yticks([])
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.grid(True, axis="x", zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", length=2.5, labelbottom=bool(label))
    if label:
        axes.set_xlabel(label, fontsize=8.5)


def _handles(panels: Sequence[Panel]) -> list[Patch]:
    """Legend: kinds of compute with their mean durations (first panel → next), other work, what travels on links."""
    from matplotlib.patches import Patch

    means = [kind_means_ns(span for span in one.spans if span.lane == "compute") for one in panels]
    handles: list[Patch] = []
    for kind, word in KINDS.items():
        known = [format_duration(found[kind][1]) if kind in found else "none" for found in means]
        if any(kind in found for found in means):
            label = f"{kind}  {word}, mean {' → '.join(dict.fromkeys(known))}"
            handles.append(Patch(color=style.KIND_COLOURS[kind], label=label))
    own: dict[str, str] = {}
    links: dict[str, str] = {}
    for span in (span for one in panels for span in one.spans):
        kind = parse_name(span.name).kind
        if span.lane.startswith("out:"):
            links[f"link: {style.content_of(span)}"] = style.CONTENT[style.content_of(span)]
        elif kind not in KINDS and not span.lane.startswith("in:"):
            own.setdefault(kind.lower().replace("_", "-"), style.kind_colour(span))
    if any(one.memory for one in panels):
        handles.append(Patch(color=style.MEMORY, label="live memory" if panels[0].memory and not panels[0].counted
                             else "live microbatches"))
    return handles + [Patch(color=colour, label=word) for word, colour in {**own, **dict(sorted(links.items()))}.items()]
