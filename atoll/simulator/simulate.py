"""The virtual clock: execute a program on a cluster that exists on paper.

Time is whole nanoseconds. What an instruction waits for is ``program.dependencies``; here is only when things happen:

- compute, copy, disk: the time the cost model says, times the worker's slowdown;
- Send: holds its out-lane until the link has taken all bytes (fluid flow, fair share; ``fabric``); the message
  arrives one latency and one message cost later. Nobody waits for the receiver: a channel takes any number of messages;
- Receive: holds its in-lane from when it could start and its Send did, until the arrival;
- Native: its members meet, the ring runs as flows between neighbours, plus the latency of every round;
- a worker begins its next step when all its own instructions of this one have ended.

An instruction's end is worked out as soon as all it waits for is known, which may lie ahead of the clock; only
flows that share segments are taken in order of time. That is what makes it fast.
"""

# ruff: noqa: PLR1730 - the comparisons of the loop are written out because a call to max() costs several of them

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop, heappush

from atoll.errors import ProgramError
from atoll.program.contracts import CostModel
from atoll.program.program import Program
from atoll.simulator.compiled import END, FIXED, FLOW, RECEIVE, SEND, Compiled, compile_program
from atoll.simulator.fabric import Fabric
from atoll.simulator.roads import Roads
from atoll.simulator.simulation import Simulation
from atoll.simulator.timeline import Timeline

__all__ = ["Simulation", "simulate"]


def simulate(program: Program, costs: CostModel, network: Roads, *, steps: int = 1,
             slowdown: Mapping[str, float] | None = None) -> Simulation:
    """Run ``steps`` steps of ``program`` and return what happened.

    ``slowdown``: factor by which a worker's own work takes longer (1.5: half as long again), by worker name.
    Raises ``ProgramError`` naming the culprit when a message has no counterpart, a group is malformed or the program
    waits for itself; never hangs. Cost: O(reads + writes) once, then O(dependencies) a step, plus O(flows in flight) for each
    start or end of a flow whose links are shared.
    """
    if steps < 1:
        raise ProgramError(f"simulate: found {steps} steps, expected at least 1")
    with _collector_resting():
        compiled = compile_program(program, costs, network, slowdown or {})
        run = _Run(compiled, steps)
        run.go()
    return Simulation(compiled, costs, run.timelines)


@contextmanager
def _collector_resting() -> Iterator[None]:
    """Everything made here is kept, and nothing of it is a circle: walking through it for garbage, again and again while it
    grows, took a fifth of the time."""
    resting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if resting:
            gc.enable()


class _Run:
    """The state of one execution; ``timelines`` are its result."""

    def __init__(self, compiled: Compiled, steps: int) -> None:
        self.compiled = compiled
        self.steps = steps
        self.nodes = len(compiled.kinds)
        self.lanes = len(compiled.routes)
        self.stride = self.nodes + len(compiled.meetings)
        self.heap: list[tuple[int, int]] = []
        self.fabric = Fabric(compiled.routes, compiled.capacity, compiled.top, self.heap)
        self.in_flight = [0] * self.lanes
        self.hot = (compiled.kinds, compiled.times, compiled.partner, compiled.delay, compiled.successors, self.heap)
        self.timelines: list[Timeline] = []
        self.waiting: list[list[int]] = []
        self.stacks: list[list[int]] = []
        self.gathering: list[list[int]] = []
        self.flowing: list[list[int]] = []
        for _ in range(steps):
            self._open_step()

    def _open_step(self) -> None:
        compiled = self.compiled
        self.timelines.append(Timeline(starts=[0] * self.nodes, ends=[-1] * self.nodes))
        self.waiting.append(list(compiled.waits))
        self.stacks.append([])
        self.gathering.append([len(meeting.members) for meeting in compiled.meetings])
        self.flowing.append([len(meeting.edges) for meeting in compiled.meetings])

    def go(self) -> None:
        for worker in range(len(self.compiled.names)):
            self._begin(0, worker, 0)
        self._settle(0)
        heap, fabric, lanes, stride = self.heap, self.fabric, self.lanes, self.stride
        due = fabric.due
        while heap:
            now, code = heappop(heap)
            if code < lanes:
                if due[code] != now:
                    continue  # the flow was slowed down or sped up since
                fabric.end(code, now)
                step, node = divmod(self.in_flight[code], stride)
                if node < self.nodes:
                    self._sent(step, node, now)
                else:
                    self._edge_done(step, node - self.nodes, now)
            else:
                code -= lanes
                step, node = divmod(code, stride)
                if node < self.nodes:
                    lane = self.compiled.lane[node]
                    self.in_flight[lane] = code
                    fabric.start(lane, self.compiled.amount[node], now)
                else:
                    for lane, amount in self.compiled.meetings[node - self.nodes].edges:
                        self.in_flight[lane] = code
                        fabric.start(lane, amount, now)
                continue
            self._settle(step)
        for step, timeline in enumerate(self.timelines):
            if min(timeline.ends) < 0:
                raise ProgramError(_stuck(self.compiled, timeline, step))

    def _begin(self, step: int, worker: int, now: int) -> None:
        """``worker`` may start what waits for nothing of this step."""
        starts, waiting, stack = self.timelines[step].starts, self.waiting[step], self.stacks[step]
        for node in self.compiled.roots[worker]:
            if starts[node] < now:
                starts[node] = now
            waiting[node] -= 1
            if not waiting[node]:
                stack.append(node)

    def _drain(self, step: int) -> None:
        """Work out everything of one step that is now known.

        A node's entry in ``starts`` is the latest end of what it waits for so far; in ``ends``, for a Receive, the arrival.
        """
        kinds, times, partner, delay, successors, heap = self.hot
        starts, ends = self.timelines[step].starts, self.timelines[step].ends
        waiting, stack = self.waiting[step], self.stacks[step]
        pop, push = stack.pop, stack.append
        while stack:
            node = pop()
            kind = kinds[node]
            start = starts[node]
            if kind == FIXED:
                end = start + times[node]
            elif kind == RECEIVE:
                end = ends[node]
                if end < start:
                    end = start
            elif kind == SEND:
                end = start + times[node]
                receive = partner[node]
                ends[receive] = end + delay[node]
                if starts[receive] < start:
                    starts[receive] = start
                waiting[receive] -= 1
                if not waiting[receive]:
                    push(receive)
            elif kind == FLOW:
                heappush(heap, (start, self.lanes + step * self.stride + node))
                continue
            elif kind == END:
                ends[node] = start
                if step + 1 < self.steps:
                    self._begin(step + 1, partner[node], start)
                continue
            else:
                self._gather(step, partner[node])
                continue
            ends[node] = end
            for after in successors[node]:
                if starts[after] < end:
                    starts[after] = end
                waiting[after] -= 1
                if not waiting[after]:
                    push(after)

    def _settle(self, step: int) -> None:
        """Drain this step and every later one that some worker has begun with it."""
        self._drain(step)
        while step + 1 < self.steps and self.stacks[step + 1]:
            step += 1
            self._drain(step)

    def _finish(self, step: int, node: int, end: int) -> None:
        starts, waiting, stack = self.timelines[step].starts, self.waiting[step], self.stacks[step]
        self.timelines[step].ends[node] = end
        for after in self.compiled.successors[node]:
            if starts[after] < end:
                starts[after] = end
            waiting[after] -= 1
            if not waiting[after]:
                stack.append(after)

    def _sent(self, step: int, node: int, now: int) -> None:
        """The link has taken all of a Send."""
        starts, waiting = self.timelines[step].starts, self.waiting[step]
        receive = self.compiled.partner[node]
        self.timelines[step].ends[receive] = now + self.compiled.delay[node]
        if starts[receive] < starts[node]:
            starts[receive] = starts[node]
        waiting[receive] -= 1
        if not waiting[receive]:
            self.stacks[step].append(receive)
        self._finish(step, node, now)

    def _gather(self, step: int, number: int) -> None:
        """One more member stands at a collective; the last one sets it going."""
        self.gathering[step][number] -= 1
        if self.gathering[step][number]:
            return
        meeting = self.compiled.meetings[number]
        starts = self.timelines[step].starts
        now = max(starts[node] for node in meeting.members)
        if meeting.edges:
            heappush(self.heap, (now, self.lanes + step * self.stride + self.nodes + number))
        else:
            self._part(step, number, now)

    def _edge_done(self, step: int, number: int, now: int) -> None:
        self.flowing[step][number] -= 1
        if not self.flowing[step][number]:
            self._part(step, number, now)

    def _part(self, step: int, number: int, flowed: int) -> None:
        """All flows of a collective are through (those that share no link included): its members go on."""
        meeting = self.compiled.meetings[number]
        starts = self.timelines[step].starts
        met = max(starts[node] for node in meeting.members)
        end = max(flowed, met + meeting.alone_ns) + meeting.latency_ns
        for node in meeting.members:
            self._finish(step, node, end)


def _stuck(compiled: Compiled, timeline: Timeline, step: int) -> str:
    """Name a circle of instructions that wait for each other."""
    ends = timeline.ends

    def blockers(node: int) -> list[int]:
        worker, index = compiled.find(node)
        found = [compiled.offset[worker] + one for one in compiled.before[worker][index]]
        kind = compiled.kinds[node]
        if kind == RECEIVE:
            found.append(compiled.partner[node])
        elif kind not in (FIXED, SEND, FLOW):
            members = compiled.meetings[compiled.partner[node]].members
            found.extend(one for member in members if member != node for one in
                         (compiled.offset[compiled.find(member)[0]] + i
                          for i in compiled.before[compiled.find(member)[0]][compiled.find(member)[1]]))
        return [one for one in found if ends[one] < 0]

    node = next(node for node in range(compiled.size) if ends[node] < 0)
    path: list[int] = []
    while node not in path:
        path.append(node)
        node = blockers(node)[0]
    circle = [*path[path.index(node):], node]
    return f"program: step {step} waits for itself: " + ", which waits for ".join(compiled.place(one) for one in circle)
