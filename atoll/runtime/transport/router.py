"""One ``Channel`` out of two: peers of the own island over the library, all others over the wire."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from atoll.errors import ProgramError
from atoll.runtime.world import Channel

__all__ = ["Router"]


class Router:
    """``near``: the workers of the own island (this one may be among them). ``native`` may be missing when there is no
    other. Either may be missing in a run that never needs it; a message that would need it is refused by name."""

    def __init__(self, name: str, near: Collection[str], native: Channel | None, wire: Channel | None) -> None:
        self._name, self._near, self._native, self._wire = name, frozenset(near), native, wire

    def _to(self, peer: str) -> Channel:
        channel = self._native if peer in self._near else self._wire
        if channel is None:
            raise ProgramError(f"worker {self._name} has no channel to {peer}: the run was started without one")
        return channel

    def send(self, peer: str, label: str, tensors: Sequence[torch.Tensor]) -> int:
        return self._to(peer).send(peer, label, tensors)

    def receive(self, peer: str, label: str) -> list[torch.Tensor]:
        return self._to(peer).receive(peer, label)

    def prompt(self, peer: str, messages: int) -> bool:
        return self._to(peer).prompt(peer, messages)

    def all_reduce(self, group: Sequence[str], tensor: torch.Tensor) -> None:
        if list(group) == [self._name]:
            return
        far = [worker for worker in group if worker not in self._near]
        if far or self._native is None:
            raise ProgramError(f"worker {self._name}: a native collective over {', '.join(group)} would leave the island; "
                               "only a plan with sends and receives crosses islands")
        self._native.all_reduce(group, tensor)

    def close(self) -> None:
        for channel in (self._wire, self._native):
            if channel is not None:
                channel.close()
