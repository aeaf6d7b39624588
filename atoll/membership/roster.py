"""The coordinator's decisions: who is in, who makes the next generation, whether it may begin. Events in, actions out.

Two things keep a run one run. *Fencing*: every message carries generation and incarnation, and what is of the past is
refused. *Quorum*: a generation begins when all its members are ready for it and enough of the last one have left that, so
that no other coordinator can gather enough too. Members that are known to have stopped do not count; a coordinator that
served the last generation itself needs half of the others, one that came later (restarted, perhaps while the first still
runs behind a broken link) more than half: any two such sets have a member in common, and it obeys only one of the two.

A coordinator with an old copy of the journal learns from the members that come to it what began since, and what may have
begun: what a member was ready for and then heard no more of. It needs a quorum of each of these (as in joint consensus,
Ongaro and Ousterhout, 2014). Leases (Gray and Cheriton, 1989) say when a silent member has stopped: it does so by itself
once nobody has confirmed it for ``lease_ns`` (``tenure``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from atoll.errors import MembershipError
from atoll.membership.events import (
    PER_TERM,
    Action,
    Admit,
    Choose,
    Chosen,
    Committed,
    DrainAsked,
    Event,
    Excused,
    Fence,
    Generation,
    Halt,
    Inherited,
    Knocked,
    Left,
    Lost,
    Opened,
    Propose,
    Readied,
    Refuse,
    Release,
    Revoked,
    Settled,
    Start,
)
from atoll.records import Record

__all__ = ["Forming", "Member", "Patience", "Roster"]

_replace = msgspec.structs.replace

_TAKE_OVER = "go on with its journal, or say that it has ended for good"


class Patience(Record):
    """``lease_ns``: a member not heard for so long is lost, and has stopped. ``ready_ns``: how long a proposed generation may
    take to get ready. ``least``: fewest members a generation may have."""

    lease_ns: int
    ready_ns: int
    least: int = 1


class Member(Record):
    """``heard_ns``: not journalled, except what events say. ``attached``: it came to this coordinator. ``absent``:
    why it is not here ("" while it is); ``stopped``: it is known not to compute."""

    key: str
    incarnation: int
    heard_ns: int
    attached: bool = True
    draining: bool = False
    absent: str = ""
    stopped: bool = False


class Forming(Record):
    """A proposed generation. ``asked``: its members, and those here of the last one. ``ready``: name -> steps whose state
    it holds."""

    generation: Generation
    asked: tuple[str, ...]
    since_ns: int
    ready: dict[str, int] = {}


class Roster(Record):
    """The state: immutable; ``after`` gives the next one and what to tell whom. ``generation``: the last that began;
    ``perhaps``: later ones that may have begun under others. ``first``: whose the run was at first.
    ``heir``: the user said that there is no other. ``working``: the last generation has not been halted. ``proposed``: highest
    number ever proposed. ``committed``: steps done."""

    patience: Patience
    term: int = 0
    coordinator: str = ""
    first: str = ""
    heir: bool = False
    settled: bool = True
    opened_ns: int = 0
    members: dict[str, Member] = {}
    revoked: tuple[str, ...] = ()
    generation: Generation | None = None
    perhaps: tuple[Generation, ...] = ()
    working: bool = False
    forming: Forming | None = None
    proposed: int = 0
    committed: int = 0

    def after(self, event: Event) -> tuple[Roster, tuple[Action, ...]]:
        """Raises ``MembershipError`` for an event that can be no part of this run's history."""
        if not self.term and not isinstance(event, Opened):
            raise MembershipError(f"{type(event).__name__} before any coordinator opened the run")
        return _RULES[type(event)](self, event)

    def heard(self, member: str, incarnation: int, at_ns: int) -> tuple[Roster, tuple[Action, ...]]:
        """A sign of life: changes nothing that must outlive the coordinator."""
        known = self.members.get(member)
        if known is None or known.incarnation != incarnation or known.absent:
            why = "not of this run" if known is None else (known.absent or "a later self of it has come")
            return self, (Fence(member=member, incarnation=incarnation, reason=f"{member}: {why}; join again"),)
        return self._with(member, heard_ns=max(known.heard_ns, at_ns)), ()

    def due(self, now_ns: int) -> tuple[Event, ...]:
        """What time alone has brought about: apply and journal these like all events."""
        found: list[Event] = []
        for name, member in self.members.items():
            if not member.absent and now_ns - member.heard_ns >= self.patience.lease_ns:
                found.append(Lost(member=name, incarnation=member.incarnation, cause="silent", certain=False, at_ns=now_ns))
        if self.forming and now_ns - self.forming.since_ns >= self.patience.ready_ns:
            late = [name for name in self.forming.asked if name not in self.forming.ready]
            found += [Lost(member=name, incarnation=self.members[name].incarnation, cause="not ready in time", certain=False,
                           at_ns=now_ns) for name in late]
        if not self.settled and now_ns - self.opened_ns >= self.patience.lease_ns:
            found.append(Settled(at_ns=now_ns))
        return tuple(found)

    @property
    def present(self) -> tuple[str, ...]:
        """Who could take part in a generation, also those that wait as spares."""
        return tuple(name for name, member in self.members.items()
                     if not member.absent and member.attached and not member.draining)

    def lacking(self) -> str:
        """Why no generation may begin now, as a sentence; "" when it may."""
        if len(self.present) < max(1, self.patience.least):
            return f"{len(self.present)} members are here, at least {max(1, self.patience.least)} are wanted"
        if not self.settled:
            return "the coordinator was restarted and waits for members to come back to it"
        if self.generation is None and not (self.heir or self.coordinator == self.first):
            return "this coordinator took over from a copy that knows of no generation; " + _TAKE_OVER
        return self._short({name: member.incarnation for name, member in self.members.items()
                            if not member.absent and member.attached})

    def _short(self, left: dict[str, int]) -> str:
        """Of which generation too few are among ``left``, members (with their selves) that have left it or would."""
        for last in (*((self.generation,) if self.generation else ()), *self.perhaps):
            counted = [name for name, incarnation in last.members.items() if not self._stopped(name, incarnation)]
            away = [name for name in counted if left.get(name) != last.members[name]]
            here = len(counted) - len(away)
            own = self.heir or last.coordinator == self.coordinator
            if not counted and not own:
                return f"all of {last.called} have stopped, and another coordinator may have gone on with others; " + _TAKE_OVER
            if not (2 * here > len(counted) or (own and 2 * here == len(counted))):
                return (f"only {here} of {len(counted)} members of {last.called} are here, and {', '.join(away)} may go on "
                        "elsewhere; bring some of them back, or say that they have stopped")
        return ""

    def durable(self) -> Roster:
        """The state without what only a live coordinator knows: equal to what its journal gives."""
        return _replace(self, members={name: _replace(member, heard_ns=0) for name, member in self.members.items()})

    def _stopped(self, name: str, incarnation: int) -> bool:
        """Whether that self of the member is known not to compute any more."""
        member = self.members.get(name)
        return member is not None and (member.incarnation > incarnation
                                       or (member.stopped and member.incarnation == incarnation))

    def _with(self, name: str, **changes: Any) -> Roster:
        return _replace(self, members={**self.members, name: _replace(self.members[name], **changes)})

    def _learning(self, event: Knocked | Lost) -> Roster:
        """What began, or may have begun, later than our journal has."""
        state = self
        if event.began and (self.generation is None or event.began.number > self.generation.number):
            state = _replace(state, generation=event.began, working=False, forming=None)
        known = state.generation.number if state.generation else 0
        perhaps = {one.number: one for one in state.perhaps if one.number > known}
        if event.promised and event.promised.number > known and event.promised.coordinator != state.coordinator:
            perhaps[event.promised.number] = event.promised
        if set(perhaps) - {one.number for one in state.perhaps}:
            state = _replace(state, working=False, forming=None)
        return _replace(state, perhaps=tuple(perhaps.values()))

    def _choose(self, because: str) -> tuple[Action, ...]:
        """Ask for the next generation where one may begin (or might gain)."""
        if self.forming or self.lacking():
            return ()
        return (Choose(candidates=self.present, urgent=not self.working, because=because),)

    def _without(self, name: str, because: str) -> tuple[Roster, tuple[Action, ...]]:
        """Whatever ``name`` was part of stops."""
        state, last = self, self.generation
        forming = state.forming is not None and name in state.forming.asked
        halt: tuple[Action, ...] = ()
        if last and name in last.members and (state.working or forming):
            halt = (Halt(generation=last.number, at_boundary=False, because=because),)
            state = _replace(state, working=False)
        if forming:
            state = _replace(state, forming=None)
        return state, (*halt, *state._choose(because))


Outcome = tuple[Roster, tuple[Action, ...]]


def _opened(state: Roster, event: Opened) -> Outcome:
    if event.term <= state.term:
        raise MembershipError(f"term {event.term} follows term {state.term}: another coordinator took over; this one must end")
    members = {name: _replace(member, heard_ns=event.at_ns, attached=False) for name, member in state.members.items()}
    return _replace(state, term=event.term, coordinator=event.coordinator, first=state.first or event.coordinator,
                    heir=state.heir and state.coordinator == event.coordinator,
                    settled=state.settled and state.generation is None, opened_ns=event.at_ns, members=members,
                    forming=None, proposed=event.term * PER_TERM), ()


def _settled(state: Roster, event: Settled) -> Outcome:
    state = _replace(state, settled=True)
    return state, () if state.working else state._choose("members had time to come back")


def _knocked(state: Roster, event: Knocked) -> Outcome:
    name, known = event.member, state.members.get(event.member)
    reason = _refusal(state, event)
    if reason:
        return state, (Refuse(member=name, reason=reason),)
    same = known is not None and known.incarnation == event.incarnation
    member = (_replace(known, heard_ns=max(known.heard_ns, event.at_ns), attached=True, absent="") if known and same else
              Member(key=event.key, incarnation=event.incarnation, heard_ns=event.at_ns))
    state = _replace(state, members={**state.members, name: member})._learning(event)
    admitted = Admit(member=name, incarnation=event.incarnation, term=state.term, last=state.generation,
                     working=state.working)
    if known and not same:
        state, actions = state._without(name, f"{name} came back")
    elif state.working and same:
        actions = ()
    else:
        actions = state._choose(f"{name} is here")
    return state, (admitted, *actions)


def _refusal(state: Roster, event: Knocked) -> str:
    name, known = event.member, state.members.get(event.member)
    if event.key in state.revoked:
        return "the key was revoked; ask for a new invitation"
    if known and known.key not in ("", event.key):
        return f"the name {name} belongs to another key; choose another name"
    if any(member.key == event.key and other != name for other, member in state.members.items()):
        return "this key belongs to another name; a key is one member"
    if known and (event.incarnation < known.incarnation or (event.incarnation == known.incarnation and known.stopped)):
        return "a later self of it has come, or it was seen to end; start it again"
    return ""


def _lost(state: Roster, event: Lost) -> Outcome:
    known = state.members.get(event.member)
    if known is None or known.incarnation != event.incarnation or (known.absent and (known.stopped or not event.certain)):
        return state, ()
    state = state._with(event.member, absent=event.cause, stopped=event.certain, attached=False)._learning(event)
    return state._without(event.member, f"{event.member} is lost: {event.cause}")


def _left(state: Roster, event: Left) -> Outcome:
    return _lost(state, Lost(member=event.member, incarnation=event.incarnation, cause="left", certain=True, at_ns=event.at_ns))


def _drain(state: Roster, event: DrainAsked) -> Outcome:
    known = state.members.get(event.member)
    if known is None or known.absent or known.draining:
        return state, ()
    state = state._with(event.member, draining=True)
    if state.working and state.generation and event.member in state.generation.members:
        return state, state._choose(f"{event.member} wants to leave")
    if state.forming and event.member in state.forming.asked:
        state = _replace(state, forming=None)
    return state, (Release(member=event.member), *state._choose(f"{event.member} leaves"))


def _revoked(state: Roster, event: Revoked) -> Outcome:
    state = _replace(state, revoked=tuple(dict.fromkeys((*state.revoked, event.key))))
    name = next((name for name, member in state.members.items() if member.key == event.key and not member.absent), None)
    if name is None:
        return state, ()
    incarnation = state.members[name].incarnation
    state = state._with(name, absent="its key was revoked", attached=False)
    state, actions = state._without(name, f"the key of {name} was revoked")
    return state, (Fence(member=name, incarnation=incarnation, reason="the key was revoked"), *actions)


def _excused(state: Roster, event: Excused) -> Outcome:
    """Also members that an old journal does not know, or by an earlier self only."""
    generations = [*((state.generation,) if state.generation else ()), *state.perhaps]
    for name in event.members:
        known = state.members.get(name)
        if known and not known.absent:
            continue
        selves = [one.members[name] for one in generations if name in one.members]
        if known or selves:
            known = known or Member(key="", incarnation=0, heard_ns=event.at_ns, attached=False, absent="said to have stopped")
            member = _replace(known, incarnation=max([known.incarnation, *selves]), stopped=True)
            state = _replace(state, members={**state.members, name: member})
    return state, () if state.working else state._choose("members were said to have stopped")


def _inherited(state: Roster, event: Inherited) -> Outcome:
    """What others began may go on for a lease without them."""
    return _replace(state, heir=True, settled=False, opened_ns=event.at_ns), ()


def _chosen(state: Roster, event: Chosen) -> Outcome:
    if state.lacking() or not event.members or not set(event.members) <= set(state.present):
        return state, state._choose("who was chosen is not here any more")
    number = state.proposed + 1
    generation = Generation(number=number, coordinator=state.coordinator,
                            members={name: state.members[name].incarnation for name in sorted(set(event.members))})
    last = {name for one in (state.generation, *state.perhaps) if one for name in one.members if name in state.members
            and not state.members[name].absent and state.members[name].attached}
    actions: list[Action] = []
    if state.working and state.generation:
        actions.append(Halt(generation=state.generation.number, at_boundary=True, because=f"{generation.called} follows"))
    asked = tuple(sorted(last | set(event.members)))
    actions.append(Propose(generation=generation, to=asked))
    forming = Forming(generation=generation, asked=asked, since_ns=event.at_ns)
    return _replace(state, proposed=number, forming=forming, working=False), tuple(actions)


def _readied(state: Roster, event: Readied) -> Outcome:
    forming, known = state.forming, state.members.get(event.member)
    if (forming is None or event.generation != forming.generation.number or known is None or known.absent
            or known.incarnation != event.incarnation):
        return state, ()
    forming = _replace(forming, ready={**forming.ready, event.member: event.step})
    selves = {name: state.members[name].incarnation for name in forming.ready}
    begun = forming.generation
    if not begun.members.items() <= selves.items() or state._short(selves):
        return _replace(state, forming=forming), ()
    steps = {name: forming.ready[name] for name in begun.members}
    step = max(steps.values())
    begin = Start(generation=begun, step=step, holders=tuple(name for name, own in steps.items() if own == step))
    free = tuple(Release(member=name) for name, member in state.members.items()
                 if member.draining and not member.absent and name not in begun.members)
    return _replace(state, forming=None, generation=begun, perhaps=(), working=True, committed=step), (begin, *free)


def _committed(state: Roster, event: Committed) -> Outcome:
    current = state.generation
    if current is None or event.generation != current.number or event.step != state.committed + 1:
        return state, ()  # said again, or of a generation that is no more: it changes nothing
    return _replace(state, committed=event.step), ()


_RULES: dict[type, Callable[[Roster, Any], Outcome]] = {
    Opened: _opened, Settled: _settled, Knocked: _knocked, Lost: _lost, Left: _left, DrainAsked: _drain, Revoked: _revoked,
    Excused: _excused, Inherited: _inherited, Chosen: _chosen, Readied: _readied, Committed: _committed}
