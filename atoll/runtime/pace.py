"""A device of another speed out of this one: compute is stretched in proportion to the CPU time it took."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import ClusterError
from atoll.runtime.clock import Clock
from atoll.runtime.world import Stop

__all__ = ["EmulatedPace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedPace:
    """An instruction of the compute lane that took ``c`` of CPU time ends ``factor * c`` after its start.

    ``factor`` = 1 / (speed * cpu_share): with ``cpu_share`` cores standing for a device of speed 1.0, the emulated
    machines together ask for no more cores than there are, so that they do not slow each other down. Because CPU time is
    what is stretched, a busy machine does not change the emulated speed as long as each gets its share. CPU time is that
    of the calling thread: PyTorch must compute with one thread (``torch.set_num_threads(1)``).
    """

    factor: float
    clock: Clock
    stop: Stop

    @classmethod
    def of(cls, speed: float, cpu_share: float, clock: Clock, stop: Stop) -> EmulatedPace:
        """Raises ``ClusterError`` when the machine would have to be faster than the core that plays it."""
        if speed <= 0 or cpu_share <= 0 or speed * cpu_share > 1:
            raise ClusterError(f"emulation: a device of speed {speed} at cpu_share {cpu_share} needs {speed * cpu_share:.2f} "
                               "cores, expected more than 0 and at most 1: lower cpu_share or speed")
        return cls(factor=1 / (speed * cpu_share), clock=clock, stop=stop)

    def __call__(self, started_ns: int, cpu_ns: int) -> None:
        self.clock.sleep_until(started_ns + round(cpu_ns * self.factor), self.stop)
