"""Who belongs to a run: safe and alive in any order of events; what people are told; a journal that survives anything."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import MembershipError
from atoll.membership import roster as rules
from atoll.membership.events import (
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
    Knocked,
    Left,
    Lost,
    Opened,
    Propose,
    Readied,
    Refuse,
    Release,
    Revoked,
    Start,
)
from atoll.membership.journal import Journal
from atoll.membership.roster import Patience, Roster
from atoll.membership.tenure import Tenure
from tests.fleet import walk

pytestmark = pytest.mark.null

PATIENCE = Patience(lease_ns=100, ready_ns=50)


def told(roster: Roster, *events: Event) -> tuple[Roster, list[Action]]:
    actions: list[Action] = []
    for event in events:
        roster, more = roster.after(event)
        actions += more
    return roster, actions


def opened(patience: Patience = PATIENCE) -> Roster:
    return told(Roster(patience=patience), Opened(term=1, coordinator="c", at_ns=0))[0]


def knocks(names: Iterable[str], at_ns: int = 1) -> list[Event]:
    return [Knocked(member=name, key=f"key {name}", incarnation=1, at_ns=at_ns) for name in names]


def ready(roster: Roster, at_ns: int = 3, **steps: int) -> list[Event]:
    assert roster.forming is not None
    return [Readied(member=name, incarnation=roster.members[name].incarnation, generation=roster.forming.generation.number,
                    step=step, at_ns=at_ns) for name, step in steps.items()]


def working(names: str) -> Roster:
    roster, _ = told(opened(), *knocks(names), Chosen(members=tuple(names), at_ns=2))
    roster, actions = told(roster, *ready(roster, **dict.fromkeys(names, 0)))
    assert isinstance(actions[-1], Start) and roster.working
    return roster


def one(actions: list[Action], kind: type) -> Action:
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__} in {actions}"
    return found[0]


# -- any order of events -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(6))
def test_walks_through_faults(block: int) -> None:
    fleets = [walk(random.Random(seed)) for seed in range(100 * block, 100 * block + 100)]
    assert sum(fleet.started for fleet in fleets) > 100 and sum(len(fleet.history) for fleet in fleets) > 300


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**64), st.integers(0, 200))
def test_walks_that_shrink(seed: int, turns: int) -> None:
    walk(random.Random(seed), turns)


def _no_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roster, "_short", lambda self, left: "")


def _endless_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tenure, "may_work", lambda self, generation, now_ns: self.began == generation and not self.promised)


def _no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tenure, "may_work", lambda self, generation, now_ns: (self.began == generation
                                                                               and now_ns < self.until_ns))


def _learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Roster, "_learning", lambda self, event: self)


def _half_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Roster._short
    monkeypatch.setattr(Roster, "_short", lambda self, left: real(rules._replace(self, heir=True), left))


@pytest.mark.parametrize(("weaken", "seeds"), [
    (_no_quorum, range(500)), (_no_promise, range(500)), (_learns_nothing, range(500)), (_half_for_all, range(500)),
    (_endless_lease, range(2500, 3000))])  # one in thousands finds that
def test_each_rule_is_needed(weaken: Callable[[pytest.MonkeyPatch], None], seeds: range,
                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of them, a walk finds two generations at work, or none for ever."""
    weaken(monkeypatch)
    with pytest.raises(AssertionError, match=r"two at work|nobody works"):
        for seed in seeds:
            walk(random.Random(seed))


# -- what people are told ------------------------------------------------------------------------------------------------


def test_a_run_begins_when_enough_are_here() -> None:
    roster, actions = told(opened(Patience(lease_ns=100, ready_ns=50, least=2)), *knocks("a"))
    assert one(actions, Admit) == Admit(member="a", incarnation=1, term=1, last=None, working=False)
    assert roster.lacking() == "1 members are here, at least 2 are wanted"
    roster, actions = told(roster, *knocks("b"))
    assert one(actions, Choose) == Choose(candidates=("a", "b"), urgent=True, because="b is here")
    roster, actions = told(roster, Chosen(members=("a", "b"), at_ns=2))
    proposed = one(actions, Propose)
    assert isinstance(proposed, Propose) and proposed.to == ("a", "b") and proposed.generation.called == "generation 1.1"
    roster, actions = told(roster, *ready(roster, a=7))
    assert not actions and not roster.working
    roster, actions = told(roster, *ready(roster, b=6))
    assert one(actions, Start) == Start(generation=proposed.generation, step=7, holders=("a",)) and roster.committed == 7


def test_a_loss_halts_and_asks_who_goes_on() -> None:
    roster, actions = told(working("abc"),
                           Lost(member="b", incarnation=1, cause="killed (signal 9)", certain=True, at_ns=9))
    assert one(actions, Halt) == Halt(generation=1_000_001, at_boundary=False, because="b is lost: killed (signal 9)")
    assert one(actions, Choose) == Choose(candidates=("a", "c"), urgent=True, because="b is lost: killed (signal 9)")
    assert not told(roster, Committed(generation=1_000_001, step=1, at_ns=9))[0].working


def test_silence_ends_a_lease_and_a_returned_machine_is_taken_at_once() -> None:
    roster = working("ab")
    roster, _ = roster.heard("a", 1, 90)
    assert not roster.due(100)
    (lost,) = roster.due(101)
    assert lost == Lost(member="b", incarnation=1, cause="silent", certain=False, at_ns=101)
    roster, actions = told(roster, lost)
    assert one(actions, Choose) == Choose(candidates=("a",), urgent=True, because="b is lost: silent"), "half will do at home"
    _, actions = roster.heard("b", 1, 102)
    assert one(list(actions), Fence) == Fence(member="b", incarnation=1, reason="b: silent; join again")
    roster, actions = told(roster, Knocked(member="b", key="key b", incarnation=2, at_ns=103))
    assert one(actions, Admit) == Admit(member="b", incarnation=2, term=1, last=roster.generation, working=False)
    assert one(actions, Choose) == Choose(candidates=("a", "b"), urgent=True, because="b came back")


def test_less_than_half_must_wait_and_the_users_word_helps() -> None:
    roster, actions = told(working("abcde"), *(Lost(member=name, incarnation=1, cause="silent", certain=False, at_ns=9)
                                                for name in "bcd"))
    assert roster.lacking() == ("only 2 of 5 members of generation 1.1 are here, and b, c, d may go on elsewhere; bring some "
                                "of them back, or say that they have stopped")
    _, actions = told(roster, Excused(members=("b",), at_ns=10))
    assert one(actions, Choose) == Choose(candidates=("a", "e"), urgent=True, because="members were said to have stopped")


def test_who_is_not_ready_in_time_is_left_out() -> None:
    roster, _ = told(opened(), *knocks("ab"), Chosen(members=("a", "b"), at_ns=2))
    roster, _ = told(roster, *ready(roster, a=0))
    (lost,) = roster.due(52)
    roster, actions = told(roster, lost)
    assert one(actions, Choose) == Choose(candidates=("a",), urgent=True, because="b is lost: not ready in time")


def test_a_newcomer_is_a_question_and_a_drained_member_is_released_when_the_next_generation_works() -> None:
    roster, actions = told(working("ab"), *knocks("n", at_ns=5))
    assert one(actions, Choose) == Choose(candidates=("a", "b", "n"), urgent=False, because="n is here") and roster.working
    roster, actions = told(roster, DrainAsked(member="a", at_ns=6))
    assert one(actions, Choose) == Choose(candidates=("b", "n"), urgent=False, because="a wants to leave")
    roster, actions = told(roster, Chosen(members=("b", "n"), at_ns=7))
    assert one(actions, Halt) == Halt(generation=1_000_001, at_boundary=True, because="generation 1.2 follows")
    assert one(actions, Propose).to == ("a", "b", "n")  # type: ignore[attr-defined]
    roster, actions = told(roster, *ready(roster, b=4, n=0))
    assert one(actions, Release) == Release(member="a")
    assert one(actions, Start).holders == ("b",)  # type: ignore[attr-defined]
    _, actions = told(roster, Left(member="a", incarnation=1, at_ns=8))
    assert not any(isinstance(action, Halt) for action in actions), "nobody misses it"


@pytest.mark.parametrize(("event", "reason"), [
    (Knocked(member="a", key="stranger", incarnation=1, at_ns=9), "the name a belongs to another key"),
    (Knocked(member="z", key="key a", incarnation=1, at_ns=9), "this key belongs to another name"),
    (Knocked(member="a", key="key a", incarnation=0, at_ns=9), "a later self of it has come"),
    (Knocked(member="r", key="key r", incarnation=1, at_ns=9), "the key was revoked"),
])
def test_refused_with_the_reason(event: Knocked, reason: str) -> None:
    roster, _ = told(working("ab"), Revoked(key="key r", at_ns=4))
    after, actions = told(roster, event)
    assert reason in one(actions, Refuse).reason and after == roster  # type: ignore[attr-defined]


def test_a_revoked_key_is_fenced_at_once() -> None:
    roster, actions = told(working("abc"), Revoked(key="key b", at_ns=9))
    assert one(actions, Fence) == Fence(member="b", incarnation=1, reason="the key was revoked")
    assert one(actions, Halt).because == "the key of b was revoked"  # type: ignore[attr-defined]
    assert "b" not in roster.present


def test_what_the_past_says_changes_nothing() -> None:
    roster = working("ab")
    roster, _ = told(roster, Committed(generation=1_000_001, step=1, at_ns=5))
    for late in (Committed(generation=1_000_001, step=1, at_ns=6), Committed(generation=1_000_000, step=2, at_ns=6),
                 Committed(generation=1_000_001, step=3, at_ns=6),
                 Lost(member="a", incarnation=0, cause="killed", certain=True, at_ns=6),
                 Readied(member="a", incarnation=1, generation=1_000_001, step=9, at_ns=6)):
        assert told(roster, late) == (roster, [])


def test_a_restarted_coordinator_lets_the_work_go_on() -> None:
    roster, actions = told(working("ab"), Opened(term=2, coordinator="c", at_ns=50))
    assert roster.working and not actions and not roster.due(149)
    assert roster.lacking() == "0 members are here, at least 1 are wanted"
    roster, actions = told(roster, *knocks("ab", at_ns=60))
    assert roster.working and one(actions[:1], Admit).working, "they are told to go on"  # type: ignore[attr-defined]
    assert [type(event).__name__ for event in roster.due(150)] == ["Settled"]


def test_an_old_copy_learns_what_began_since() -> None:
    """It was taken when a and b were at work; c and d have replaced them since. a alone comes to it."""
    since = Generation(number=1_000_002, coordinator="c", members={"c": 1, "d": 1})
    roster, _ = told(working("ab"), Opened(term=2, coordinator="other", at_ns=50), *knocks("b", at_ns=51))
    roster, actions = told(roster, Knocked(member="a", key="key a", incarnation=1, promised=since, at_ns=52))
    roster, actions = told(roster, *roster.due(150))
    assert not any(isinstance(action, Choose) for action in actions)
    assert "of generation 1.2 are here, and c, d may go on elsewhere" in told(
        roster, *knocks("ab", at_ns=151))[0].lacking()


def test_events_before_the_first_coordinator_and_an_earlier_term_are_no_history() -> None:
    with pytest.raises(MembershipError, match="before any coordinator"):
        Roster(patience=PATIENCE).after(knocks("a")[0])
    with pytest.raises(MembershipError, match="another coordinator took over"):
        opened().after(Opened(term=1, coordinator="c", at_ns=9))


# -- a member's side -----------------------------------------------------------------------------------------------------


def test_a_tenure_ends_by_its_own_clock_and_obeys_the_later_term() -> None:
    first, second = (Generation(number=number, coordinator="c", members={"a": 1}) for number in (1_000_001, 1_000_002))
    tenure = Tenure(lease_ns=100).reborn().admitted(1, "c", None, 10)
    assert (tenure.incarnation, tenure.follows(1, "other"), tenure.follows(2, "other")) == (1, False, True)
    promised = tenure.ready(first)
    assert promised is not None and not promised.may_work(first, 20), "ready is not begun"
    at_work = promised.started(first)
    assert at_work.may_work(first, 109) and not at_work.may_work(first, 110)
    assert at_work.confirmed(1, "c", 60).may_work(first, 159) and at_work.confirmed(1, "other", 60) == at_work
    leaving = at_work.ready(second)
    assert leaving is not None and not leaving.may_work(first, 20) and leaving.ready(first) is None
    assert not at_work.admitted(2, "d", second, 30).may_work(first, 40), "the new lease is not for the old work"
    assert not at_work.reborn().may_work(first, 20)


# -- the journal ---------------------------------------------------------------------------------------------------------


EVENTS = [Opened(term=1, coordinator="c", at_ns=0), *knocks("ab"), Chosen(members=("a", "b"), at_ns=2),
          *(Readied(member=name, incarnation=1, generation=1_000_001, step=0, at_ns=3) for name in "ab"),
          *(Committed(generation=1_000_001, step=step, at_ns=3 + step) for step in range(1, 20))]


def test_the_journal_gives_the_state_back(tmp_path: Path) -> None:
    expected, _ = told(Roster(patience=PATIENCE), *EVENTS)
    with Journal(tmp_path / "journal", "run", PATIENCE) as journal:
        for event in EVENTS:
            journal.append(event)
        assert journal.roster() == expected
    with Journal(tmp_path / "journal", "run", Patience(lease_ns=1, ready_ns=1)) as journal:
        assert journal.events() == EVENTS and journal.roster() == expected, "patience is the run's, not the restart's"


def test_a_journal_killed_at_any_byte_is_a_beginning_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, "run", PATIENCE) as journal:
        for event in EVENTS:
            journal.append(event)
        shutil.copy(path, tmp_path / "copy")
        log = (tmp_path / "journal-wal").read_bytes()
    seen = set()
    for length in sorted({*range(0, len(log), 997), *range(len(log) - 40, len(log) + 1)}):
        broken = tmp_path / f"at{length}"
        shutil.copy(tmp_path / "copy", broken)
        (tmp_path / f"at{length}-wal").write_bytes(log[:length])
        with Journal(broken, "run", PATIENCE) as journal:
            events = journal.events()
        assert events == EVENTS[:len(events)]
        seen.add(len(events))
    assert max(seen) == len(EVENTS) and len(seen) > 10


def test_a_journal_is_one_runs_and_one_coordinators(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with Journal(path, "run", PATIENCE), pytest.raises(MembershipError, match="end the other coordinator"):
        Journal(path, "run", PATIENCE)
    with pytest.raises(MembershipError, match="the journal of run run, format 1; this is run other"):
        Journal(path, "other", PATIENCE)
    (tmp_path / "text").write_text("not a database, and long enough to be seen as none " * 40)
    with pytest.raises(MembershipError, match="this is no journal"):
        Journal(tmp_path / "text", "run", PATIENCE)


def test_a_damaged_event_is_named(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", "run", PATIENCE) as journal:
        journal.append(*EVENTS[:2])
        journal._database.execute("""insert into events (event) values ('{"type": "Knocked", "member": 3}')""")
        with pytest.raises(MembershipError, match="event 3 cannot be read"):
            journal.events()
