"""One exception tree. A message says what was asked, what was found and what to change."""

from __future__ import annotations

__all__ = [
    "AtollError",
    "CheckpointError",
    "ClusterError",
    "DataError",
    "DocumentError",
    "GraphError",
    "InstructionError",
    "InterruptError",
    "LabError",
    "MembershipError",
    "PlanError",
    "ProgramError",
    "WorkerLostError",
    "WorkplaceError",
]


class AtollError(Exception):
    """Base of every error a user may meet; the faces print it as one sentence and exit with ``exit_code``."""

    exit_code = 1


class DocumentError(AtollError):
    """A file the user wrote is wrong: names file, path inside it, what was found, what is allowed."""

    exit_code = 2


class ClusterError(AtollError):
    """The cluster as described cannot exist (unknown machine, disconnected islands)."""

    exit_code = 2


class GraphError(AtollError):
    """A model cannot become a graph, or a cut is not legal."""

    exit_code = 2


class PlanError(AtollError):
    """No plan fits, or a given plan breaks a rule: says by how much and the nearest change that would fit."""

    exit_code = 3


class ProgramError(AtollError):
    """A program is not executable: deadlock, unmatched send, use before write. Names the culprit."""


class InstructionError(AtollError):
    """An instruction failed while it ran: names worker, step, instruction and lane."""


class DataError(AtollError):
    """The corpus is empty, too short or unreadable."""

    exit_code = 2


class CheckpointError(AtollError):
    """A checkpoint is missing, broken, or belongs to another job."""

    exit_code = 4


class WorkplaceError(AtollError):
    """The machine lacks something (port, disk, device, library, right): says what to do."""

    exit_code = 5


class InterruptError(AtollError):
    """Somebody pressed Ctrl-C or asked the process to end: says what is kept and how to go on."""

    exit_code = 130


class LabError(WorkplaceError):
    """The lab cannot shape the network here."""


class WorkerLostError(AtollError):
    """A worker was killed, froze or left: names the machine and what it was doing."""

    exit_code = 6


class MembershipError(AtollError):
    """Who belongs to a run cannot be told: another coordinator took over, or the journal is damaged or another run's."""

    exit_code = 7
