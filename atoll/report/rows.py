"""Where each row of a timeline lies, in inches from the top of its panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.records import Record
from atoll.trace.span import Span

__all__ = ["MOST_LINK_ROWS", "Layout", "Row", "lay_out"]

MOST_LINK_ROWS = 14
STRIPS = ("native", "copy", "disk")
"""Lanes of a worker that get a thin strip of their own under its compute row, in this order."""


class Row(Record):
    """``kind``: compute, strip, memory, heading, link (one directed pair) or flow (many pairs between two ends).

    ``island``: of a worker its island; of a link a word when it crosses islands, else empty. ``lanes``: the (worker, lane)
    pairs of a flow.
    """

    kind: str
    worker: str = ""
    lane: str = ""
    label: str = ""
    island: str = ""
    top_in: float = 0.0
    height_in: float = 0.0
    lanes: frozenset[tuple[str, str]] = frozenset()


class Layout(Record):
    rows: tuple[Row, ...]
    height_in: float


def lay_out(spans: Sequence[Span], islands: Mapping[str, str], with_memory: bool) -> Layout:
    """Rows for all workers and links that occur in ``spans`` (of all panels, so that panels can be compared)."""
    workers = _ordered(spans, islands)
    lanes = {(span.worker, span.lane) for span in spans}
    thick = min(0.36, max(0.13, 5.4 / len(workers)))
    rows: list[Row] = []
    top = 0.04
    for worker in workers:
        rows.append(Row(kind="compute", worker=worker, label=worker, island=islands.get(worker, ""), top_in=top,
                        height_in=thick))
        top += thick
        for lane in STRIPS if thick >= 0.24 else ():
            if (worker, lane) in lanes:
                rows.append(Row(kind="strip", worker=worker, lane=lane, top_in=top + 0.02, height_in=0.06))
                top += 0.08
        if with_memory and thick >= 0.2:
            rows.append(Row(kind="memory", worker=worker, top_in=top + 0.03, height_in=thick * 0.7))
            top += thick * 0.7 + 0.03
        top += min(0.1, thick * 0.3)
    links = _links(lanes, islands)
    if links:
        rows.append(Row(kind="heading", label="links", top_in=top + 0.03, height_in=0.14))
        top += 0.19
    for link in links:
        thin = 0.17
        rows.append(Row(kind=link.kind, worker=link.worker, lane=link.lane, label=link.label, island=link.island,
                        lanes=link.lanes, top_in=top, height_in=thin))
        top += thin + 0.035
    return Layout(rows=tuple(rows), height_in=top + 0.04)


def _ordered(spans: Sequence[Span], islands: Mapping[str, str]) -> list[str]:
    """Workers as they first appear (islands kept together)."""
    seen = dict.fromkeys(span.worker for span in sorted(spans, key=lambda span: span.instruction))
    first: dict[str, int] = {}
    stage: dict[str, tuple[int, str]] = {}
    for span in spans:
        digits = span.name[: len(span.name) - len(span.name.lstrip("0123456789"))]
        if span.lane == "compute" and digits:
            stage[span.worker] = min(stage.get(span.worker, (1 << 30, "")), (int(digits), span.worker))
    names = sorted(seen, key=lambda worker: stage.get(worker, (1 << 30, worker)))
    for worker in names:
        first.setdefault(islands.get(worker, ""), len(first))
    return sorted(names, key=lambda worker: first[islands.get(worker, "")])


def _links(lanes: set[tuple[str, str]], islands: Mapping[str, str]) -> list[Row]:
    """One row per directed pair, those between islands first; or, when they are too many, one per pair of islands."""
    pairs = sorted((worker, lane) for worker, lane in lanes if lane.startswith("out:"))

    def crosses(worker: str, peer: str) -> bool:
        return islands.get(worker, "") != islands.get(peer, "")

    if len(pairs) <= MOST_LINK_ROWS:
        rows = [Row(kind="link", worker=worker, lane=lane, label=f"{worker} → {lane[4:]}",
                    island="between" if crosses(worker, lane[4:]) else "") for worker, lane in pairs]
        return sorted(rows, key=lambda row: (not row.island, row.label))
    ends: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for worker, lane in pairs:
        source, target = islands.get(worker, "all"), islands.get(lane[4:], "all")
        ends.setdefault((source, target), set()).add((worker, lane))
    flows = [Row(kind="flow", label=f"{source} → {target}" if source != target else f"inside {source}",
                 island="between" if source != target else "", lanes=frozenset(own)) for (source, target), own in ends.items()]
    return sorted(flows, key=lambda row: (not row.island, row.label))[:MOST_LINK_ROWS]
