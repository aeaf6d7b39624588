"""The ledger of the samples: which ids each step used, one JSON line a step, only ever appended to.

A line is ``{"step", "first", "digest", "ids"}``: position of the step's first sample in the training stream, a digest
of its ids and the ids themselves (null beyond ``IDS_KEPT``: they follow from the order, the digest proves it). A run
that resumes writes ``{"rewound_to": step}``: later lines of steps from there on replace the earlier ones, which stay
to be seen as work that was lost. The first line says of what: ``{"seed", "global_batch", "sequences"}``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from atoll.errors import DataError, DocumentError
from atoll.policies.data.order import samples
from atoll.records import Record, from_plain, to_plain

__all__ = ["IDS_KEPT", "About", "Entry", "Ledger", "Proof", "about", "ids_digest", "prove",
           "read_ledger"]

IDS_KEPT = 1024


class About(Record):
    """What the order of a run's samples follows from; ``sequences``: how many the training split has."""

    seed: int
    global_batch: int
    sequences: int


class Entry(Record):
    step: int
    first: int
    digest: str
    ids: tuple[int, ...] | None


class Proof(Record):
    """``epochs``: whole epochs in which every id was met once. ``rest``: samples of the epoch begun, all different.
    ``rewound``: steps that were done again after a resume."""

    steps: int
    samples: int
    epochs: int
    rest: int
    rewound: int


def ids_digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:16]


class Ledger:
    """Appends steps. Every line reaches the operating system at once (a killed process loses none) and the disk every
    ``sync_every`` lines and on ``sync`` (call it with each checkpoint: a resumed run then misses none either)."""

    def __init__(self, path: str | os.PathLike[str], about: About, *, next_step: int = 0, sync_every: int = 64) -> None:
        self.path = Path(path)
        self._sync_every = sync_every
        self._unsynced = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        existing = self.path.read_bytes() if self.path.exists() else b""
        whole = existing[:existing.rfind(b"\n") + 1]
        self._file = open(self.path, "r+b" if existing else "w+b")  # noqa: SIM115 (held until close)
        self._file.truncate(len(whole))  # a line that a crash cut short was never part of the ledger
        self._file.seek(len(whole))
        self._write({"rewound_to": next_step} if whole else to_plain(about))

    def record(self, step: int, first: int, ids: Sequence[int]) -> None:
        kept = list(ids) if len(ids) <= IDS_KEPT else None
        self._write({"step": step, "first": first, "digest": ids_digest(ids), "ids": kept})

    def _write(self, line: dict[str, object]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self._unsynced += 1
        if self._unsynced >= self._sync_every:
            self.sync()

    def sync(self) -> None:
        os.fsync(self._file.fileno())
        self._unsynced = 0

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def read_ledger(path: str | os.PathLike[str]) -> tuple[tuple[Entry, ...], int]:
    """The entries that count, in order of steps, and how many were rewound. Raises ``DataError`` naming the line."""
    entries: list[Entry] = []
    rewound = 0
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line end was cut short
        try:
            plain = json.loads(line)
            if number == 1 and "sequences" in plain:
                continue
            if "rewound_to" in plain:
                kept = [entry for entry in entries if entry.step < plain["rewound_to"]]
                rewound += len(entries) - len(kept)
                entries = kept
                continue
            ids = plain["ids"]
            entry = Entry(step=plain["step"], first=plain["first"], digest=plain["digest"],
                          ids=None if ids is None else tuple(ids))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} line {number}: not a line of a sample ledger: {error!r}") from None
        if entry.ids is not None and ids_digest(entry.ids) != entry.digest:
            raise DataError(f"{path} line {number}: step {entry.step}: the ids do not match their digest")
        entries.append(entry)
    return tuple(entries), rewound


def about(path: str | os.PathLike[str]) -> About:
    """The first line. Raises ``DataError`` when it is none, ``FileNotFoundError``."""
    with open(path, "rb") as file:
        line = file.readline()
    try:
        return from_plain(json.loads(line), About, source=f"{path} line 1")
    except (ValueError, DocumentError):
        raise DataError(f"{path} line 1: expected what the ledger is about (seed, global_batch, sequences), found "
                        f"{line[:60].decode(errors='replace')!r}") from None


def prove(path: str | os.PathLike[str]) -> Proof:
    """Prove from the ledger that the run used each of its sequences exactly once per epoch, in order of steps.

    Ids in the ledger are counted as they stand; where only a digest was kept, the ids that (seed, step) give are
    counted after they matched it. Raises ``DataError`` naming the step and what is wrong.
    """
    said = about(path)
    seed, global_batch, total = said.seed, said.global_batch, said.sequences
    entries, rewound = read_ledger(path)
    seen: Counter[tuple[int, int]] = Counter()
    position = 0
    for number, entry in enumerate(entries):
        if entry.step != number or entry.first != position:
            raise DataError(f"{path}: found step {entry.step} at position {entry.first}, expected step {number} at "
                            f"{position}")
        ids = entry.ids if entry.ids is not None else samples(seed, entry.step, global_batch, total)
        if ids_digest(ids) != entry.digest:
            raise DataError(f"{path}: step {entry.step}: the digest is not that of the ids that seed {seed} gives")
        for offset, sample in enumerate(ids):
            if not 0 <= sample < total:
                raise DataError(f"{path}: step {entry.step}: sample {sample} is not one of the {total} sequences")
            epoch = (position + offset) // total
            seen[epoch, sample] += 1
            if seen[epoch, sample] > 1:
                raise DataError(f"{path}: step {entry.step}: sample {sample} came twice in epoch {epoch}")
        position += len(ids)
    epochs, rest = divmod(position, total)
    return Proof(steps=len(entries), samples=position, epochs=epochs, rest=rest, rewound=rewound)
