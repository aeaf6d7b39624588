"""A device of another speed out of this one: compute is stretched in proportion to the CPU time it took."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import ClusterError
from atoll.runtime.clock import Clock
from atoll.runtime.world import Stop

__all__ = ["EmulatedPace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedPace:
    """An instruction that took ``c`` of CPU time ends ``factor * c`` after its start.

    ``factor`` = 1 / (speed * cpu_share): with ``cpu_share`` cores standing for a device of speed 1.0, the emulated
    machines together ask for no more cores than there are, so that they do not slow each other down. Because CPU time is
    what is stretched, a busy machine does not change the emulated speed as long as each gets its share. CPU time is that
    of the calling thread (PyTorch must compute with one thread, ``torch.set_num_threads(1)``) and, on the compute lane of a
    process that is one device (``alone``), that of its other threads meanwhile: on a machine that is as slow as this, they
    take their time from the same core. At most as much as the instruction's own, as a scheduler would share it.
    """

    factor: float
    clock: Clock
    stop: Stop
    alone: bool

    @classmethod
    def of(cls, speed: float, cpu_share: float, clock: Clock, stop: Stop, *, alone: bool) -> EmulatedPace:
        """``alone``: the process is this one device.

        Raises ``ClusterError`` when the machine would have to be faster than the core that plays it."""
        if speed <= 0 or cpu_share <= 0 or speed * cpu_share > 1:
            raise ClusterError(f"emulation: a device of speed {speed} at cpu_share {cpu_share} needs {speed * cpu_share:.2f} "
                               "cores, expected more than 0 and at most 1: lower cpu_share or speed")
        return cls(factor=1 / (speed * cpu_share), clock=clock, stop=stop, alone=alone)

    def __call__(self, started_ns: int, cpu_ns: int, others_before_ns: int | None) -> None:
        """``others_before_ns``: ``clock.others_cpu()`` at the start on the compute lane, None on the others."""
        charged = cpu_ns
        self.clock.sleep_until(started_ns + round(charged * self.factor), self.stop)
        while self.alone and others_before_ns is not None:
            due = cpu_ns + min(cpu_ns, self.clock.others_cpu() - others_before_ns)
            if due <= charged:
                return
            charged = due
            self.clock.sleep_until(started_ns + round(charged * self.factor), self.stop)
