"""What the coordinator learns (events, journalled in this order and no other) and what it then tells people (actions)."""

from __future__ import annotations

from typing import TypeAlias

from atoll.records import Record

__all__ = ["PER_TERM", "Action", "Admit", "Choose", "Chosen", "Committed", "DrainAsked", "Event", "Excused", "Fence",
           "Generation", "Halt", "Inherited", "Knocked", "Left", "Lost", "Opened", "Propose", "Readied", "Refuse", "Release",
           "Revoked", "Settled", "Start"]

PER_TERM = 1_000_000
"""Generations of term t are numbered from t * PER_TERM on."""


class Generation(Record):
    """One set of members. ``number``: larger is later. ``coordinator``: whose; two of one term could use the same numbers.

    ``members``: name -> incarnation, which a member counts on its own disk, one more each time its process starts: a later
    self proves that the earlier one has stopped (it holds the lock of its identity).
    """

    number: int
    coordinator: str
    members: dict[str, int]

    @property
    def called(self) -> str:
        return f"generation {self.number // PER_TERM}.{self.number % PER_TERM}"


class _Event(Record, tag=True):
    """``at_ns``: the coordinator's clock."""

    at_ns: int


class Opened(_Event):
    """``coordinator`` began to serve the run, as the ``term``-th: 1 at first, one more each time it is started again.

    It is the token of a journal, not of a process: who goes on with the very file (and holds its lock) is the same
    coordinator, with a whole memory; who takes over with a copy is another.
    """

    term: int
    coordinator: str


class Settled(_Event):
    """A restarted coordinator has waited long enough for members to come back to it."""


class Knocked(_Event):
    """``member`` wants to take part, or found the coordinator again. ``key``: fingerprint of the key that it proved to hold.
    ``began``: the last generation that it knows to have started; ``promised``: a later one that it was ready for."""

    member: str
    key: str
    incarnation: int
    began: Generation | None = None
    promised: Generation | None = None


class Lost(_Event):
    """``certain``: it does not compute any more (its process was seen to end), and not merely out of hearing; ``began`` and
    ``promised`` are then what its disk says, for it may have gone over to another coordinator before it ended."""

    member: str
    incarnation: int
    cause: str
    certain: bool
    began: Generation | None = None
    promised: Generation | None = None


class Left(_Event):
    """It said goodbye."""

    member: str
    incarnation: int


class DrainAsked(_Event):
    """It, or the user, wants ``member`` out of the run without loss."""

    member: str


class Revoked(_Event):
    """Whoever holds ``key`` is out, and does not come back."""

    key: str


class Excused(_Event):
    """The user gave his word that ``members`` do not compute any more, and obeyed no other coordinator before."""

    members: tuple[str, ...]


class Inherited(_Event):
    """The user gave his word that no other coordinator of this run is at work, or will be."""


class Chosen(_Event):
    """The answer to ``Choose``: these shall be the next generation; other members stay as spares."""

    members: tuple[str, ...]


class Readied(_Event):
    """``member`` has left what it did before for ``generation``, whether it belongs to it or not; it holds the state after
    ``step`` steps."""

    member: str
    incarnation: int
    generation: int
    step: int


class Committed(_Event):
    """All of ``generation`` agreed on ``step`` (counted from 1)."""

    generation: int
    step: int


Event: TypeAlias = (Opened | Settled | Knocked | Lost | Left | DrainAsked | Revoked | Excused | Inherited | Chosen
                    | Readied | Committed)


class _Action(Record, tag=True):
    pass


class Admit(_Action):
    """``member`` may take part as this self: what an earlier self says is void. ``last``: the last generation that began; it
    must not go on with an earlier one. ``working``: that is at work."""

    member: str
    incarnation: int
    term: int
    last: Generation | None
    working: bool


class Refuse(_Action):
    member: str
    reason: str


class Fence(_Action):
    """Whoever calls himself ``member``, ``incarnation``, must stop: he speaks for a past that is no more."""

    member: str
    incarnation: int
    reason: str


class Halt(_Action):
    """All of ``generation`` stop and cancel their transfers now (``at_boundary``: after the step they are in)."""

    generation: int
    at_boundary: bool
    because: str


class Choose(_Action):
    """Somebody must decide who goes on. ``urgent``: nobody works meanwhile; else stay as you are unless a change gains."""

    candidates: tuple[str, ...]
    urgent: bool
    because: str


class Propose(_Action):
    """``to``: its members, who get ready for ``generation``, and those of the last one, who leave it."""

    generation: Generation
    to: tuple[str, ...]


class Start(_Action):
    """All are ready. The generation goes on after ``step`` steps; ``holders`` have that state, the others fetch it."""

    generation: Generation
    step: int
    holders: tuple[str, ...]


class Release(_Action):
    """``member`` is not needed any more and may go."""

    member: str


Action: TypeAlias = Admit | Refuse | Fence | Halt | Choose | Propose | Start | Release
