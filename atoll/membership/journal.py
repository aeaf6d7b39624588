"""The coordinator's memory: every event of a run, in order, in one SQLite file that may be killed at any byte."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import TracebackType

import msgspec

from atoll.errors import MembershipError
from atoll.membership.events import Event
from atoll.membership.roster import Patience, Roster

__all__ = ["Journal"]

_FORMAT = 1
_TABLES = """
create table if not exists about (format integer not null, run text not null, patience text not null);
create table if not exists events (number integer primary key, event text not null);
"""


class Journal:
    """Use as a context manager. Events are on disk when ``append`` returns (write-ahead log, synchronous), so tell nobody of
    what follows from an event before. A torn write is undone by SQLite when the file is opened again.

    Raises ``MembershipError``: the file is another run's, of another format, in use by another coordinator, or no journal.
    """

    def __init__(self, path: Path, run: str, patience: Patience) -> None:
        self.path = path
        try:
            self._database = sqlite3.connect(path, isolation_level=None, timeout=1.0)
            self._database.execute("pragma locking_mode = exclusive")  # two coordinators must not share a memory
            self._database.execute("pragma journal_mode = wal")
            self._database.execute("pragma synchronous = full")
            self._database.execute("begin immediate")
            for statement in filter(str.strip, _TABLES.split(";")):
                self._database.execute(statement)
            about = self._database.execute("select format, run, patience from about").fetchone()
            if about is None:
                about = (_FORMAT, run, msgspec.json.encode(patience).decode())
                self._database.execute("insert into about values (?, ?, ?)", about)
            self._database.execute("commit")
        except sqlite3.OperationalError as error:
            raise MembershipError(f"{path}: the journal cannot be used: {error}; end the other coordinator of this run, or "
                                  "give another folder") from None
        except sqlite3.DatabaseError as error:
            raise MembershipError(f"{path}: this is no journal: {error}; give another folder, or restore the file") from None
        if about[:2] != (_FORMAT, run):
            self._database.close()
            raise MembershipError(f"{path}: the journal of run {about[1]}, format {about[0]}; this is run {run}, format "
                                  f"{_FORMAT}; give each run its own folder")
        self.patience = msgspec.json.decode(about[2], type=Patience)

    def append(self, *events: Event) -> None:
        """All of them or none."""
        self._database.execute("begin")
        self._database.executemany("insert into events (event) values (?)",
                                   [(msgspec.json.encode(event).decode(),) for event in events])
        self._database.execute("commit")

    def events(self) -> list[Event]:
        """Raises ``MembershipError`` naming the event that cannot be read."""
        found: list[Event] = []
        for number, text in self._database.execute("select number, event from events order by number"):
            try:
                found.append(msgspec.json.decode(text, type=Event))
            except msgspec.MsgspecError as error:
                raise MembershipError(f"{self.path}: event {number} cannot be read: {error}; the file is damaged, restore it "
                                      "or begin a new run from the last checkpoint") from None
        return found

    def roster(self) -> Roster:
        """The state after all events."""
        state = Roster(patience=self.patience)
        for event in self.events():
            state, _ = state.after(event)
        return state

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
