"""A program as flat lists of integers, made once, executed for as many steps as wanted.

Instructions of all workers are numbered through: worker w's instruction i is node ``offset[w] + i``. After the ``size``
instructions comes one node a worker that stands for the end of its step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import NoReturn

import msgspec

from atoll.errors import ProgramError
from atoll.program.contracts import CostModel
from atoll.program.dependencies import dependencies
from atoll.program.instructions import Buffer, Instruction, Native, Receive, Reduce, Send
from atoll.program.notation import notation
from atoll.program.program import Program
from atoll.simulator.fabric import AMOUNT, flow_ns, prune, shared_with
from atoll.simulator.roads import Path, Roads

__all__ = ["END", "FIXED", "FLOW", "NATIVE", "RECEIVE", "RING", "SEND", "Compiled", "Life", "Meeting", "compile_program"]

FIXED, SEND, FLOW, RECEIVE, NATIVE, END = range(6)
"""What a node does. SEND: its link is its own, so its time is known; FLOW: it shares its link; END: end of a worker's step."""

PERSISTENT = frozenset({"parameters", "gradient"})
"""Kinds of buffers that a worker holds all the time; they are part of ``CostModel.resident_bytes``."""

RING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""How often the chunks of a ring go round in a collective: its cost is r(n-1)/n S/bandwidth + r(n-1) latency."""


class Life(msgspec.Struct, frozen=True, gc=False):
    """A buffer of ``size_bytes``: alive from the start of node ``writer`` to the last end among ``users`` (its readers and,
    where nobody reads it or several write it, its last writer)."""

    buffer: Buffer
    size_bytes: int
    writer: int
    users: list[int]


@dataclass(frozen=True, slots=True)
class Meeting:
    """A collective that its ``members`` (nodes) do together as a ring. ``edges``: (lane, amount) that share links;
    ``alone_ns``: time of the slowest edge that does not; ``latency_ns``: of all rounds; ``edge_bytes``: of each edge;
    ``pairs``: (source, target) of each edge."""

    members: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    alone_ns: int
    latency_ns: int
    edge_bytes: int
    pairs: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Compiled:
    """By node: ``kinds``, ``times`` (ns; FIXED and SEND), ``partner`` (the Receive of a Send and the reverse, the meeting of a
    Native, the worker of an END), ``delay`` (ns from the end of a Send to the arrival), ``amount`` and ``lane`` (FLOW),
    ``successors`` and ``waits`` (how many). By worker: ``roots``, ``before`` (what each instruction waits for within its
    worker), ``lives`` of buffers. By (source, target): ``pairs`` (lane), ``ways`` (segments), ``sends`` (nodes). By lane:
    ``routes`` (segments) and ``top`` (bytes/s alone)."""

    program: Program
    names: tuple[str, ...]
    offset: list[int]
    size: int
    kinds: list[int]
    times: list[int]
    partner: list[int]
    delay: list[int]
    amount: list[int]
    lane: list[int]
    successors: list[list[int]]
    waits: list[int]
    roots: list[list[int]]
    before: list[list[tuple[int, ...]]]
    instruction_lanes: list[str]
    lives: list[list[Life]]
    meetings: list[Meeting]
    pairs: dict[tuple[str, str], int]
    ways: dict[tuple[str, str], tuple[int, ...]]
    sends: dict[tuple[str, str], list[int]]
    routes: list[tuple[int, ...]]
    top: list[int]
    segments: list[str]
    capacity: list[int]

    def place(self, node: int) -> str:
        """ "instruction 3 (2F0) of a1"."""
        worker, instruction = self.find(node)
        found = self.program.workers[worker].instructions[instruction]
        return f"instruction {instruction} ({notation(found)}) of {self.names[worker]}"

    def find(self, node: int) -> tuple[int, int]:
        """Number of the worker, index of the instruction."""
        worker = bisect_right(self.offset, node) - 1
        return worker, node - self.offset[worker]


class _Access(msgspec.Struct, gc=False):
    """An instruction's lane, reads and writes, written down once; buffers are numbers."""

    lane: str
    reads: list[int]
    writes: list[int]


def compile_program(program: Program, costs: CostModel, roads: Roads, slowdown: Mapping[str, float]) -> Compiled:
    """Raises ``ProgramError`` on what cannot be executed whatever the timing: unmatched or unequal messages, unknown peers,
    malformed groups. (Deadlocks show when it runs.)"""
    names = tuple(part.worker for part in program.workers)
    _check_workers(names, roads, slowdown)
    size = sum(len(part.instructions) for part in program.workers)
    nodes = size + len(names)
    compiled = Compiled(
        program=program, names=names, offset=[], size=size, kinds=[FIXED] * size + [END] * len(names), times=[0] * nodes,
        partner=[0] * size + list(range(len(names))), delay=[0] * nodes, amount=[0] * nodes, lane=[0] * nodes,
        successors=[[] for _ in range(nodes)], waits=[0] * nodes, roots=[], before=[], instruction_lanes=[], lives=[],
        meetings=[], pairs={}, ways={}, sends={}, routes=[], top=[], segments=list(roads.capacity),
        capacity=[int(rate) for rate in roads.capacity.values()])
    number = {name: index for index, name in enumerate(compiled.segments)}
    receives: dict[tuple[str, str], list[int]] = {}
    natives: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for index in range(len(names)):
        _worker(compiled, index, costs, slowdown.get(names[index], 1.0), receives, natives)
    _messages(compiled, roads, number, receives)
    _meetings(compiled, roads, number, natives)
    _settle_lonely_lanes(compiled)
    return compiled


def _check_workers(names: tuple[str, ...], roads: Roads, slowdown: Mapping[str, float]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ProgramError(f"program: worker {name!r} appears {names.count(name)} times, expected once")
        if name not in roads.workers:
            raise ProgramError(f"program: worker {name!r} is not in the cluster; it has {', '.join(sorted(roads.workers))}")
    for name, factor in slowdown.items():
        if name not in names:
            raise ProgramError(f"slowdown: there is no worker {name!r} in the program; it has {', '.join(names)}")
        if not 0 < factor < float("inf"):
            raise ProgramError(f"slowdown of {name}: found {factor}, expected a positive factor (2: half as fast)")
    for name, rate in roads.capacity.items():
        if rate < 1:
            raise ProgramError(f"network segment {name!r}: found {rate} bytes/s, expected at least 1")


def _worker(compiled: Compiled, index: int, costs: CostModel, slowdown: float, receives: dict[tuple[str, str], list[int]],
            natives: dict[tuple[str, ...], dict[str, list[int]]]) -> None:
    """Compile one worker: nodes, dependencies, lives of buffers; collect its messages and collectives."""
    name = compiled.names[index]
    offset = len(compiled.instruction_lanes)
    compiled.offset.append(offset)
    numbers: defaultdict[Buffer, int] = defaultdict(count().__next__)
    number = numbers.__getitem__
    accesses: list[_Access] = []
    outgoing: dict[str, list[int]] = {}
    incoming: dict[str, list[int]] = {}
    kinds, times = compiled.kinds, compiled.times
    duration = costs.duration_ns
    for node, instruction in enumerate(compiled.program.workers[index].instructions, start=offset):
        lane = instruction.lane
        reads, writes = [*map(number, instruction.reads)], [*map(number, instruction.writes)]
        if len(reads) > 4 and len(writes) > 2:  # a buffer that is added to waits no longer for being read as well
            reads = list(set(reads).difference(writes))
        accesses.append(_Access(lane, reads, writes))
        kind = type(instruction)  # isinstance is slow where it says no
        if kind is Send:
            kinds[node] = FLOW
            outgoing.setdefault(lane, []).append(node)
        elif kind is Receive:
            kinds[node] = RECEIVE
            incoming.setdefault(lane, []).append(node)
        elif kind is Native:
            assert isinstance(instruction, Native)
            kinds[node] = NATIVE
            natives.setdefault(instruction.group, {}).setdefault(name, []).append(node)
        else:
            times[node] = time = duration(name, instruction)
            if slowdown != 1.0:
                times[node] = round(time * slowdown)
            if time < 0:
                raise ProgramError(f"{compiled.place(node)}: the cost model says {time} ns, expected 0 or more")
    instructions = compiled.program.workers[index].instructions
    for nodes in outgoing.values():
        compiled.sends[name, _peer(instructions[nodes[0] - offset])] = nodes
    for nodes in incoming.values():
        receives[_peer(instructions[nodes[0] - offset]), name] = nodes
    compiled.instruction_lanes.extend([access.lane for access in accesses])
    _link(compiled, index, dependencies(accesses), offset)
    compiled.lives.append(_lives(compiled, name, accesses, numbers, offset, costs))


def _peer(instruction: Instruction) -> str:
    assert isinstance(instruction, Send | Receive)
    return instruction.peer


def _lives(compiled: Compiled, worker: str, accesses: list[_Access], numbers: Mapping[Buffer, int], offset: int,
           costs: CostModel) -> list[Life]:
    """When the buffers of a worker come and go (those that weigh nothing left out)."""
    first, last = [-1] * len(numbers), [-1] * len(numbers)
    readers: list[list[int]] = [[] for _ in numbers]
    for node, access in enumerate(accesses, start=offset):
        for buffer_number in access.reads:
            readers[buffer_number].append(node)
        for buffer_number in access.writes:
            last[buffer_number] = node
            if first[buffer_number] < 0:
                first[buffer_number] = node
    lives = []
    buffer_bytes = costs.buffer_bytes
    for buffer, buffer_number in numbers.items():
        writer = first[buffer_number]
        if writer >= 0 and buffer[0] not in PERSISTENT:
            size_bytes = _buffer_bytes(buffer, writer, worker, compiled, buffer_bytes)
            if size_bytes:
                users = readers[buffer_number]
                if not users or last[buffer_number] > writer:
                    users.append(last[buffer_number])
                lives.append(Life(buffer, size_bytes, writer, users))
    return lives


def _buffer_bytes(buffer: Buffer, writer: int, worker: str, compiled: Compiled,
                  buffer_bytes: Callable[[str, Buffer], int]) -> int:
    """A chunk on its way through a collective is as large as the message that brings it or as each of the chunks it is the
    sum of; all else the cost model knows."""
    if buffer[0] == "partial":
        found = _instruction(compiled, writer)
        if isinstance(found, Receive):
            return found.size_bytes
        if isinstance(found, Reduce):
            return found.size_bytes // len(found.sources)
    return buffer_bytes(worker, buffer)


def _link(compiled: Compiled, index: int, before: list[tuple[int, ...]], offset: int) -> None:
    """Turn what each instruction waits for into successors and in-degrees; the last of each lane ends the step."""
    compiled.before.append(before)
    successors, waits, kinds = compiled.successors, compiled.waits, compiled.kinds
    roots = []
    node = offset
    for earlier in before:
        if earlier:
            waits[node] = len(earlier)
            for one in earlier:
                successors[offset + one].append(node)
        else:
            waits[node] = 1
            roots.append(node)
        if kinds[node] == RECEIVE:
            waits[node] += 1
        node += 1
    end = compiled.size + index
    last = {compiled.instruction_lanes[node]: node for node in range(offset, offset + len(before))}
    for node in last.values():
        successors[node].append(end)
    waits[end] = len(last)
    if not last:
        waits[end] = 1
        roots.append(end)
    compiled.roots.append(roots)


def _instruction(compiled: Compiled, node: int) -> Instruction:
    worker, index = compiled.find(node)
    return compiled.program.workers[worker].instructions[index]


def _messages(compiled: Compiled, roads: Roads, number: Mapping[str, int],
              receives: dict[tuple[str, str], list[int]]) -> None:
    """Match the k-th Send of each pair with its k-th Receive."""
    for source, target in receives:
        if (source, target) not in compiled.sends:
            _unmatched(compiled, receives[source, target][0], f"receives from {source}, which sends it nothing")
    for (source, target), nodes in compiled.sends.items():
        if target == source:
            _unmatched(compiled, nodes[0], "sends to itself; leave the buffer where it is")
        if target not in compiled.names:
            _unmatched(compiled, nodes[0], f"sends to {target}, which has no program")
        arriving = receives.get((source, target), [])
        if len(arriving) != len(nodes):
            extra = nodes[len(arriving)] if len(nodes) > len(arriving) else arriving[len(nodes)]
            _unmatched(compiled, extra, f"has no counterpart: {source} sends {target} {len(nodes)} messages, {target} "
                                        f"receives {len(arriving)}")
        path = roads.path(source, target)
        lane = compiled.pairs[source, target] = _lane(compiled, path, roads, number)
        compiled.ways[source, target] = compiled.routes[lane]
        delay = path.latency_ns + path.message_ns
        sending = compiled.program.workers[compiled.names.index(source)].instructions
        receiving = compiled.program.workers[compiled.names.index(target)].instructions
        here, there = compiled.find(nodes[0])[0], compiled.find(arriving[0])[0]
        here, there = compiled.offset[here], compiled.offset[there]
        for send, receive in zip(nodes, arriving, strict=True):
            one, other = sending[send - here], receiving[receive - there]
            if one.size_bytes != other.size_bytes or one.buffer != other.buffer:  # type: ignore[union-attr]
                _unmatched(compiled, receive, f"meets {compiled.place(send)}, which sends {one.buffer} of "  # type: ignore[union-attr]
                           f"{one.size_bytes} bytes; it expects {other.buffer} of {other.size_bytes}")  # type: ignore[union-attr]
            if one.size_bytes < 0:  # type: ignore[union-attr]
                _unmatched(compiled, send, "sends less than nothing")
            compiled.partner[send] = receive
            compiled.partner[receive] = send
            compiled.delay[send] = delay
            compiled.lane[send] = lane
            compiled.amount[send] = one.size_bytes * AMOUNT  # type: ignore[union-attr]


def _lane(compiled: Compiled, path: Path, roads: Roads, number: Mapping[str, int]) -> int:
    route = tuple(dict.fromkeys(number[segment] for segment in path.segments))
    compiled.routes.append(route)
    compiled.top.append(min((compiled.capacity[segment] for segment in route), default=int(roads.local_bytes_per_s)))
    return len(compiled.routes) - 1


def _meetings(compiled: Compiled, roads: Roads, number: Mapping[str, int],
              natives: dict[tuple[str, ...], dict[str, list[int]]]) -> None:
    """Bring the k-th Native of each member of a group together."""
    for group, members in natives.items():
        _check_group(compiled, group, members)
        edges = [(group[i], group[(i + 1) % len(group)]) for i in range(len(group))] if len(group) > 1 else []
        paths = [roads.path(*edge) for edge in edges]
        lanes = [_lane(compiled, path, roads, number) for path in paths]
        compiled.ways.update(zip(edges, (compiled.routes[lane] for lane in lanes), strict=True))
        latency_ns = max((path.latency_ns for path in paths), default=0)
        for nodes in zip(*(members[name] for name in group), strict=True):
            found = [_instruction(compiled, node) for node in nodes]
            one = found[0]
            assert isinstance(one, Native)
            for node, other in zip(nodes, found, strict=True):
                assert isinstance(other, Native)
                if (other.collective, other.size_bytes) != (one.collective, one.size_bytes):
                    _unmatched(compiled, node, f"does {other.collective} of {other.size_bytes} bytes where "
                               f"{compiled.place(nodes[0])} does {one.collective} of {one.size_bytes}")
            if one.collective not in RING:
                _unmatched(compiled, nodes[0], f"asks for {one.collective!r}; known: {', '.join(RING)}")
            rounds = RING[one.collective] * (len(group) - 1)
            amount = rounds * one.size_bytes * AMOUNT // len(group)
            for node in nodes:
                compiled.partner[node] = len(compiled.meetings)
            compiled.meetings.append(Meeting(
                members=nodes, edges=tuple((lane, amount) for lane in lanes) if amount else (), alone_ns=0,
                latency_ns=rounds * latency_ns, edge_bytes=-(-rounds * one.size_bytes // len(group)), pairs=tuple(edges)))


def _check_group(compiled: Compiled, group: tuple[str, ...], members: dict[str, list[int]]) -> None:
    some = next(iter(members.values()))[0]
    for name, nodes in members.items():
        if name not in group:
            _unmatched(compiled, nodes[0], f"runs on {name}, which is not in its group {', '.join(group)}")
    for name in group:
        if group.count(name) > 1:
            _unmatched(compiled, some, f"has {name} in its group {group.count(name)} times")
        if name not in compiled.names:
            _unmatched(compiled, some, f"has {name} in its group, which has no program")
    counts = {name: len(members.get(name, ())) for name in group}
    if len(set(counts.values())) > 1:
        most = max(counts, key=lambda name: counts[name])
        least = min(counts, key=lambda name: counts[name])
        _unmatched(compiled, members[most][counts[least]], f"waits for {least} forever: {most} meets the group "
                   f"({', '.join(group)}) {counts[most]} times, {least} {counts[least]} times")


def _settle_lonely_lanes(compiled: Compiled) -> None:
    """Where nothing else ever uses a lane's segments, times are known now."""
    shared = shared_with(prune(compiled.routes, compiled.capacity, compiled.top))
    kinds, times, amount = compiled.kinds, compiled.times, compiled.amount
    for pair, nodes in compiled.sends.items():
        lane = compiled.pairs[pair]
        rate, lonely = compiled.top[lane], not shared[lane]
        for node in nodes:
            if lonely or not amount[node]:
                kinds[node] = SEND
                times[node] = flow_ns(amount[node], rate)
    for index, meeting in enumerate(compiled.meetings):
        lonely_ns = [flow_ns(amount, compiled.top[lane]) for lane, amount in meeting.edges if not shared[lane]]
        compiled.meetings[index] = Meeting(
            members=meeting.members, edges=tuple(edge for edge in meeting.edges if shared[edge[0]]),
            alone_ns=max(lonely_ns, default=0), latency_ns=meeting.latency_ns, edge_bytes=meeting.edge_bytes,
            pairs=meeting.pairs)


def _unmatched(compiled: Compiled, node: int, reason: str) -> NoReturn:
    raise ProgramError(f"program: {compiled.place(node)} {reason}")
