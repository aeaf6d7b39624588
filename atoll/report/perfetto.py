"""Traces in Chrome's JSON form, which https://ui.perfetto.dev opens: predicted and measured as two groups of processes.

One process per worker and trace, one thread (track) per lane. ``X`` events of one track must nest, so a span that overlaps
the one before it on its lane (two messages under way on one link) goes to a second track of that lane. Each Send is joined
to its Receive by a flow arrow; live memory is a counter. Times are microseconds with three decimals (ns kept).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from atoll.records import write_atomically
from atoll.report.analysis import by_lane, by_step, messages, parse_name, window
from atoll.report.timeline import MemoryCurves
from atoll.trace.span import Span, Trace

__all__ = ["MOST_SPANS", "export_perfetto", "perfetto_events"]

MOST_SPANS = 40_000
"""The measured trace is cut to the steps around the chosen one that fit into this number (about 8 MB)."""

Event = dict[str, Any]
LANE_ORDER = {"compute": 0, "native": 1, "copy": 2, "disk": 3}
COLOURS = {"F": "thread_state_runnable", "B": "good", "I": "bad", "W": "rail_animation", "R": "grey"}
"""Chrome's reserved colour names; Perfetto takes them as a hint."""


def export_perfetto(path: Path, predicted: Trace | None, measured: Trace | None, *, step: int | None = None,
                    memory: MemoryCurves | None = None, most_spans: int = MOST_SPANS) -> tuple[int, int] | None:
    """Write the JSON file. ``step``: the measured step under whose start the prediction is laid. ``memory``: of the
    predicted step. Return the first and last measured step that went in (None without a measured trace)."""
    events: list[Event] = []
    steps = by_step(measured) if measured else {}
    kept = _around(steps, step, most_spans)
    origin = min((span.start_ns for key in kept for span in steps[key]), default=0)
    anchor = window(steps[step]).start_ns - origin if step is not None and step in steps else 0
    if predicted is not None and predicted.spans:
        spans = list(predicted.spans)
        shift = anchor - window(spans).start_ns
        events += perfetto_events("predicted", spans, first_pid=1, shift_ns=shift, memory=memory)
    if kept:
        chosen = [span for key in kept for span in steps[key]]
        events += perfetto_events("measured", chosen, first_pid=1001, shift_ns=-origin)
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"writer": "Atoll"}}
    write_atomically(path, msgspec.json.encode(document))
    return (kept[0], kept[-1]) if kept else None


def _around(steps: Mapping[int, Sequence[Span]], step: int | None, most_spans: int) -> list[int]:
    """A run of steps around ``step`` (or from the first) whose spans together are at most ``most_spans``, never none."""
    keys = list(steps)
    if not keys:
        return []
    low = high = keys.index(step) if step is not None and step in steps else 0
    total = len(steps[keys[low]])
    grew = True
    while grew:
        grew = False
        for index in (low - 1, high + 1):
            if 0 <= index < len(keys) and total + len(steps[keys[index]]) <= most_spans:
                total += len(steps[keys[index]])
                low, high = min(low, index), max(high, index)
                grew = True
    return keys[low : high + 1]


def perfetto_events(group: str, spans: Sequence[Span], *, first_pid: int = 1, shift_ns: int = 0,
                    memory: MemoryCurves | None = None) -> list[Event]:
    """Events of one trace. ``shift_ns`` is added to every time; memory curves start at the first span's start."""
    workers = list(dict.fromkeys(span.worker for span in sorted(spans, key=lambda span: (span.step, span.instruction))))
    pids = {worker: first_pid + index for index, worker in enumerate(workers)}
    events: list[Event] = []
    for worker, pid in pids.items():
        events.append(_meta("process_name", pid, 0, {"name": f"{group} · {worker}"}))
        events.append(_meta("process_sort_index", pid, 0, {"sort_index": pid}))
    places: dict[tuple[str, int, int], tuple[int, int]] = {}
    lanes = by_lane(spans)
    for worker, pid in pids.items():
        own = [(lane, row) for (owner, lane), row in lanes.items() if owner == worker]
        events += _tracks(worker, pid, own, shift_ns, places)
    events += _flows(spans, first_pid * 10**8, places, shift_ns)
    start = window(spans).start_ns + shift_ns if spans else 0
    for worker, curve in (memory or {}).items():
        if worker in pids:
            events += [{"ph": "C", "name": "live memory", "pid": pids[worker], "ts": (start + time) / 1000,
                        "args": {"bytes": value}} for time, value in curve]
    return events


def _tracks(worker: str, pid: int, lanes: Sequence[tuple[str, list[Span]]], shift_ns: int,
            places: dict[tuple[str, int, int], tuple[int, int]]) -> list[Event]:
    """All lanes of one worker; ``places`` learns (worker, step, instruction) -> (pid, tid)."""
    events: list[Event] = []
    tid = 0
    for lane, row in sorted(lanes, key=lambda pair: (LANE_ORDER.get(pair[0], 9), pair[0])):
        ends: list[int] = []
        for span in row:
            track = next((index for index, end in enumerate(ends) if end <= span.start_ns), len(ends))
            if track == len(ends):
                ends.append(0)
                label = lane if track == 0 else f"{lane} ({track + 1})"
                events.append(_meta("thread_name", pid, tid + track, {"name": label}))
                events.append(_meta("thread_sort_index", pid, tid + track, {"sort_index": tid + track}))
            ends[track] = span.end_ns
            places[worker, span.step, span.instruction] = (pid, tid + track)
            events.append(_slice(span, pid, tid + track, shift_ns))
        tid += len(ends)
    return events


def _slice(span: Span, pid: int, tid: int, shift_ns: int) -> Event:
    name = parse_name(span.name)
    args: dict[str, Any] = {"step": span.step, "instruction": span.instruction}
    if name.stage is not None:
        args["stage"] = name.stage
    if name.microbatch is not None:
        args["microbatch"] = name.microbatch
    if span.size_bytes:
        args["bytes"] = span.size_bytes
    event = {"ph": "X", "name": span.name, "cat": name.kind, "pid": pid, "tid": tid, "ts": (span.start_ns + shift_ns) / 1000,
             "dur": (span.end_ns - span.start_ns) / 1000, "args": args}
    if name.kind in COLOURS:
        event["cname"] = COLOURS[name.kind]
    return event


def _flows(spans: Sequence[Span], first_id: int, places: Mapping[tuple[str, int, int], tuple[int, int]], shift_ns: int,
           ) -> list[Event]:
    """An arrow from within each Send to within its Receive. Ids are whole numbers (Perfetto reads strings as hexadecimal)."""
    steps: dict[int, list[Span]] = {}
    for span in spans:
        steps.setdefault(span.step, []).append(span)
    events: list[Event] = []
    for step, own in steps.items():
        for message in messages(own):
            if message.receive is None:
                continue
            send, receive = message.send, message.receive
            shared = {"name": "message", "cat": "message", "id": first_id + len(events) // 2}
            start = places[send.worker, step, send.instruction]
            end = places[receive.worker, step, receive.instruction]
            at = max(receive.start_ns, receive.end_ns - 1)
            events.append({"ph": "s", "pid": start[0], "tid": start[1], "ts": (send.start_ns + shift_ns) / 1000, **shared})
            events.append({"ph": "f", "bp": "e", "pid": end[0], "tid": end[1], "ts": (at + shift_ns) / 1000, **shared})
    return events


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}
