"""The only clock of the runtime: nanoseconds since the origin of the run, and a sleep that ends on time."""

from __future__ import annotations

import time

from atoll.runtime.world import Stop

__all__ = ["Clock"]

_SLICE_NS = 50_000_000
_SPIN_NS = 80_000


class Clock:
    """Counts from ``origin_ns`` of the machine's monotonic clock (default: now). Processes of one machine that are given
    the same origin agree; between machines the head corrects the origin by the measured offset."""

    def __init__(self, origin_ns: int | None = None) -> None:
        self.origin_ns = time.monotonic_ns() if origin_ns is None else origin_ns

    def now(self) -> int:
        return time.monotonic_ns() - self.origin_ns

    def cpu(self) -> int:
        """CPU time of the calling thread."""
        return time.thread_time_ns()

    def others_cpu(self) -> int:
        """CPU time of all other threads of this process."""
        return time.process_time_ns() - time.thread_time_ns()

    def sleep_until(self, deadline_ns: int, stop: Stop) -> None:
        """Return at ``deadline_ns``: sleeps in slices, looks at ``stop`` between them, spins over the last 80 µs (a sleep
        alone comes back that much late). Raises ``StoppedError``."""
        while True:
            left = deadline_ns - self.now()
            if left <= 0:
                return
            if left > _SPIN_NS:
                time.sleep(min(left - _SPIN_NS, _SLICE_NS) / 1e9)
                stop.check()
