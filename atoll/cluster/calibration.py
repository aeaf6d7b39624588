"""What a short profile measured: how long each operator takes on a device of speed 1.0."""

from __future__ import annotations

from atoll.records import Record

__all__ = ["Calibration", "OperatorTimes"]


class OperatorTimes(Record):
    """Nanoseconds for one microbatch of ``Calibration.samples``. ``backward`` = both halves in one go."""

    forward_ns: int
    backward_ns: int
    backward_input_ns: int
    backward_weight_ns: int


class Calibration(Record):
    """Measured times by operator name, for one graph, precision and microbatch size, on one kind of device.

    ``update_ns_per_element``: optimizer step; ``reduce_ns_per_byte``: adding host buffers, per byte read;
    ``vote_ns_per_byte``: the norm of gradients (0: as ``reduce_ns_per_byte``); ``launch_ns``: fixed cost of an instruction.
    (The fixed cost of a message is the network's: ``cluster.network``.)
    """

    device: str
    graph: str
    precision: str
    samples: int
    operators: dict[str, OperatorTimes]
    update_ns_per_element: float
    reduce_ns_per_byte: float
    launch_ns: int
    vote_ns_per_byte: float = 0.0
    copy_ns_per_byte: float = 0.0
