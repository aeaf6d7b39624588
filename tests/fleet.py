"""A small world to try membership in: members with their tenures, coordinators with their journals, links that break.

Seeded walks through it: at each turn something happens that may happen to real machines at that moment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from atoll.membership.events import (
    Action,
    Admit,
    Choose,
    Chosen,
    Committed,
    DrainAsked,
    Event,
    Excused,
    Generation,
    Halt,
    Inherited,
    Knocked,
    Left,
    Lost,
    Opened,
    Propose,
    Readied,
    Revoked,
    Start,
)
from atoll.membership.roster import Patience, Roster
from atoll.membership.tenure import Tenure

LEASE_NS = 1_000
PATIENCE = Patience(lease_ns=LEASE_NS, ready_ns=700)
NAMES = "abcde"


@dataclass
class Peer:
    """``tenure``: all of it is on its disk. ``up``: its process runs."""

    name: str
    tenure: Tenure = field(default_factory=lambda: Tenure(lease_ns=LEASE_NS))
    up: bool = False
    step: int = 0


@dataclass
class Head:
    token: str
    roster: Roster
    events: list[bytes]


class Fleet:
    """``live``: generations of which every member is at work for it. ``history``: committed (step, generation number)."""

    def __init__(self, source: random.Random) -> None:
        self.random = source
        self.now = 0
        self.peers = {name: Peer(name) for name in NAMES}
        self.heads: list[Head] = []
        self.generations: dict[str, Generation] = {}
        self.broken: set[tuple[str, str]] = set()
        self.history: list[tuple[int, int]] = []
        self.started = self.copies = 0
        self.open(Roster(patience=PATIENCE), [])

    # -- coordinators --------------------------------------------------------------------------------------------------

    def open(self, roster: Roster, events: list[bytes], token: str = "") -> None:
        head = Head(token=token or f"head{self.copies}", roster=roster, events=list(events))
        self.heads.append(head)
        self.tell(head, Opened(term=roster.term + 1, coordinator=head.token, at_ns=self.now))

    def tell(self, head: Head, event: Event) -> tuple[Action, ...]:
        """Journal, decide, carry out."""
        head.events.append(msgspec.json.encode(event))
        head.roster, actions = head.roster.after(event)
        for action in actions:
            self.carry_out(head, action)
        return actions

    def carry_out(self, head: Head, action: Action) -> None:
        if isinstance(action, Propose):
            self.generations[f"{head.token} {action.generation.number}"] = action.generation
            for name in action.to:
                if self.linked(head, name) and self.random.random() < 0.9:
                    self.propose(head, self.peers[name], action.generation)
        elif isinstance(action, Choose):
            if action.urgent or self.random.random() < 0.5:
                size = self.random.randint(1, len(action.candidates))
                if self.random.random() < 0.7:
                    size = len(action.candidates)
                self.tell(head, Chosen(members=tuple(self.random.sample(action.candidates, size)), at_ns=self.now))
        elif isinstance(action, Start):
            self.started += 1
            for name in action.generation.members:
                peer = self.peers[name]
                if self.linked(head, name) and peer.up and self.random.random() < 0.95:
                    peer.tenure = peer.tenure.started(action.generation)
                    peer.step = action.step

    def propose(self, head: Head, peer: Peer, generation: Generation) -> None:
        if not peer.up or generation.members.get(peer.name, peer.tenure.incarnation) != peer.tenure.incarnation:
            return
        accepted = peer.tenure.ready(generation)
        if accepted is not None:
            peer.tenure = accepted
            if self.random.random() < 0.95:  # else the answer is lost
                self.tell(head, Readied(member=peer.name, incarnation=peer.tenure.incarnation, generation=generation.number,
                                        step=peer.step, at_ns=self.now))

    def linked(self, head: Head, name: str) -> bool:
        return (head.token, name) not in self.broken

    # -- what may happen -----------------------------------------------------------------------------------------------

    def turn(self) -> None:
        self.now += self.random.choice((1, 1, 20, 100, 400))
        happening = self.random.choices(
            (self.renew, self.knock, self.kill, self.restart_peer, self.cut, self.mend, self.restart_head, self.copy_head,
             self.step, self.step, self.drain, self.revoke, self.excuse, self.seen_dead, self.leave, self.repeat, self.bury),
            (30, 14, 3, 6, 4, 8, 1, 1, 10, 10, 1, 0.2, 0.3, 2, 0.5, 1, 0.5))[0]
        happening()
        for head in self.heads:
            for event in head.roster.due(self.now):
                self.tell(head, event)
        self.check()

    def some(self) -> tuple[Head, Peer] | None:
        head, peer = self.random.choice(self.heads), self.peers[self.random.choice(NAMES)]
        return (head, peer) if peer.up and self.linked(head, peer.name) else None

    def renew(self) -> None:
        """Everybody who can tells its coordinator that it is alive."""
        for peer in self.peers.values():
            head = next((head for head in self.heads if head.token == peer.tenure.coordinator), None)
            if head is None or not peer.up or not self.linked(head, peer.name) or self.random.random() < 0.2:
                continue
            sent = self.now - self.random.randint(0, 50)
            head.roster, actions = head.roster.heard(peer.name, peer.tenure.incarnation, self.now)
            if not actions and self.random.random() < 0.9:  # else the answer is lost
                peer.tenure = peer.tenure.confirmed(head.roster.term, head.token, sent)

    def knock(self) -> None:
        met = self.some()
        if met is None or not met[1].tenure.follows(met[0].roster.term, met[0].token):
            return
        head, peer = met
        own = peer.tenure
        event = Knocked(member=peer.name, key=f"key of {peer.name}", incarnation=own.incarnation, began=own.began,
                        promised=own.promised, at_ns=self.now)
        head.events.append(msgspec.json.encode(event))
        head.roster, actions = head.roster.after(event)
        for action in actions:
            if isinstance(action, Admit) and self.random.random() < 0.95:  # else the answer is lost
                peer.tenure = own.admitted(action.term, head.token, action.last, self.now)
                if action.working and action.last and peer.tenure.incarnation == action.last.members.get(peer.name):
                    peer.tenure = peer.tenure.started(action.last)
            self.carry_out(head, action)

    def kill(self) -> None:
        self.peers[self.random.choice(NAMES)].up = False

    def restart_peer(self) -> None:
        peer = self.peers[self.random.choice(NAMES)]
        if not peer.up:
            peer.up, peer.tenure, peer.step = True, peer.tenure.reborn(), 0

    def cut(self) -> None:
        self.broken.add((self.random.choice(self.heads).token, self.random.choice(NAMES)))

    def mend(self) -> None:
        if self.broken:
            self.broken.remove(self.random.choice(sorted(self.broken)))

    def restart_head(self) -> None:
        """One is killed, and comes back from its journal."""
        head = self.random.choice(self.heads)
        self.heads.remove(head)
        self.open(replayed(head.events), head.events, head.token)

    def copy_head(self) -> None:
        """One is started elsewhere from a journal of some time ago, while the others go on."""
        if self.copies < 4 and not any(head.roster.heir for head in self.heads):
            self.copies += 1
            head = self.random.choice(self.heads)
            events = head.events[:self.random.randint(1, len(head.events))]
            self.open(replayed(events), events)

    def bury(self) -> None:
        """A coordinator's machine is gone with its journal. Who is the last is told so."""
        if len(self.heads) > 1:
            self.heads.remove(self.random.choice(self.heads))
        elif not self.heads[0].roster.heir:
            self.tell(self.heads[0], Inherited(at_ns=self.now))

    def step(self) -> None:
        """A generation at work agrees on its next step."""
        for generation in self.live():
            peers = [self.peers[name] for name in generation.members]
            step = max(peer.step for peer in peers) + 1
            for peer in peers:
                peer.step = step
            self.history.append((step, generation.number))
            head = next((head for head in self.heads if head.token == peers[0].tenure.coordinator), None)
            if head:
                self.tell(head, Committed(generation=generation.number, step=step, at_ns=self.now))

    def drain(self) -> None:
        met = self.some()
        if met:
            self.tell(met[0], DrainAsked(member=met[1].name, at_ns=self.now))

    def revoke(self) -> None:
        met = self.some()
        if met:
            self.tell(met[0], Revoked(key=f"key of {met[1].name}", at_ns=self.now))

    def excuse(self) -> None:
        """The user tells the truth: those that are down."""
        head = self.random.choice(self.heads)
        down = tuple(name for name, peer in self.peers.items()
                     if not peer.up and peer.tenure.coordinator in ("", head.token))
        if down:
            self.tell(head, Excused(members=down, at_ns=self.now))

    def seen_dead(self) -> None:
        """Somebody saw the process end."""
        head = self.random.choice(self.heads)
        for peer in self.peers.values():
            member = head.roster.members.get(peer.name)
            if not peer.up and member:
                self.tell(head, Lost(member=peer.name, incarnation=member.incarnation, cause="killed", certain=True,
                                     began=peer.tenure.began, promised=peer.tenure.promised, at_ns=self.now))

    def leave(self) -> None:
        met = self.some()
        if met and met[1].tenure.coordinator == met[0].token:
            head, peer = met
            peer.up = False
            self.tell(head, Left(member=peer.name, incarnation=peer.tenure.incarnation, at_ns=self.now))

    def repeat(self) -> None:
        """A message of the past arrives once more."""
        head = self.random.choice(self.heads)
        event = msgspec.json.decode(self.random.choice(head.events), type=Event)
        if isinstance(event, Readied | Committed | Lost | Left):
            self.tell(head, event)

    def calm(self) -> None:
        """All faults end: one coordinator is left, all machines are up and hear each other, the user says so."""
        head = self.random.choice(self.heads)
        self.heads, self.broken = [], set()
        term = max(head.roster.term, *(peer.tenure.term for peer in self.peers.values())) + 1
        self.heads.append(head)
        self.tell(head, Opened(term=term, coordinator=head.token, at_ns=self.now))
        self.tell(head, Inherited(at_ns=self.now))
        revoked = [name for name in NAMES if f"key of {name}" in head.roster.revoked]
        for name in revoked:
            self.peers[name].up = False
        for name in sorted(set(NAMES) - set(revoked)):
            while not self.peers[name].up:
                self.restart_peer()

    def works(self, turns: int) -> bool:
        """Whether a generation gets to work within ``turns`` without faults. Revoked members have stopped, the user says."""
        for turn in range(turns):
            self.now += 50
            self.random.choice((self.renew, self.knock, self.knock))()
            if turn % 100 == 99:  # the user reads what is lacking
                revoked = tuple(name for name in NAMES if f"key of {name}" in self.heads[0].roster.revoked)
                self.tell(self.heads[0], Excused(members=revoked, at_ns=self.now))
            for event in self.heads[0].roster.due(self.now):
                self.tell(self.heads[0], event)
            self.check()
            if self.live():
                return True
        return False

    # -- what must hold ------------------------------------------------------------------------------------------------

    def live(self) -> list[Generation]:
        """Generations that could agree on a step now: every member is at work for it, under the same self."""
        return [generation for generation in self.generations.values() if all(
            peer.up and peer.tenure.incarnation == incarnation and peer.tenure.may_work(generation, self.now)
            for name, incarnation in generation.members.items() for peer in (self.peers[name],))]

    def check(self) -> None:
        live = self.live()
        assert len(live) <= 1, f"two at work at once: {live}"
        for head in self.heads:
            roster = head.roster
            if roster.working and roster.generation and roster.generation.coordinator == head.token:
                for name, incarnation in roster.generation.members.items():
                    member = roster.members[name]
                    assert member.incarnation == incarnation and not member.absent and member.key not in roster.revoked

    def replays(self) -> None:
        for head in self.heads:
            assert replayed(head.events).durable() == head.roster.durable()


def replayed(events: list[bytes]) -> Roster:
    roster = Roster(patience=PATIENCE)
    for event in events:
        roster, _ = roster.after(msgspec.json.decode(event, type=Event))
    return roster


def walk(source: random.Random, turns: int = 120) -> Fleet:
    """Faults for so many turns, then none: safe throughout, alive in the end; each journal gives its coordinator's state."""
    fleet = Fleet(source)
    for _ in range(turns):
        fleet.turn()
    fleet.replays()
    fleet.calm()
    usable = [name for name in NAMES if f"key of {name}" not in fleet.heads[0].roster.revoked]
    assert fleet.works(600) or not usable, "all is well, and nobody works"
    return fleet


__all__ = ["NAMES", "PATIENCE", "Fleet", "Halt", "replayed", "walk"]
