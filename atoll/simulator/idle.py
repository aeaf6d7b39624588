"""Where a step's time went: bubbles, what compute lanes waited for, and the chain that made the step as long as it is.

Two bubbles are told apart. *Makespan bubble*: the step minus a worker's pipeline compute. *Span bubble*: first start to last
end of its pipeline compute, minus that compute. A "zero-bubble" schedule closes the second and still has the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.program.instructions import COMPUTE, Backward, BackwardInput, BackwardWeight, Forward, Recompute
from atoll.records import Record
from atoll.simulator.compiled import END, FLOW, NATIVE, RECEIVE, SEND, Compiled
from atoll.simulator.timeline import Timeline

__all__ = ["Bubbles", "CriticalPath", "bubbles", "critical_path", "idle"]

PIPELINE = (Forward, Recompute, Backward, BackwardInput, BackwardWeight)


class Bubbles(Record):
    """Of one worker, in ns. ``busy_ns``: forward, backward and recompute."""

    busy_ns: int
    span_ns: int
    step_ns: int

    @property
    def makespan_bubble_ns(self) -> int:
        return self.step_ns - self.busy_ns

    @property
    def span_bubble_ns(self) -> int:
        return self.span_ns - self.busy_ns


class CriticalPath(Record):
    """``by_resource``: ns of the step that each resource is answerable for, largest first; they add up to the step. Names:
    "compute a1" (copy, disk: alike), "link SEGMENT" (the tightest on the way), "latency SEGMENT" (with the cost of a message),
    "native a1,a2" and, within a machine, "host a1:0>a1:1"."""

    by_resource: dict[str, int]

    @property
    def limit(self) -> str:
        return next(iter(self.by_resource), "nothing")


def bubbles(compiled: Compiled, timeline: Timeline, step_ns: int) -> dict[str, Bubbles]:
    """By worker that runs forward or backward."""
    found = {}
    for worker, part in enumerate(compiled.program.workers):
        first = compiled.offset[worker]
        work = [(timeline.starts[node], timeline.ends[node])
                for node, instruction in enumerate(part.instructions, start=first) if isinstance(instruction, PIPELINE)]
        if work:
            found[part.worker] = Bubbles(busy_ns=sum(end - start for start, end in work), span_ns=work[-1][1] - work[0][0],
                                         step_ns=step_ns)
    return found


def idle(compiled: Compiled, timelines: Sequence[Timeline], window_ns: tuple[int, int]) -> dict[str, dict[str, int]]:
    """By worker, ns in which its compute lane stood still between begin and end of its last step, by what it waited for:

    "in:b1": a message of b1 was under way; "b1": b1 had not begun to send it (or to join a collective); "native", "copy",
    "disk", "out:b1": that lane of its own was at work; "others": it had finished the only step while others had not.
    """
    found: dict[str, dict[str, int]] = {}
    timeline = timelines[-1]
    for worker, name in enumerate(compiled.names):
        waited: dict[str, int] = {}
        first = compiled.offset[worker]
        end_node = compiled.size + worker
        at = timelines[-2].ends[end_node] if len(timelines) > 1 else 0
        for node in [*range(first, first + len(compiled.before[worker])), end_node]:
            if node == end_node or compiled.instruction_lanes[node] == COMPUTE:
                start = timeline.starts[node]
                if start > at:
                    _blame(compiled, timeline, _ended_at(compiled, timeline, node, start), at, start, waited)
                at = max(at, timeline.ends[node])
        if len(timelines) == 1 and at < window_ns[1]:
            waited["others"] = window_ns[1] - at
        found[name] = waited
    return found


def _ended_at(compiled: Compiled, timeline: Timeline, node: int, when: int) -> int:
    """What ``node`` waited for last, within its worker (-1: nothing; it began with the step)."""
    if compiled.kinds[node] == END:
        worker = compiled.partner[node]
        first = compiled.offset[worker]
        nodes: Sequence[int] = range(first, first + len(compiled.before[worker]))
    else:
        worker, index = compiled.find(node)
        nodes = [compiled.offset[worker] + one for one in compiled.before[worker][index]]
    return next((one for one in reversed(nodes) if timeline.ends[one] == when), -1)


def _blame(compiled: Compiled, timeline: Timeline, node: int, low: int, high: int, waited: dict[str, int]) -> None:
    """Charge the wait from ``low`` to ``high`` to ``node``, which ended it, and to what that waited for in turn."""
    while node >= 0 and high > low:
        kind, lane, start = compiled.kinds[node], compiled.instruction_lanes[node], timeline.starts[node]
        before, sender = start, ""
        if kind == NATIVE:
            members = compiled.meetings[compiled.partner[node]].members
            last = max(members, key=lambda member: timeline.starts[member])
            start, sender = timeline.starts[last], compiled.names[compiled.find(last)[0]]
        elif kind == RECEIVE and timeline.starts[compiled.partner[node]] == start:
            before, sender = low, lane.removeprefix("in:")
        _charge(waited, lane, max(low, start), high)
        high = min(high, max(low, start))
        if sender:
            _charge(waited, sender, max(low, min(before, high)), high)
            high = max(low, min(before, high))
        if high > low:
            node = _ended_at(compiled, timeline, node, high)


def _charge(waited: dict[str, int], what: str, low: int, high: int) -> None:
    if high > low:
        waited[what] = waited.get(what, 0) + high - low


def critical_path(compiled: Compiled, timelines: Sequence[Timeline], window_ns: tuple[int, int]) -> CriticalPath:
    """Walk back from the end of the last step along what each instruction waited for, to the end of the step before."""
    spent: dict[str, int] = {}
    step = len(timelines) - 1
    low, at = window_ns
    ends = timelines[step].ends
    node = max(range(compiled.size, len(ends)), key=lambda one: ends[one], default=-1)
    while node >= 0 and at > low:
        timeline = timelines[step]
        kind = compiled.kinds[node]
        if kind == RECEIVE and timeline.ends[node] > timeline.starts[node]:
            send = compiled.partner[node]
            _charge(spent, f"latency {_road(compiled, send)}", max(low, timeline.ends[send]), at)
            at, node = timeline.ends[send], send
            continue
        if kind == NATIVE:
            members = compiled.meetings[compiled.partner[node]].members
            node = max(members, key=lambda member: timeline.starts[member])
        start = timeline.starts[node]
        if kind != END:
            _charge(spent, _resource(compiled, node), max(low, start), at)
        at = min(at, start)
        before = _before(compiled, timeline, node, start)
        if before < 0 and step and kind != END:
            step -= 1
            before = compiled.size + compiled.find(node)[0]
        node = before
    return CriticalPath(by_resource=dict(sorted(spent.items(), key=lambda item: (-item[1], item[0]))))


def _before(compiled: Compiled, timeline: Timeline, node: int, start: int) -> int:
    """What let ``node`` start: something of its own worker, or the Send that its message came from."""
    own = _ended_at(compiled, timeline, node, start)
    if own < 0 and compiled.kinds[node] == RECEIVE and timeline.starts[compiled.partner[node]] == start:
        return compiled.partner[node]
    return own


def _resource(compiled: Compiled, node: int) -> str:
    kind = compiled.kinds[node]
    if kind in (SEND, FLOW):
        return f"link {_road(compiled, node)}"
    if kind == NATIVE:
        members = compiled.meetings[compiled.partner[node]].members
        return "native " + ",".join(compiled.names[compiled.find(member)[0]] for member in members)
    return f"{compiled.instruction_lanes[node]} {compiled.names[compiled.find(node)[0]]}"


def _road(compiled: Compiled, send: int) -> str:
    """The tightest segment on the way of a Send, or the two workers within a machine."""
    source = compiled.names[compiled.find(send)[0]]
    target = compiled.names[compiled.find(compiled.partner[send])[0]]
    way = compiled.ways[source, target]
    if not way:
        return f"host {source}>{target}"
    return compiled.segments[min(way, key=lambda segment: compiled.capacity[segment])]
