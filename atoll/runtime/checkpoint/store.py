"""The checkpoint store: a folder of ``step-00000100/`` folders, each shards plus a manifest.

Two phases. Every worker writes its shard (``shards.write_shard``) and reports a ``ShardEntry``; one of them collects
the entries and calls ``finish``, which checks that they cover every tensor and writes ``manifest.json`` last: only the
manifest makes the checkpoint exist. State is addressed by logical name and index range, never by rank, so what was
saved under one plan loads under any other.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch

from atoll.errors import CheckpointError, DocumentError
from atoll.graph.config import model_config
from atoll.plan.job import Job
from atoll.records import Record, from_plain, to_json, to_plain, write_atomically
from atoll.runtime.checkpoint.shards import (
    ShardEntry,
    TensorEntry,
    disk_error,
    read_flat,
    read_whole,
    step_folder,
    sync_folder,
    verify_shard,
)

__all__ = ["Checkpoint", "Facts", "Manifest", "clean", "finish", "job_facts", "open_checkpoint", "open_latest", "steps"]

SCHEMA = "atoll-checkpoint/1"
MANIFEST = "manifest.json"
JOB_FIELDS = ("model", "data", "sequence_length", "global_batch", "seed", "precision", "optimizer")


class Facts(Record):
    """Where the run stood.

    ``step``: steps done (the next one has this number, steps count from 0). ``updates``: optimizer updates done (a step
    that was not committed does none). ``tokens``: trained on so far. ``position``: of the next sample in the training
    stream. ``extra``: whatever else the run wants back.
    """

    job: dict[str, Any]
    step: int
    updates: int
    tokens: int
    position: int
    extra: dict[str, Any] = {}


class Manifest(Record):
    """``seal``: SHA-256 of the manifest itself with an empty seal."""

    schema: str
    job_digest: str
    facts: Facts
    shards: tuple[ShardEntry, ...]
    seal: str = ""

    def sealed(self) -> Manifest:
        return msgspec.structs.replace(self, seal=_seal(self))


def _seal(manifest: Manifest) -> str:
    plain = to_plain(manifest)
    plain["seal"] = ""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def job_facts(job: Job, data_digest: str = "") -> dict[str, Any]:
    """The fields of a job that a checkpoint is bound to: what would change the curve. Not the plan, not its length.

    A known model is kept as its family and whole configuration, so that its folder may go and the checkpoint still says
    what it holds. ``data_digest``: of the packed data; with it the corpus may move to another path.
    """
    plain = to_plain(job)
    kept = {name: plain[name] for name in JOB_FIELDS}
    resolved = model_config(job.model)
    kept["model"] = ({"module": job.model.module, "arguments": plain["model"]["arguments"]} if resolved is None
                     else {"family": resolved[0], "config": resolved[1]})
    if data_digest:
        kept["data"] = {"digest": data_digest}
    facts: dict[str, Any] = json.loads(json.dumps(kept))  # as it reads back: lists, no tuples
    return facts


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [line for name in sorted({*old, *new})
                for line in _differences(old.get(name), new.get(name), f"{path}.{name}" if path else name)]
    return [] if old == new else [f"{path} ({old!r} in the checkpoint, {new!r} in the job)"]


def steps(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Steps with a manifest below ``folder``, newest first; whether they are sound is not looked at."""
    found = [int(match.group(1)) for path in Path(folder).glob("step-*") if (path / MANIFEST).is_file()
             and (match := re.fullmatch(r"step-(\d{8,})", path.name))]
    return tuple(sorted(found, reverse=True))


def finish(folder: str | os.PathLike[str], step: int, entries: Sequence[ShardEntry], facts: Facts, *, keep: int = 2,
           expected: Iterable[str] = ()) -> Manifest:
    """Make the checkpoint of ``step`` exist, then remove all but it and the newest before it, ``keep`` in all.

    Later ones go too: the run that went on from an earlier checkpoint has left their course.
    ``expected``: logical names that must be there (parameters and moments). Raises ``CheckpointError`` when a tensor is
    not covered or a shard is not in ``folder``, ``WorkplaceError`` when the disk is full; older checkpoints then stay.
    """
    target = step_folder(folder, step)
    _check_cover(step, entries, expected)
    for entry in entries:
        path = target / entry.file
        if not path.is_file() or path.stat().st_size != entry.size_bytes:
            raise CheckpointError(f"checkpoint of step {step}: the shard {entry.file} of worker {entry.worker} is not "
                                  f"in {target}; "
                                  "the folder must be shared, or the shard handed over before finishing")
    draft = Manifest(schema=SCHEMA, job_digest=_digest(facts.job), facts=facts, shards=tuple(entries))
    manifest = draft.sealed()
    try:
        write_atomically(target / MANIFEST, to_json(manifest))
        sync_folder(target)
        sync_folder(Path(folder))
    except OSError as error:
        raise disk_error(error, target, step) from None
    _prune(Path(folder), step, max(1, keep), {entry.file for entry in entries})
    return manifest


def _check_cover(step: int, entries: Sequence[ShardEntry], expected: Iterable[str]) -> None:
    """Every name is whole over all shards, with one shape and dtype."""
    pieces: dict[str, list[TensorEntry]] = {}
    for shard in entries:
        for entry in shard.tensors:
            pieces.setdefault(entry.name, []).append(entry)
    for name in expected:
        if name not in pieces:
            raise CheckpointError(f"checkpoint of step {step}: no worker saved {name}")
    for name, parts in pieces.items():
        if len({(part.shape, part.dtype) for part in parts}) > 1:
            raise CheckpointError(f"checkpoint of step {step}: workers saved {name} with different shapes or dtypes")
        reached = 0
        for part in sorted(parts, key=lambda part: part.low):
            if part.low > reached:
                break
            reached = max(reached, part.high)
        if reached < prod(parts[0].shape):
            raise CheckpointError(f"checkpoint of step {step}: elements from {reached} of {name} were saved by no "
                                  "worker")


def _prune(folder: Path, step: int, keep: int, files: set[str]) -> None:
    for path in step_folder(folder, step).iterdir():
        if path.name != MANIFEST and path.name not in files:
            path.unlink(missing_ok=True)  # left by an earlier attempt at this step
    kept = [older for older in steps(folder) if older <= step][:keep]
    for other in steps(folder):
        if other not in kept:
            _remove(step_folder(folder, other))
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d{8,})", path.name)
        if match and int(match.group(1)) < step and not (path / MANIFEST).is_file():
            _remove(path)


def _remove(path: Path) -> None:
    (path / MANIFEST).unlink(missing_ok=True)  # first, so that it stops existing before it stops being whole
    shutil.rmtree(path, ignore_errors=True)


def clean(folder: str | os.PathLike[str]) -> None:
    """Remove what crashed attempts left behind. Call it when no worker writes: at the start of a run, by the head."""
    for path in Path(folder).glob("step-*"):
        if path.is_dir() and not (path / MANIFEST).is_file():
            _remove(path)
            continue
        for stray in path.glob(".*.tmp"):
            stray.unlink(missing_ok=True)


class Checkpoint:
    """A checkpoint to read from: tensors by logical name, whole or in part, whichever shards hold them.

    A shard's digest is checked before the first read from it. ``notes``: sentences for the user (what was skipped).
    """

    def __init__(self, folder: Path, manifest: Manifest, notes: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.manifest = manifest
        self.notes = notes
        self._verified: set[str] = set()
        self._holders: dict[str, list[tuple[ShardEntry, TensorEntry]]] = {}
        for shard in manifest.shards:
            for entry in shard.tensors:
                self._holders.setdefault(entry.name, []).append((shard, entry))

    @property
    def facts(self) -> Facts:
        return self.manifest.facts

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._holders))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._held(name)[0][1].shape

    def shards_of(self, names: Iterable[str]) -> tuple[ShardEntry, ...]:
        """The shards that must be at hand to read ``names`` (what a machine without the folder has to be sent)."""
        wanted = {shard.file: shard for name in names for shard, _ in self._held(name)}
        return tuple(wanted[file] for file in sorted(wanted))

    def problem(self) -> str | None:
        """What is wrong with the first unsound shard (a phrase), or None: reads everything once."""
        for shard in self.manifest.shards:
            if shard.file not in self._verified:
                wrong = verify_shard(self.folder / shard.file, shard)
                if wrong:
                    return wrong
                self._verified.add(shard.file)
        return None

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor in its shape. Raises ``CheckpointError`` for an unknown name or an unsound shard."""
        for shard, entry in self._held(name):
            if entry.whole:
                return read_whole(self._sound(shard), entry)
        shape = self.shape(name)
        return self.read_range(name, 0, prod(shape)).reshape(shape)

    def read_range(self, name: str, low: int, high: int) -> torch.Tensor:
        """Elements ``low``..``high`` of the flattened tensor; only the rows they lie in are read."""
        held = sorted(self._held(name), key=lambda item: (item[1].low, -item[1].high))
        if not 0 <= low <= high <= prod(self.shape(name)):
            raise CheckpointError(f"{self.folder}: {name} has {prod(self.shape(name))} elements, asked for "
                                  f"[{low}:{high}]")
        result = torch.empty(high - low, dtype=getattr(torch, held[0][1].dtype))
        reached = low
        for shard, entry in held:
            stop = min(high, entry.high)
            if entry.low <= reached < stop:
                result[reached - low:stop - low] = read_flat(self._sound(shard), entry, reached, stop)
                reached = stop
        if reached < high:
            raise CheckpointError(f"{self.folder}: elements from {reached} of {name} are in no shard")
        return result

    def _held(self, name: str) -> list[tuple[ShardEntry, TensorEntry]]:
        if name not in self._holders:
            raise CheckpointError(f"{self.folder}: there is no tensor {name!r} in this checkpoint")
        return self._holders[name]

    def _sound(self, shard: ShardEntry) -> Path:
        path = self.folder / shard.file
        if shard.file not in self._verified:
            wrong = verify_shard(path, shard)
            if wrong:
                raise CheckpointError(f"checkpoint {self.folder}: {wrong}; use an older one or copy the file again")
            self._verified.add(shard.file)
        return path


def open_checkpoint(folder: str | os.PathLike[str], job: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open one ``step-...`` folder. ``job``: the facts of the job that wants it (None: any).

    Raises ``CheckpointError`` when the manifest is missing or damaged, or the checkpoint is of another job (says which
    fields differ). Shards are checked when they are read.
    """
    folder = Path(folder)
    try:
        manifest = from_plain(json.loads((folder / MANIFEST).read_bytes()), Manifest, source=MANIFEST)
    except (OSError, ValueError, DocumentError) as error:
        raise CheckpointError(f"checkpoint {folder} has no sound manifest: {error}") from None
    if manifest.schema != SCHEMA:
        raise CheckpointError(f"checkpoint {folder} has schema {manifest.schema!r}, this version reads {SCHEMA!r}")
    if manifest.seal != _seal(manifest):
        raise CheckpointError(f"checkpoint {folder}: the manifest does not match its seal (bits have changed)")
    for shard in manifest.shards:
        if Path(shard.file).name != shard.file:
            raise CheckpointError(f"checkpoint {folder}: the manifest names {shard.file!r}, which is not a file of its "
                                  "folder")
    if job is not None and manifest.job_digest != _digest(job):
        wrong = "; ".join(_differences(manifest.facts.job, dict(job)))
        raise OtherJobError(f"checkpoint {folder} is of another job: {wrong}; set these fields back, or start in "
                            "another run folder")
    return Checkpoint(folder, manifest)


class OtherJobError(CheckpointError):
    """The checkpoint is sound but of another job."""


def open_latest(folder: str | os.PathLike[str], job: Mapping[str, Any] | None = None) -> Checkpoint:
    """The newest sound checkpoint below ``folder``; what had to be skipped is said in its ``notes``.

    All its shards have been read and compared with their digests. Raises ``CheckpointError`` when there is none, when
    none is sound, or when the newest sound manifest is of another job (says which fields differ).
    """
    found = steps(folder)
    if not found:
        raise CheckpointError(f"there is no checkpoint in {folder}; train without resuming first")
    skipped: list[str] = []
    for step in found:
        try:
            checkpoint = open_checkpoint(step_folder(folder, step), job)
        except OtherJobError:
            raise
        except CheckpointError as error:
            skipped.append(f"checkpoint of step {step} is skipped: {error}")
            continue
        wrong = checkpoint.problem()
        if wrong is None:
            notes = (*skipped, f"the checkpoint of step {step} is used instead") if skipped else ()
            checkpoint.notes = notes
            return checkpoint
        skipped.append(f"checkpoint of step {step} is skipped: {wrong}")
    raise CheckpointError(f"no sound checkpoint in {folder}: {'; '.join(skipped)}")
