"""What came out of a simulation. Times are kept as plain lists; everything else is worked out when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from atoll.program.contracts import CostModel
from atoll.program.notation import notation
from atoll.simulator.compiled import FLOW, SEND, Compiled
from atoll.simulator.idle import Bubbles, CriticalPath, bubbles, critical_path, idle
from atoll.simulator.memory import Peak, curve, peaks
from atoll.simulator.timeline import Timeline
from atoll.trace.span import Span, Trace, TraceHeader

__all__ = ["Simulation"]


class Simulation:
    """``makespan_ns``: end of the last instruction of the last step. ``step_ns``: length of the last step, from the end of
    the step before (over all workers) to its own; with one step, the makespan."""

    def __init__(self, compiled: Compiled, costs: CostModel, timelines: list[Timeline]) -> None:
        self.compiled = compiled
        self.timelines = timelines
        self._costs = costs
        self.makespan_ns: int = self._end(timelines[-1])
        self.window_ns: tuple[int, int] = (self._end(timelines[-2]) if len(timelines) > 1 else 0, self.makespan_ns)
        self.step_ns: int = self.window_ns[1] - self.window_ns[0]

    def _end(self, timeline: Timeline) -> int:
        return max(timeline.ends[self.compiled.size:], default=0)

    @property
    def workers(self) -> tuple[str, ...]:
        return self.compiled.names

    @property
    def instructions(self) -> int:
        """How many instructions were executed."""
        return self.compiled.size * len(self.timelines)

    def trace(self) -> Trace:
        """All spans, in the form in which the runtime writes them: worker by worker, in program order, step by step."""
        compiled = self.compiled
        rows = [(part.worker, index, notation(instruction), instruction.lane, getattr(instruction, "size_bytes", 0))
                for part in compiled.program.workers for index, instruction in enumerate(part.instructions)]
        spans = tuple(Span(worker=worker, step=step, instruction=index, name=name, lane=lane, start_ns=start, end_ns=end,
                           size_bytes=size_bytes)
                      for step, timeline in enumerate(self.timelines)
                      for (worker, index, name, lane, size_bytes), start, end in
                      zip(rows, timeline.starts, timeline.ends, strict=False))
        header = TraceHeader(program=compiled.program.digest, clock="simulated", workers=compiled.names)
        return Trace(header=header, spans=spans)

    @cached_property
    def peaks(self) -> dict[str, Peak]:
        """Memory high-water of each worker over all steps, and what made it."""
        return peaks(self.compiled, self.timelines, self._costs)

    @cached_property
    def peak_bytes(self) -> dict[str, int]:
        return {name: peak.total_bytes for name, peak in self.peaks.items()}

    def memory_curves(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """By worker, (ns since the first start of the last step, bytes held from then on), resident bytes included."""
        timeline = self.timelines[-1]
        begin = min(timeline.starts[:self.compiled.size], default=0)
        return {name: curve(lives, timeline, self._costs.resident_bytes(name), begin)
                for name, lives in zip(self.compiled.names, self.compiled.lives, strict=True)}

    @cached_property
    def pair_bytes(self) -> dict[tuple[str, str], int]:
        """Bytes that one worker hands another in one step, collectives included."""
        compiled = self.compiled
        found: dict[tuple[str, str], int] = {}
        for worker, part in enumerate(compiled.program.workers):
            for node, instruction in enumerate(part.instructions, start=compiled.offset[worker]):
                if compiled.kinds[node] in (SEND, FLOW):
                    pair = (part.worker, instruction.peer)  # type: ignore[union-attr]
                    found[pair] = found.get(pair, 0) + instruction.size_bytes  # type: ignore[union-attr]
        for meeting in compiled.meetings:
            for pair in meeting.pairs:
                found[pair] = found.get(pair, 0) + meeting.edge_bytes
        return found

    @cached_property
    def step_segment_bytes(self) -> dict[str, int]:
        """Bytes over each directed segment in one step (segments that carry nothing: 0)."""
        found = dict.fromkeys(self.compiled.segments, 0)
        for pair, size_bytes in self.pair_bytes.items():
            for segment in self.compiled.ways[pair]:
                found[self.compiled.segments[segment]] += size_bytes
        return found

    @cached_property
    def segment_busy(self) -> dict[str, float]:
        """Share of each segment's capacity used in the last step."""
        capacity = dict(zip(self.compiled.segments, self.compiled.capacity, strict=True))
        seconds = self.step_ns / 1e9
        return {name: size_bytes / (capacity[name] * seconds) if seconds else 0.0
                for name, size_bytes in self.step_segment_bytes.items()}

    @cached_property
    def lane_ns(self) -> dict[str, dict[str, int]]:
        """By worker and lane: ns of the last step in which it was taken (by a Receive, from the start of its Send on)."""
        compiled, timeline = self.compiled, self.timelines[-1]
        found: dict[str, dict[str, int]] = {name: {} for name in compiled.names}
        for worker, name in enumerate(compiled.names):
            lanes = found[name]
            first = compiled.offset[worker]
            for node in range(first, first + len(compiled.before[worker])):
                lane = compiled.instruction_lanes[node]
                lanes[lane] = lanes.get(lane, 0) + timeline.ends[node] - timeline.starts[node]
        return found

    @cached_property
    def busy_share(self) -> dict[str, dict[str, float]]:
        """``lane_ns`` as a share of the step."""
        return {name: {lane: taken / self.step_ns if self.step_ns else 0.0 for lane, taken in lanes.items()}
                for name, lanes in self.lane_ns.items()}

    @cached_property
    def bubbles(self) -> Mapping[str, Bubbles]:
        """Makespan and span bubble of the last step, by worker that computes."""
        return bubbles(self.compiled, self.timelines[-1], self.step_ns)

    @cached_property
    def idle_ns(self) -> dict[str, dict[str, int]]:
        """By worker, what its compute lane waited for in the last step (see ``idle.idle``)."""
        return idle(self.compiled, self.timelines, self.window_ns)

    @cached_property
    def critical_path(self) -> CriticalPath:
        """The chain of instructions that made the last step as long as it is (see ``idle.critical_path``)."""
        return critical_path(self.compiled, self.timelines, self.window_ns)
