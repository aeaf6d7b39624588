"""A network and costs that exist on paper only, for tests of the simulator; random programs that can always run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atoll.program.instructions import Backward, Buffer, Forward, Instruction, Load, Native, Receive, Reduce, Send
from atoll.program.program import Program, WorkerProgram

GIGA = 10**9


@dataclass(frozen=True)
class PaperPath:
    segments: tuple[str, ...] = ()
    latency_ns: int = 0
    message_ns: int = 0


@dataclass(frozen=True)
class PaperRoads:
    """``paths``: by (source, target); others take ``default``."""

    workers: tuple[str, ...]
    capacity: Mapping[str, int] = field(default_factory=dict)
    paths: Mapping[tuple[str, str], PaperPath] = field(default_factory=dict)
    default: PaperPath = PaperPath()
    local_bytes_per_s: int = GIGA

    def path(self, source: str, target: str) -> PaperPath:
        return self.paths.get((source, target), self.default)


def star(workers: tuple[str, ...], bytes_per_s: int, latency_ns: int = 0, message_ns: int = 0,
         rates: Mapping[str, int] | None = None) -> PaperRoads:
    """Every worker has a port each way into one switch."""
    capacity = {}
    for name in workers:
        capacity[f"{name}>"] = capacity[f">{name}"] = (rates or {}).get(name, bytes_per_s)
    paths = {(a, b): PaperPath((f"{a}>", f">{b}"), latency_ns, message_ns) for a in workers for b in workers if a != b}
    return PaperRoads(workers, capacity, paths)


def wire(workers: tuple[str, ...], bytes_per_s: int, latency_ns: int = 0, message_ns: int = 0) -> PaperRoads:
    """All pairs share one segment."""
    return PaperRoads(workers, {"wire": bytes_per_s}, default=PaperPath(("wire",), latency_ns, message_ns))


def _nothing(*_: object) -> int:
    return 0


@dataclass(frozen=True)
class PaperCosts:
    duration: Callable[[str, Instruction], int] = _nothing
    size: Callable[[str, Buffer], int] = _nothing
    resident: int = 0

    def duration_ns(self, worker: str, instruction: Instruction) -> int:
        return self.duration(worker, instruction)

    def buffer_bytes(self, worker: str, buffer: Buffer) -> int:
        return self.size(worker, buffer)

    def resident_bytes(self, worker: str) -> int:
        return self.resident


def program(**workers: list[Instruction]) -> Program:
    return Program(kind="train", microbatch_samples=1, workers=tuple(
        WorkerProgram(worker=name, replica=0, stages=(), buckets=(), instructions=tuple(instructions))  # type: ignore[arg-type]
        for name, instructions in workers.items()))


def send(number: int, peer: str, size_bytes: int) -> Send:
    return Send(buffer=("saved", number, 0), peer=peer, size_bytes=size_bytes)


def receive(number: int, peer: str, size_bytes: int) -> Receive:
    return Receive(buffer=("saved", number, 0), peer=peer, size_bytes=size_bytes)


def forward(number: int) -> Forward:
    """Writes ("saved", number, 0)."""
    return Forward(stage=number, microbatch=0)


def backward(number: int) -> Backward:
    """Reads ("saved", number, 0)."""
    return Backward(stage=number, microbatch=0)


def random_program(seed: int, names: tuple[str, ...], length: int) -> Program:
    """Instructions in one global order in which they can run: compute, messages, sums and collectives of made-up buffers."""
    dice = random.Random(seed)
    parts: dict[str, list[Instruction]] = {name: [] for name in names}
    held: dict[str, list[Buffer]] = {name: [] for name in names}
    for number in range(length):
        name = dice.choice(names)
        choice = dice.random()
        if choice < 0.3 or not held[name]:
            parts[name].append(forward(number))
            held[name].append(("saved", number, 0))
        elif choice < 0.4:
            parts[name].append(Load(stage=number, microbatch=0, size_bytes=dice.randrange(100)))
            held[name].append(("input", number, 0))
        elif choice < 0.5:
            saved = [buffer for buffer in held[name] if buffer[0] == "saved"]
            if saved:
                parts[name].append(backward(int(dice.choice(saved)[1])))
        elif choice < 0.6:
            sources = tuple(dice.sample(held[name], k=min(len(held[name]), dice.randrange(1, 4))))
            parts[name].append(Reduce(target=("partial", number, 0), sources=sources, size_bytes=dice.randrange(1000)))
            held[name].append(("partial", number, 0))
        elif choice < 0.65 and len(names) > 1:
            group = tuple(dice.sample(names, k=dice.randrange(1, len(names) + 1)))
            size_bytes = dice.choice((0, 7, 1000, 12345))
            for member in group:
                parts[member].append(Native(collective="all_reduce", group=group, source=("gradient", number, 0),
                                            target=("reduced", number, 0), size_bytes=size_bytes))
        else:
            target = dice.choice(names)
            buffer = dice.choice(held[name])
            if target != name and buffer not in held[target]:
                size_bytes = dice.choice((0, 1, 999, 5000, 20000))
                parts[name].append(Send(buffer=buffer, peer=target, size_bytes=size_bytes))
                parts[target].append(Receive(buffer=buffer, peer=name, size_bytes=size_bytes))
                held[target].append(buffer)
    return program(**parts)
