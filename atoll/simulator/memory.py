"""How much memory each worker needs at worst, and for what.

A worker holds ``CostModel.resident_bytes`` all the time. A buffer is alive from the start of its writer to the end of its last
reader; one that ends where another begins makes room for it. (So an activation counts until the end of Backward or,
where the backward is split, of BackwardWeight.)
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.program.contracts import CostModel
from atoll.records import Record
from atoll.simulator.compiled import Compiled, Life
from atoll.simulator.timeline import Timeline

__all__ = ["Peak", "curve", "peaks"]


class Peak(Record):
    """``total_bytes`` = ``resident_bytes`` + ``buffer_bytes``, reached at ``at_ns`` in ``step``. ``made_of``: the buffers alive
    then, by kind; ``counts``: how many of each kind."""

    total_bytes: int
    resident_bytes: int
    buffer_bytes: int
    at_ns: int
    step: int
    made_of: dict[str, int]
    counts: dict[str, int]


def peaks(compiled: Compiled, timelines: Sequence[Timeline], costs: CostModel) -> dict[str, Peak]:
    """The high-water mark of each worker over all ``timelines``. Cost: O(buffers log buffers) a step."""
    found = {}
    for worker, name in enumerate(compiled.names):
        lives = compiled.lives[worker]
        best, at, at_step = 0, 0, 0
        for step, timeline in enumerate(timelines):
            high, when = _high_water(lives, timeline)
            if high > best:
                best, at, at_step = high, when, step
        made_of, counts = _alive(lives, timelines[at_step], at) if best else ({}, {})
        resident = costs.resident_bytes(name)
        found[name] = Peak(total_bytes=resident + best, resident_bytes=resident, buffer_bytes=best, at_ns=at, step=at_step,
                           made_of=made_of, counts=counts)
    return found


def curve(lives: Sequence[Life], timeline: Timeline, resident_bytes: int, begin_ns: int) -> tuple[tuple[int, int], ...]:
    """(ns since ``begin_ns``, bytes held from then on) at every change."""
    change = _changes(lives, timeline)
    level = resident_bytes
    points = {begin_ns: level}
    for key in sorted(change):
        level += change[key]
        points[key >> 1] = level
    return tuple((when - begin_ns, held) for when, held in points.items())


def _high_water(lives: Sequence[Life], timeline: Timeline) -> tuple[int, int]:
    """Most bytes alive at once, and since when."""
    change = _changes(lives, timeline)
    level = best = at = 0
    for key in sorted(change):
        level += change[key]
        if level > best:
            best, at = level, key
    return best, at >> 1


def _changes(lives: Sequence[Life], timeline: Timeline) -> dict[int, int]:
    """Bytes that come and go, by twice the time; what goes at t (key 2t) makes room for what comes then (2t + 1)."""
    starts, ends = timeline.starts, timeline.ends
    change: dict[int, int] = {}
    get = change.get
    for life in lives:
        users = life.users
        end = ends[users[0]] if len(users) == 1 else max([ends[node] for node in users])
        begin = 2 * starts[life.writer] + 1
        end *= 2
        if end > begin:
            change[begin] = get(begin, 0) + life.size_bytes
            change[end] = get(end, 0) - life.size_bytes
    return change


def _alive(lives: Sequence[Life], timeline: Timeline, now: int) -> tuple[dict[str, int], dict[str, int]]:
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for life in lives:
        if timeline.starts[life.writer] <= now < max(timeline.ends[node] for node in life.users):
            kind = str(life.buffer[0])
            sizes[kind] = sizes.get(kind, 0) + life.size_bytes
            counts[kind] = counts.get(kind, 0) + 1
    return dict(sorted(sizes.items(), key=lambda item: -item[1])), counts
