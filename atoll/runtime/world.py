"""What a worker may touch: everything is passed in, nothing is global."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

__all__ = ["Batches", "Channel", "Pace", "StageModule", "Stop", "StoppedError"]


class StoppedError(Exception):
    """Raised out of every wait once the run is told to stop."""


class Stop:
    """One flag for all waits of a worker: whoever owns a wait looks at it, and it says why."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.reason = ""
        self._wakers: list[Callable[[], None]] = []

    def set(self, reason: str) -> None:
        """May be called from any thread that holds no lock which a waker takes."""
        if not self.event.is_set():
            self.reason = reason
            self.event.set()
            for wake in list(self._wakers):
                wake()

    def wake(self, waker: Callable[[], None]) -> None:
        """Have ``waker`` called once the flag is set (at once if it is), so that a wait need not look every moment: ten
        threads that look twenty times a second take a hundredth of a core."""
        self._wakers.append(waker)
        if self.event.is_set():
            waker()

    def check(self) -> None:
        if self.event.is_set():
            raise StoppedError(self.reason)


class Channel(Protocol):
    """Messages between this worker and its peers: ordered per pair, unbounded in number, cancellable.

    ``label`` names the buffer; the receiver checks that it is the one expected and that dtype and shape were sent along.
    """

    def send(self, peer: str, label: str, tensors: Sequence[torch.Tensor]) -> int:
        """Hand the tensors to the link; returns once the link has taken all bytes (a shaped link: at its rate; latency is
        not waited for). The caller must not change the tensors before. Returns payload bytes. Raises ``StoppedError``."""
        ...

    def receive(self, peer: str, label: str) -> list[torch.Tensor]:
        """The next message of ``peer``. Raises ``StoppedError``; ``WorkerLostError`` when the peer is gone."""
        ...

    def prompt(self, peer: str, messages: int) -> bool:
        """Whether messages with ``peer``, at most ``messages`` a step each way, need no thread of their own: a send returns at
        once, and what arrives is taken in meanwhile, so that whoever needs a message may fetch it himself."""
        ...

    def all_reduce(self, group: Sequence[str], tensor: torch.Tensor) -> None:
        """Sum in place over ``group`` (all inside one island), by the library."""
        ...

    def close(self) -> None: ...


class Pace(Protocol):
    """Makes a device of another speed out of this one: called after an instruction with the CPU time it took."""

    def __call__(self, started_ns: int, cpu_ns: int, others_before_ns: int | None) -> None: ...


class StageModule(Protocol):
    """One stage, built alone: named tensors in, named tensors out; autograd inside.

    ``parameters``: logical name -> leaf; the same Parameter object for two stages of one worker that share a weight.
    """

    parameters: Mapping[str, torch.nn.Parameter]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...

    def start_deferring(self) -> list[object]:
        """From here on weight gradients of matrix products are not computed but put into the list returned."""
        ...

    def stop_deferring(self) -> None:
        """From here on a backward computes all gradients again (a schedule may mix whole and split backwards)."""
        ...

    def run_deferred(self, deferred: list[object]) -> None:
        """Compute the weight gradients of one microbatch that were put off, adding to ``.grad``."""
        ...


class Batches(Protocol):
    """The data set as a worker sees it: a function of (split, step, sample)."""

    def microbatch(self, split: str, step: int, first: int, samples: int) -> dict[str, torch.Tensor]:
        """Model inputs by name (tokens, targets: int64, (samples, sequence)) for samples ``first``.. of the step."""
        ...
