"""The lane engine: executes a worker's instruction list, one thread a lane, in the order the dependency rule allows.

The compute lane runs on the calling thread; the others have a thread each for the life of the engine, except lanes of
messages for which the channel needs none (``prompt_lanes``). An instruction starts when the one before it on its lane
and all it waits for on other lanes have ended. Cost beyond the kernels, on one old core: 3.5 µs an instruction with
lanes, 1.6 µs where one thread runs them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from atoll.errors import AtollError, InstructionError
from atoll.policies.optim.spec import learning_rate
from atoll.program.instructions import COMPUTE, COPY, Buffer
from atoll.program.program import Program
from atoll.runtime.prepared import Prepared, prepare
from atoll.runtime.worker_state import StepResult, StepState, World
from atoll.runtime.world import Channel, StoppedError
from atoll.trace.span import Span

__all__ = ["Engine"]

_PACED = frozenset({COMPUTE, COPY})  # lanes whose work is the device's or its host's, not the link's or the disk's
_LEAVE_S = 1.0
_OUT = "out:"


class Engine:
    """Runs steps of programs over one ``World``. Use as a context manager, or ``close`` it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._prepared: dict[str, tuple[Prepared, frozenset[str]]] = {}
        self._lanes: dict[str, _Lane] = {}
        self._step: _Step | None = None
        world.stop.wake(self._wake)

    def _wake(self) -> None:
        if self._step is not None:
            self._step.wake()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the lane threads."""
        for lane in self._lanes.values():
            lane.inbox.put(None)
        self._lanes.clear()

    def prepared(self, program: Program) -> tuple[Prepared, frozenset[str]]:
        """The worker's part of ``program`` and those of its lanes that need no thread, worked out on first use."""
        key = program.digest if program is not self.world.program else "world"
        if key not in self._prepared:
            found = prepare(program, self.world.name)
            self._prepared[key] = found, prompt_lanes(found, self.world.channel)
        return self._prepared[key]

    def run_step(self, step: int, split: str = "train", program: Program | None = None) -> StepResult:
        """Execute one step of ``program`` (default: the world's) and return when all its instructions have ended.

        Raises ``StoppedError`` when the run was told to stop, ``WorkerLostError`` when a peer is gone, and
        ``InstructionError`` (or the ``AtollError`` a kernel raised) naming worker, step and instruction when one failed; the
        world's ``stop`` is then set, so that everything of this worker ends.
        """
        world = self.world
        world.stop.check()
        prepared, prompt = self.prepared(program or world.program)
        running = _Step(world, prepared, prompt, step, split)
        self._step = running
        if prepared.alone:
            running.run_alone()
        else:
            others = [lane for lane in prepared.order if lane != COMPUTE and lane not in prompt]
            for lane in others:
                self._lane(lane).inbox.put(running)
            running.run_lane(COMPUTE)
            running.join(len(others) + 1)
        if running.error is not None:
            raise running.error
        return running.result()

    def doing(self) -> dict[str, str]:
        """What each lane executes or waits to execute right now, by lane ("compute": "2F3"); may be asked from any thread."""
        running = self._step
        if running is None:
            return {}
        return {lane: running.prepared.names[index] for lane, index in list(running.current.items())}

    def _lane(self, lane: str) -> _Lane:
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(self.world.name, lane)
        return self._lanes[lane]


def prompt_lanes(prepared: Prepared, channel: Channel) -> frozenset[str]:
    """Lanes of messages that need no thread: a Send is done by whoever made its buffer, a Receive by whoever needs it.

    That spares every message two or three changes of thread, which cost more than a small message itself. A lane from
    which something is sent on without being computed with keeps its thread: nobody else would wait for it.
    """
    found = set()
    for lane, order in prepared.order.items():
        way, _, peer = lane.partition(":")
        if way not in ("in", "out") or not channel.prompt(peer, len(order)):
            continue
        handed_on = any(prepared.lanes[later].startswith(_OUT) for index in order for later in prepared.releases[index])
        if way == "out" or not handed_on:
            found.add(lane)
    return frozenset(found)


class _Lane:
    """One persistent thread that executes its lane of each step it is handed."""

    def __init__(self, worker: str, lane: str) -> None:
        self.inbox: SimpleQueue[_Step | None] = SimpleQueue()
        self.lane = lane
        threading.Thread(target=self._serve, name=f"{worker} {lane}", daemon=True).start()

    def _serve(self) -> None:
        while (step := self.inbox.get()) is not None:
            step.run_lane(self.lane)


class _Step:
    """One step while it runs: what has ended, which buffers are still to be read, the first error."""

    def __init__(self, world: World, prepared: Prepared, prompt: frozenset[str], step: int, split: str) -> None:
        self.world, self.prepared, self.step = world, prepared, step
        self.position = dict.fromkeys(prompt, 0)  # of each prompt lane, how many of its instructions have ended
        self.taken: set[str] = set()  # prompt lanes on which some thread works
        self.blocked: set[str] = set()  # lanes that wait for a prompt lane which another thread has taken
        self.state = StepState(
            world=world, step=step, split=split, samples=prepared.samples, first=prepared.first, in_place=prepared.in_place,
            learning_rate=learning_rate(world.optimizer_spec, step, world.total_steps))
        self.waits = list(prepared.waits)
        self.readers = dict(prepared.readers)
        self.spans: list[Span | None] = [None] * len(prepared.instructions)
        self.current: dict[str, int] = {}
        self.error: BaseException | None = None
        self.ended_lanes = 0
        lock = threading.Lock()
        self.lock = lock
        self.conditions = {lane: threading.Condition(lock) for lane in prepared.order}
        self.ended = threading.Condition(lock)
        self.synchronize: Callable[[], None] | None = (
            None if world.device.type == "cpu" else lambda: torch.accelerator.synchronize(world.device))

    def run_alone(self) -> None:
        """All lanes on this thread, in program order: with a single worker nothing would overlap."""
        index = 0
        try:
            for index in range(len(self.prepared.instructions)):
                self.current = {self.prepared.lanes[index]: index}
                self._execute(index)
                for buffer in self.prepared.reads[index]:
                    self._count_reader(buffer)
        except BaseException as error:
            self._fail(error, index)
        self.current = {}

    def run_lane(self, lane: str) -> None:
        """Execute the instructions of one lane in order, each once it may start."""
        index = 0
        try:
            for index in self.prepared.order[lane]:
                self.current[lane] = index
                if self.waits[index]:
                    self._make_ready(index)
                self._execute(index)
                self._end(index)
            if lane == COMPUTE:
                self._finish_prompt_lanes()
        except BaseException as error:
            self._fail(error, index)
        self.current.pop(lane, None)
        with self.lock:
            self.ended_lanes += 1
            self.ended.notify_all()

    def _make_ready(self, index: int) -> None:
        """Return once instruction ``index`` may start. What it waits for on prompt lanes this thread does itself, unless
        another one is at it. Whoever sets ``stop`` wakes all."""
        lanes = self.prepared.lanes
        while True:
            with self.lock:
                if not self.waits[index]:
                    return
                open_lanes = {lanes[one]: one for one in self.prepared.needs[index]
                              if lanes[one] in self.position and self.spans[one] is None}
                lane = next((lane for lane in open_lanes if lane not in self.taken), None)
                if lane is None:
                    self.world.stop.check()
                    if open_lanes:
                        self.blocked.add(lanes[index])
                    self.conditions[lanes[index]].wait()
                    continue
                self.taken.add(lane)
            self._work(lane, open_lanes[lane])

    def _work(self, lane: str, until: int | None = None) -> None:
        """Execute a prompt lane that this thread has taken: up to instruction ``until``, or while the next one is ready."""
        order, index = self.prepared.order[lane], 0
        try:
            while True:
                with self.lock:
                    at = self.position[lane]
                    over = at == len(order) or (self.waits[order[at]] > 0 if until is None else order[at] > until)
                    if over:
                        self.taken.discard(lane)
                        for waiting in self.blocked:
                            self.conditions[waiting].notify()
                        self.blocked.clear()
                        return
                self.current[lane] = index = order[at]
                if self.waits[index]:
                    self._make_ready(index)
                self._execute(index)
                self._end(index)
        except BaseException as error:
            self._fail(error, index)
            raise
        finally:
            self.current.pop(lane, None)

    def _finish_prompt_lanes(self) -> None:
        """Do what nobody has needed yet."""
        for lane in self.position:
            last = self.prepared.order[lane][-1]
            while True:
                with self.lock:
                    if self.spans[last] is not None and lane not in self.taken:
                        break
                    if lane in self.taken:
                        self.world.stop.check()
                        self.blocked.add(COMPUTE)
                        self.conditions[COMPUTE].wait()
                        continue
                    self.taken.add(lane)
                self._work(lane, last)

    def wake(self) -> None:
        with self.lock:
            for condition in (*self.conditions.values(), self.ended):
                condition.notify_all()

    def _execute(self, index: int) -> None:
        world, prepared = self.world, self.prepared
        world.stop.check()
        clock, instruction, lane = world.clock, prepared.instructions[index], prepared.lanes[index]
        paced = world.pace is not None and lane in _PACED
        others_before = clock.others_cpu() if paced and lane == COMPUTE else None
        started_cpu = clock.cpu() if paced else 0
        started = clock.now()
        size = prepared.kernels[index](self.state, instruction)
        if lane == COMPUTE and self.synchronize is not None:
            self.synchronize()
        if world.pace is not None and paced:
            world.pace(started, clock.cpu() - started_cpu, others_before)
        self.spans[index] = Span(worker=world.name, step=self.step, instruction=index, name=prepared.names[index], lane=lane,
                                 start_ns=started, end_ns=clock.now(), size_bytes=size)

    def _end(self, index: int) -> None:
        """Release what waits for instruction ``index`` and drop the buffers of which it was the last reader."""
        ready = []
        lanes = self.prepared.lanes
        with self.lock:
            if lanes[index] in self.position:
                self.position[lanes[index]] += 1
            for later in self.prepared.releases[index]:
                self.waits[later] -= 1
                if not self.waits[later]:
                    lane = lanes[later]
                    if lane in self.position and self._is_next(later, lane):
                        self.taken.add(lane)
                        ready.append(lane)
                    else:
                        self.conditions[lane].notify()
            for buffer in self.prepared.reads[index]:
                self._count_reader(buffer)
        for lane in ready:
            self._work(lane)

    def _is_next(self, index: int, lane: str) -> bool:
        """Whether ``index`` is a Send that its prompt lane can do now (a Receive, which might have to wait, nobody starts)."""
        return (lane.startswith(_OUT) and lane not in self.taken
                and self.prepared.order[lane][self.position[lane]] == index)

    def _count_reader(self, buffer: Buffer) -> None:
        self.readers[buffer] -= 1
        if not self.readers[buffer]:
            self.state.values.pop(buffer, None)

    def _fail(self, error: BaseException, index: int) -> None:
        """Keep the first error, with its place, and stop everything of this worker."""
        with self.lock:
            if self.error is None:
                self.error = self._located(error, index)
        self.world.stop.set(str(self.error))
        self.wake()

    def _located(self, error: BaseException, index: int) -> BaseException:
        if isinstance(error, StoppedError) or not isinstance(error, Exception):
            return error
        place = f"worker {self.world.name}, step {self.step}, {self.prepared.names[index]} on lane {self.prepared.lanes[index]}"
        kind = type(error) if isinstance(error, AtollError) else InstructionError
        detail = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
        located = kind(f"{place}: {detail}")
        located.__cause__ = error
        return located

    def join(self, lanes: int) -> None:
        """Wait until all lanes have ended; after an error or a stop no longer than a second."""
        with self.lock:
            while self.ended_lanes < lanes and not self.world.stop.event.is_set():
                self.ended.wait()
            if self.ended_lanes < lanes:
                self.ended.wait_for(lambda: self.ended_lanes == lanes, _LEAVE_S)
            if self.error is None and self.ended_lanes < lanes:
                self.error = StoppedError(self.world.stop.reason)

    def result(self) -> StepResult:
        state = self.state
        return StepResult(
            step=self.step, split=state.split, spans=tuple(span for span in self.spans if span is not None),
            loss_sum=state.loss_sum, tokens=state.total_tokens, gradient_norm=state.gradient_norm,
            learning_rate=state.learning_rate, committed=state.committed)
