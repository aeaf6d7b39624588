"""What a trace says about one step: windows, messages, who computed, who waited for whom, how busy each link was.

Everything here is read off spans alone (worker, instruction, name, lane, times, bytes), so that it holds for a predicted
trace and a measured one in the same way. Times are integers in ns from the run's origin.

*Shares of a worker.* A step's window runs from the first start to the last end over ALL workers. What the compute lane does
not fill is divided: while a message to this worker (or a collective it takes part in) is under way it is *exposed
communication*; the rest is *waiting* for whoever ended the gap, that is the sender of the message that arrived last before
compute went on, the last to come to a collective, or a lane of the worker's own. What nothing explains is *idle*. The four
sum to the window.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from atoll.records import Record
from atoll.trace.span import Span, Trace

__all__ = [
    "KINDS",
    "Message",
    "Name",
    "Shares",
    "Window",
    "activation_counts",
    "bubbles",
    "by_lane",
    "by_step",
    "complete_steps",
    "kind_means_ns",
    "latencies",
    "link_use",
    "messages",
    "occupied",
    "parse_name",
    "shown_step",
    "steady_step",
    "step_lengths",
    "window",
    "worker_shares",
]

KINDS = {"F": "forward", "B": "full backward", "I": "backward, inputs", "W": "backward, weights", "R": "recompute"}
"""Compute kinds of the field's notation, in the order in which legends and tables show them."""

_NUMBERED = re.compile(r"^(\d+)([A-Z][A-Z_]*)(\d+)(?:[<>]\d+)?$")
_LOAD = re.compile(r"^(LOAD) (\d+)\.(\d+)$")


class Name(Record):
    """A span's notation taken apart: "2F0" is kind F of stage 2 and microbatch 0; of other names only the kind is known."""

    kind: str
    stage: int | None = None
    microbatch: int | None = None


class Window(Record):
    start_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.start_ns


class Message(Record):
    """The k-th Send of ``source`` to ``target`` and the k-th Receive of ``target`` from it (None: not in the trace)."""

    source: str
    target: str
    send: Span
    receive: Span | None


class Shares(Record):
    """How one worker spent one step; all in ns, together the length of the window.

    ``waiting_ns``: by the peer (or lane of its own: "copy", "disk", "native") that was waited for.
    """

    worker: str
    compute_ns: int
    exposed_ns: int
    waiting_ns: dict[str, int]
    idle_ns: int

    @property
    def total_ns(self) -> int:
        return self.compute_ns + self.exposed_ns + sum(self.waiting_ns.values()) + self.idle_ns


def parse_name(name: str) -> Name:
    """Take the notation apart ("2F0", "2SEND_B0>5", "LOAD 2.0", "UPDATE adamw 2"); an unknown name is its own kind."""
    match = _NUMBERED.match(name)
    if match:
        return Name(kind=match.group(2), stage=int(match.group(1)), microbatch=int(match.group(3)))
    match = _LOAD.match(name)
    if match:
        return Name(kind="LOAD", stage=int(match.group(2)), microbatch=int(match.group(3)))
    return Name(kind=name.split(" ", maxsplit=1)[0])


def by_step(trace: Trace) -> dict[int, tuple[Span, ...]]:
    """Spans by step, steps in order, spans of a step in order of start."""
    found: dict[int, list[Span]] = {}
    for span in trace.spans:
        found.setdefault(span.step, []).append(span)
    return {step: tuple(sorted(found[step], key=lambda span: (span.start_ns, span.end_ns))) for step in sorted(found)}


def by_lane(spans: Iterable[Span]) -> dict[tuple[str, str], list[Span]]:
    """Spans by (worker, lane), each in order of start."""
    found: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        found.setdefault((span.worker, span.lane), []).append(span)
    for lane in found.values():
        lane.sort(key=lambda span: (span.start_ns, span.end_ns))
    return found


def window(spans: Sequence[Span]) -> Window:
    """From the first start to the last end over all workers. ``spans`` must not be empty."""
    return Window(start_ns=min(span.start_ns for span in spans), end_ns=max(span.end_ns for span in spans))


def complete_steps(steps: Mapping[int, Sequence[Span]]) -> list[int]:
    """Steps with as many spans as the usual step has: a run that died half-way leaves a last step with fewer."""
    if not steps:
        return []
    usual = Counter(len(spans) for spans in steps.values()).most_common(1)[0][0]
    return [step for step, spans in steps.items() if len(spans) == usual]


def step_lengths(steps: Mapping[int, Sequence[Span]]) -> dict[int, int]:
    """Length of each step in ns: from the last end of the step before (the first step: its own first start) to its last end.

    So steps that overlap at their seam are not counted twice, and what happens between them counts.
    """
    lengths: dict[int, int] = {}
    ends: dict[int, int] = {}
    for step, spans in steps.items():
        whole = window(spans)
        ends[step] = whole.end_ns
        lengths[step] = whole.end_ns - ends.get(step - 1, whole.start_ns)
    return lengths


def activation_counts(spans: Sequence[Span]) -> dict[str, list[tuple[int, int]]]:
    """By worker: (ns from the first start, microbatches whose forward has begun and whose backward has not ended).

    Where the backward is split, a microbatch counts until its weights' half (W) has ended. Works without knowing bytes.
    """
    origin = window(spans).start_ns if spans else 0
    begun: dict[tuple[str, int | None, int | None], int] = {}
    freed: dict[tuple[str, int | None, int | None], int] = {}
    for span in spans:
        name = parse_name(span.name)
        key = (span.worker, name.stage, name.microbatch)
        if name.kind == "F":
            begun[key] = span.start_ns
        elif name.kind in ("B", "I", "W"):
            freed[key] = max(freed.get(key, 0), span.end_ns)
    changes: dict[str, list[tuple[int, int]]] = {}
    for key, start in begun.items():
        if key in freed:
            changes.setdefault(key[0], []).extend(((start, 1), (freed[key], -1)))
    curves: dict[str, list[tuple[int, int]]] = {}
    for worker, own in changes.items():
        live, curve = 0, [(0, 0)]
        for time, change in sorted(own):
            live += change
            if curve[-1][0] == time - origin:
                curve[-1] = (time - origin, live)
            else:
                curve.append((time - origin, live))
        curves[worker] = curve
    return curves


def steady_step(steps: Mapping[int, Sequence[Span]]) -> int | None:
    """The complete step whose length is the (low) median, once the first two, which warm up, are left out."""
    complete = complete_steps(steps)
    settled = complete[2:] if len(complete) > 4 else complete[-1:] if len(complete) < 3 else complete[1:]
    if not settled:
        return None
    lengths = step_lengths(steps)
    ranked = sorted(settled, key=lambda step: (lengths[step], step))
    return ranked[(len(ranked) - 1) // 2]


def shown_step(trace: Trace, steps: Mapping[int, Sequence[Span]]) -> int | None:
    """The step that stands for a trace: the last of a simulation (as its summary does), the steady one of a run."""
    if trace.header.clock == "simulated":
        complete = complete_steps(steps)
        return complete[-1] if complete else None
    return steady_step(steps)


def messages(spans: Iterable[Span]) -> list[Message]:
    """Match Sends and Receives of ONE step: k-th with k-th of each ordered pair, in the order of the programs."""
    sends: dict[tuple[str, str], list[Span]] = {}
    receives: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        if span.lane.startswith("out:"):
            sends.setdefault((span.worker, span.lane[4:]), []).append(span)
        elif span.lane.startswith("in:"):
            receives.setdefault((span.lane[3:], span.worker), []).append(span)
    found: list[Message] = []
    for pair in sorted(sends):
        arrived = sorted(receives.get(pair, ()), key=lambda span: span.instruction)
        for index, send in enumerate(sorted(sends[pair], key=lambda span: span.instruction)):
            receive = arrived[index] if index < len(arrived) else None
            found.append(Message(source=pair[0], target=pair[1], send=send, receive=receive))
    return found


def kind_means_ns(spans: Iterable[Span]) -> dict[str, tuple[int, float]]:
    """Number and mean duration (ns) by kind of compute, in the order of ``KINDS``, then the others by name."""
    totals: dict[str, list[int]] = {}
    for span in spans:
        if not span.lane.startswith(("out:", "in:")):
            totals.setdefault(parse_name(span.name).kind, []).append(span.end_ns - span.start_ns)
    ordered = [kind for kind in KINDS if kind in totals] + sorted(kind for kind in totals if kind not in KINDS)
    return {kind: (len(totals[kind]), sum(totals[kind]) / len(totals[kind])) for kind in ordered}


def link_use(spans: Iterable[Span], latency_ns: Mapping[tuple[str, str], int] | None = None,
             ) -> dict[tuple[str, str], tuple[int, int, int]]:
    """By directed pair (source, target): messages, bytes, ns in which the link was busy (see ``_carrying``).
    ``latency_ns``: of each pair, where it is known (``latencies`` of the prediction); else as the spans themselves show it.

    Collectives that a library does whole are listed as (worker, "") with the size of what they sum, timed from the moment
    at which all members had come.
    """
    known = list(spans)
    met = _meetings(known)
    uses: dict[tuple[str, str], list[tuple[Span, tuple[int, int]]]] = {}
    for (worker, lane), row in by_lane(known).items():
        if lane == "native":
            uses[worker, ""] = [(span, (met[worker, span.instruction][0], span.end_ns)) for span in row]
    pairs: dict[tuple[str, str], list[Message]] = {}
    for message in messages(known):
        pairs.setdefault((message.source, message.target), []).append(message)
    shown = latencies(known) if latency_ns is None else latency_ns
    uses.update({pair: _carrying(found, shown.get(pair, 0)) for pair, found in pairs.items()})
    return {pair: (len(row), sum(span.size_bytes for span, _ in row),
                   sum(high - low for low, high in _merged(interval for _, interval in row)))
            for pair, row in sorted(uses.items())}


def latencies(spans: Iterable[Span]) -> dict[tuple[str, str], int]:
    """By directed pair: the least time (ns) between the end of a Send and its arrival."""
    found: dict[tuple[str, str], int] = {}
    for message in messages(spans):
        pair, arrival = (message.source, message.target), _arrival(message)
        if arrival is not None:
            late = max(0, arrival - message.send.end_ns)
            found[pair] = min(late, found.get(pair, late))
    return found


def _arrival(message: Message) -> int | None:
    """When the message came, if its receiver stood waiting for it."""
    receive = message.receive
    return None if receive is None or receive.end_ns - receive.start_ns <= _AT_ONCE_NS else receive.end_ns


def _carrying(pair: Sequence[Message], latency_ns: int) -> list[tuple[Span, tuple[int, int]]]:
    """Each Send of one directed link, and from when to when the link carried it.

    A Send ends when the link has taken the bytes. Over a real network that is when they lie in a buffer, long before the
    last one has left; so where the receiver stood waiting the end is taken back from the arrival: arrival less latency.
    """
    return [(message.send, (message.send.start_ns, max(message.send.end_ns, (_arrival(message) or 0) - latency_ns)))
            for message in pair]


_AT_ONCE_NS = 50_000
"""A Receive that takes no longer found its message there."""


def bubbles(spans: Sequence[Span]) -> tuple[float, float]:
    """Return (makespan bubble, span bubble), each a fraction averaged over workers that compute.

    Makespan bubble: 1 - busy / window of the step. Span bubble: 1 - busy / (first start to last end on that worker's
    compute lane). A "zero-bubble" schedule closes the second and still has the first.
    """
    whole = window(spans).length_ns
    of_makespan: list[float] = []
    of_span: list[float] = []
    for (_, lane), row in by_lane(spans).items():
        work = [span for span in row if parse_name(span.name).kind in KINDS]
        if lane != "compute" or not work or whole == 0:
            continue
        busy = sum(high - low for low, high in _merged((span.start_ns, span.end_ns) for span in work))
        own = max(span.end_ns for span in work) - work[0].start_ns
        of_makespan.append(1 - busy / whole)
        of_span.append(1 - busy / own if own else 0.0)
    if not of_makespan:
        return 0.0, 0.0
    return sum(of_makespan) / len(of_makespan), sum(of_span) / len(of_span)


def worker_shares(spans: Sequence[Span], workers: Sequence[str]) -> list[Shares]:
    """Shares of every worker in ONE step, in the order of ``workers`` (see the top of this file for the rule)."""
    whole = window(spans)
    lanes = by_lane(spans)
    met = _meetings(spans)
    moving: dict[str, list[tuple[int, int]]] = {}
    for message in messages(spans):
        end_ns = message.receive.end_ns if message.receive else message.send.end_ns
        moving.setdefault(message.target, []).append((message.send.start_ns, end_ns))
    result = []
    for worker in workers:
        row = lanes.get((worker, "compute"), [])
        compute = list(_merged((span.start_ns, span.end_ns) for span in row))
        causes = sorted((span for (owner, lane), others in lanes.items() for span in others
                         if owner == worker and lane != "compute" and not lane.startswith("out:")),
                        key=lambda span: span.end_ns)
        wire = moving.get(worker, []) + [(met[worker, span.instruction][0], span.end_ns)
                                         for span in lanes.get((worker, "native"), ())]
        blame = {(span.lane, span.instruction): _blamed(span, met) for span in causes}
        result.append(_shares(worker, whole, compute, causes, blame, list(_merged(wire))))
    return result


def _meetings(spans: Sequence[Span]) -> dict[tuple[str, int], tuple[int, str]]:
    """By (worker, instruction) of each collective: when the last of its members came, and who that was.

    Members of a collective are the spans of one name on native lanes (the k-th of each worker, should a name repeat).
    """
    groups: dict[tuple[str, int], list[Span]] = {}
    repeats: dict[tuple[str, str], int] = {}
    for span in sorted((span for span in spans if span.lane == "native"), key=lambda span: span.instruction):
        number = repeats[span.worker, span.name] = repeats.get((span.worker, span.name), -1) + 1
        groups.setdefault((span.name, number), []).append(span)
    found = {}
    for members in groups.values():
        last = max(members, key=lambda span: span.start_ns)
        found.update({(span.worker, span.instruction): (last.start_ns, last.worker) for span in members})
    return found


def _blamed(span: Span, met: Mapping[tuple[str, int], tuple[int, str]]) -> str:
    """Who is waited for until ``span`` ends: a peer, or a lane of the worker's own."""
    if span.lane.startswith("in:"):
        return span.lane[3:]
    last = met.get((span.worker, span.instruction), (0, span.worker))[1]
    return last if span.lane == "native" and last != span.worker else span.lane


def _shares(worker: str, whole: Window, compute: list[tuple[int, int]], causes: list[Span],
            blame: Mapping[tuple[str, int], str], wire: list[tuple[int, int]]) -> Shares:
    ends = [span.end_ns for span in causes]
    starts = [low for low, _ in wire]
    exposed = idle = 0
    waiting: dict[str, int] = {}
    at = whole.start_ns
    for low, high in [*compute, (whole.end_ns, whole.end_ns)]:
        if low > at:
            first = max(bisect_right(starts, at) - 1, 0)
            under_way = sum(max(0, min(end, low) - max(start, at)) for start, end in wire[first:bisect_left(starts, low)])
            exposed += under_way
            ended_by = causes[bisect_right(ends, low) - 1] if bisect_right(ends, low) > bisect_right(ends, at) else None
            if ended_by is None or low == whole.end_ns:
                idle += low - at - under_way
            else:
                who = blame[ended_by.lane, ended_by.instruction]
                waiting[who] = waiting.get(who, 0) + low - at - under_way
        at = max(at, high)
    return Shares(worker=worker, compute_ns=sum(high - low for low, high in compute), exposed_ns=exposed,
                  waiting_ns={who: ns for who, ns in sorted(waiting.items()) if ns}, idle_ns=idle)


def _merged(intervals: Iterable[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Union of intervals, in order, without overlap."""
    current: tuple[int, int] | None = None
    for low, high in sorted(intervals):
        if current is None:
            current = (low, high)
        elif low <= current[1]:
            current = (current[0], max(current[1], high))
        else:
            yield current
            current = (low, high)
    if current is not None:
        yield current


def occupied(intervals: Sequence[tuple[int, int]], edges: Sequence[int]) -> list[float]:
    """Mean number of ``intervals`` open in each bin between successive ``edges``."""
    load = [0.0] * (len(edges) - 1)
    for low, high in intervals:
        first = max(bisect_right(edges, low) - 1, 0)
        last = min(bisect_left(edges, high), len(edges) - 1)
        for index in range(first, last):
            width = edges[index + 1] - edges[index]
            load[index] += max(0, min(high, edges[index + 1]) - max(low, edges[index])) / width if width else 0.0
    return load
