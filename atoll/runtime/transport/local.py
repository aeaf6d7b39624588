"""Channels between threads of one process: the transport of the "loop" tests, and of a program with one worker."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from atoll.errors import ProgramError, WorkerLostError
from atoll.runtime.world import Stop

__all__ = ["LocalChannel", "LocalHub"]

_POLL_S = 0.05
Message = tuple[str, list[torch.Tensor]]


class LocalHub:
    """Joins ``workers``: one ordered queue per directed pair, a meeting place per group.

    ``prompt``: what its channels say of all peers (see ``Channel``). ``sent_bytes`` counts payload by (source, target),
    ``native_bytes`` what each worker put into a collective.
    """

    prompt = True

    def __init__(self, workers: Sequence[str]) -> None:
        self.workers = tuple(workers)
        self.queues: dict[tuple[str, str], queue.SimpleQueue[Message]] = {
            (source, target): queue.SimpleQueue() for source in workers for target in workers if source != target}
        self.sent_bytes: Counter[tuple[str, str]] = Counter()
        self.native_bytes: Counter[str] = Counter()
        self.gone: set[str] = set()
        self.meetings: dict[tuple[str, ...], _Meeting] = {}
        self.lock = threading.Lock()

    def channel(self, name: str, stop: Stop) -> LocalChannel:
        return LocalChannel(self, name, stop)

    def meeting(self, group: tuple[str, ...]) -> _Meeting:
        with self.lock:
            return self.meetings.setdefault(group, _Meeting(group))


class LocalChannel:
    """One worker's end (the ``Channel`` protocol). Tensors are copied when sent, as a wire would."""

    def __init__(self, hub: LocalHub, name: str, stop: Stop) -> None:
        self.hub, self.name, self.stop = hub, name, stop

    def _queue(self, source: str, target: str) -> queue.SimpleQueue[Message]:
        if (source, target) not in self.hub.queues:
            raise ProgramError(f"there is no channel from {source!r} to {target!r}; known: {', '.join(self.hub.workers)}")
        return self.hub.queues[source, target]

    def send(self, peer: str, label: str, tensors: Sequence[torch.Tensor]) -> int:
        self.stop.check()
        pair = self._queue(self.name, peer)
        size = sum(tensor.nbytes for tensor in tensors)
        pair.put((label, [tensor.detach().clone() for tensor in tensors]))
        with self.hub.lock:
            self.hub.sent_bytes[self.name, peer] += size
        return size

    def receive(self, peer: str, label: str) -> list[torch.Tensor]:
        pair = self._queue(peer, self.name)
        while True:
            self.stop.check()
            try:
                found, tensors = pair.get(timeout=_POLL_S)
            except queue.Empty:
                if peer in self.hub.gone and pair.empty():
                    raise WorkerLostError(f"{self.name} waits for {label} of {peer}, which has left") from None
                continue
            if found != label:
                raise ProgramError(f"{self.name} expected {label} of {peer}, found {found}")
            return tensors

    def prompt(self, peer: str, messages: int) -> bool:
        return self.hub.prompt

    def all_reduce(self, group: Sequence[str], tensor: torch.Tensor) -> None:
        """Sum in the order of ``group``, so that all members hold the same bits."""
        self.hub.meeting(tuple(group)).sum(self.name, tensor, self.stop, self.hub.gone)
        with self.hub.lock:
            self.hub.native_bytes[self.name] += tensor.nbytes

    def close(self) -> None:
        self.hub.gone.add(self.name)


class _Meeting:
    """Where a group meets once per collective: the last to come sums, the last to leave clears the table."""

    def __init__(self, group: tuple[str, ...]) -> None:
        self.group = group
        self.given: dict[str, torch.Tensor] = {}
        self.total: torch.Tensor | None = None
        self.left = 0
        self.condition = threading.Condition()

    def sum(self, name: str, tensor: torch.Tensor, stop: Stop, gone: set[str]) -> None:
        with self.condition:
            self._wait(lambda: self.total is None, name, stop, gone)
            self.given[name] = tensor
            if len(self.given) == len(self.group):
                total = self.given[self.group[0]].clone()
                for member in self.group[1:]:
                    total += self.given[member]
                self.total = total
                self.condition.notify_all()
            self._wait(lambda: self.total is not None, name, stop, gone)
            assert self.total is not None
            tensor.copy_(self.total)
            self.left += 1
            if self.left == len(self.group):
                self.given, self.total, self.left = {}, None, 0
                self.condition.notify_all()

    def _wait(self, ready: Callable[[], bool], name: str, stop: Stop, gone: set[str]) -> None:
        while not ready():
            stop.check()
            lost = gone.intersection(self.group) - {name}
            if lost:
                raise WorkerLostError(f"{name} waits in a collective for {', '.join(sorted(lost))}, which has left")
            self.condition.wait(_POLL_S)
