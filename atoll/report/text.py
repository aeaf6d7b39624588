"""What the console shows: rich renderables made of the same tables as the page. rich is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from atoll.records import Record, to_plain
from atoll.report.compare import Comparison
from atoll.report.tables import (
    Table,
    cluster_tables,
    lane_table,
    memory_table,
    plan_table,
    prediction_links,
    prediction_workers,
    step_table,
    worker_table,
)
from atoll.units import format_count, format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table as RichTable

__all__ = ["cluster_table", "comparison_table", "memory_tables", "plan_stages", "prediction_table", "rich_table"]

MOST_ROWS = 40
"""A table on the console shows this many rows and counts the rest."""


def rich_table(table: Table, *, title: bool = True) -> RichTable:
    """``table`` for the console: words left, figures right, no vertical rules."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    drawn = RichTable(box=box.SIMPLE_HEAD, title=table.title if title else None, title_justify="left", title_style="bold",
                      header_style="dim", pad_edge=False, padding=(0, 1))
    for index, column in enumerate(table.columns):
        drawn.add_column(escape(column), justify="left" if index < table.labels else "right", overflow="fold")
    for row in table.rows[:MOST_ROWS]:
        drawn.add_row(*(escape(cell) for cell in row))
    if len(table.rows) > MOST_ROWS:
        drawn.add_row(f"… and {len(table.rows) - MOST_ROWS} more", style="dim")
    return drawn


def cluster_table(cluster: Record | Mapping[str, Any]) -> RenderableType:
    """The cluster as understood (a ``Cluster``, or the document in plain values): workers on their devices, then links."""
    from rich.console import Group
    from rich.text import Text

    tables = [table for table in cluster_tables(_plain(cluster)) if table.rows]
    islands: dict[str, int] = {}
    for row in tables[0].rows if tables else ():
        islands[row[2]] = islands.get(row[2], 0) + 1
    line = f"{sum(islands.values())} workers on {len(islands)} island{'s' * (len(islands) != 1)}: " + ", ".join(
        f"{name} ({count})" for name, count in islands.items())
    return Group(Text(line), *(rich_table(table, title=False) for table in tables))


def prediction_table(summary: Record | Mapping[str, Any]) -> RenderableType:
    """A ``Summary`` of the simulator: step time, tokens/s, both bubbles, then workers (peak memory against what they have)
    and links (bytes a step)."""
    from rich.console import Group
    from rich.text import Text

    plain = _plain(summary)
    line = Text.assemble(
        "step ", (format_duration(plain["step_ns"]), "bold"), f", {format_count(plain['tokens_per_s'])} tokens/s",
        f"; bubble {100 * plain['makespan_bubble']:.1f} % of the step, {100 * plain['span_bubble']:.1f} % of each worker's own "
        "span"
        " (an activation counts as freed when its backward, or the weights' half of it, has ended)")
    tables = [prediction_workers(plain), prediction_links(plain)]
    return Group(line, *(rich_table(table, title=False) for table in tables if table.rows))


def comparison_table(comparison: Comparison) -> RenderableType:
    """Measured beside predicted: the step, the workers, the links, and the verdict of the twin law."""
    from rich.console import Group
    from rich.text import Text

    tables = [step_table(comparison), worker_table(comparison), lane_table(comparison, links_only=True)]
    twin = comparison.twin
    colour = {True: "green", False: "red", None: "dim"}[twin.holds]
    lines = [Text(twin.sentence, style=colour), *(Text(f"  {line}") for line in twin.differences)]
    if twin.more:
        lines.append(Text(f"  and {twin.more} more"))
    return Group(*(rich_table(table) for table in tables if table.rows), *lines)


def plan_stages(plan: Record | Mapping[str, Any]) -> RenderableType:
    """Which operators run where."""
    table = plan_table(_plain(plan))
    return rich_table(table, title=False) if table else "the plan has no stages"


def memory_tables(summary: Record | Mapping[str, Any]) -> RenderableType:
    """What each worker's predicted peak is made of."""
    table = memory_table(_plain(summary))
    return rich_table(table, title=False) if table else "no summary of memory"


def _plain(document: Record | Mapping[str, Any]) -> dict[str, Any]:
    return dict(document) if isinstance(document, Mapping) else dict(to_plain(document))
