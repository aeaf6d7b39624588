"""What the simulator asks of the network (``cluster.network.Network`` answers; tests bring a small one of their own)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

__all__ = ["Path", "Roads"]


class Path(Protocol):
    """The way of a message: directed segments in order (none inside one machine), latency one way, fixed cost a message."""

    @property
    def segments(self) -> tuple[str, ...]: ...

    @property
    def latency_ns(self) -> int: ...

    @property
    def message_ns(self) -> int: ...


class Roads(Protocol):
    """``capacity``: bytes/s of each directed segment; ``local_bytes_per_s``: of a path without segments."""

    @property
    def workers(self) -> Collection[str]: ...

    @property
    def capacity(self) -> Mapping[str, int]: ...

    @property
    def local_bytes_per_s(self) -> int: ...

    def path(self, source: str, target: str) -> Path: ...
