"""The corpus as one long row of token ids per split, cut into overlapping sequences.

Shape legend: B samples, L sequence length. Every document is followed by the end token. Sequence ``i`` is tokens
``i*L`` to ``i*L + L`` inclusive: its first L are ``tokens``, its last L are ``targets``; neighbours share one token, so
every token but the first of a split is a target exactly once. A split of T tokens holds ``(T - 1) // L`` sequences.

On disk (a cache folder): ``train.bin`` and ``validation.bin`` (uint16, or uint32 for more than 65,536 ids), the
tokenizer, and ``facts.json``, which is written last.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from atoll.errors import DataError, DocumentError, WorkplaceError
from atoll.policies.data.order import held_out, samples_at
from atoll.policies.data.spec import DataSpec
from atoll.records import Record, load, save
from atoll.runtime.data.corpus import Corpus, Document, open_corpus
from atoll.runtime.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer

__all__ = ["SPLITS", "Packed", "PackedBatches", "PackedFacts", "compare", "open_packed", "prepare"]

SPLITS = ("train", "validation")
_FORMAT = 1
_BATCH_DOCUMENTS = 256


class SplitFacts(Record):
    """``digest``: SHA-256 of the token ids (as little-endian bytes)."""

    documents: int
    characters: int
    tokens: int
    digest: str


class PackedFacts(Record):
    """What the packed data is; equal on two machines exactly when they would train on the same tokens."""

    format: int
    vocabulary: int
    dtype: str
    tokenizer: str
    train: SplitFacts
    validation: SplitFacts

    @property
    def digest(self) -> str:
        text = f"{self.dtype} {self.tokenizer} {self.train.digest} {self.validation.digest}"
        return hashlib.sha256(text.encode()).hexdigest()


class Packed:
    """Packed data on disk, read through a memory map."""

    def __init__(self, folder: Path, facts: PackedFacts, tokenizer: Tokenizer) -> None:
        self.folder = folder
        self.facts = facts
        self.tokenizer = tokenizer
        self._tokens: dict[str, np.ndarray] = {
            split: np.memmap(folder / f"{split}.bin", dtype=facts.dtype, mode="r") if self.split(split).tokens
            else np.zeros(0, dtype=facts.dtype) for split in SPLITS}

    def split(self, split: str) -> SplitFacts:
        return self.facts.train if split == "train" else self.facts.validation

    def tokens(self, split: str) -> np.ndarray:
        return self._tokens[split]

    def sequences(self, split: str, sequence_length: int) -> int:
        return max(0, self.split(split).tokens - 1) // sequence_length

    def check_length(self, sequence_length: int, validation: float) -> None:
        """Raise ``DataError`` when a split that is asked for holds no whole sequence."""
        for split in SPLITS if validation > 0 else SPLITS[:1]:
            if self.sequences(split, sequence_length) < 1:
                noun = "the training split" if split == "train" else "the validation split"
                remedy = "" if split == "train" else ", raise data.validation (0: none)"
                raise DataError(f"job.sequence_length is {sequence_length}, but {noun} has only "
                                f"{self.split(split).tokens} tokens "
                                f"in {self.split(split).documents} document(s), and one sequence needs "
                                f"{sequence_length + 1}; "
                                f"shorten the sequence{remedy} or add text")


def prepare(spec: DataSpec, sequence_length: int, cache: str | os.PathLike[str], *, base: str | os.PathLike[str] = ".",
            tokenizer: Tokenizer | None = None) -> Packed:
    """Tokenize and pack the corpus of ``spec``, or open what an earlier call left in the folder ``cache``.

    ``base``: what relative paths in ``spec`` count from. ``tokenizer``: use this one (the head's) instead of making it.
    Several processes may call at once: one works, the others wait and open. Raises ``DataError`` (see ``corpus``) and
    ``WorkplaceError`` when the disk is full.
    """
    corpus = open_corpus(spec, base)
    parts = f"{_FORMAT} {corpus.fingerprint} {_tokenizer_key(spec, base, tokenizer)}"
    key = hashlib.sha256(parts.encode()).hexdigest()[:24]
    folder = Path(cache) / key
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent / f".{key}.lock"):
            packed = _open_if_whole(folder)
            if packed is None:
                _build(corpus, tokenizer or make_tokenizer(spec.tokenizer, _texts(corpus), base), folder)
                packed = open_packed(folder)
                with _taken_back(folder):
                    packed.check_length(sequence_length, spec.validation)
    except OSError as error:
        _forget(folder)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WorkplaceError(f"packing the corpus into {folder.parent}: the disk is full; free space there or use "
                                 "another folder") from None
        raise WorkplaceError(f"packing the corpus into {folder.parent}: {error.strerror or error}") from None
    packed.check_length(sequence_length, spec.validation)
    return packed


@contextlib.contextmanager
def _taken_back(folder: Path) -> Iterator[None]:
    """Data that turn out to be of no use leave nothing behind."""
    try:
        yield
    except DataError:
        _forget(folder)
        raise


def _forget(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        (folder.parent / f".{folder.name}.lock").unlink()
        folder.parent.rmdir()  # only when nothing else is in it


def _texts(corpus: Corpus) -> Iterator[str]:
    return (document.text for document in corpus.training())


def _tokenizer_key(spec: DataSpec, base: str | os.PathLike[str], tokenizer: Tokenizer | None) -> str:
    """What besides the corpus decides the ids: a given tokenizer, or the content of the one at a path."""
    if tokenizer is None and spec.tokenizer.kind == "path":
        tokenizer = make_tokenizer(spec.tokenizer, (), base)
    return tokenizer.digest if tokenizer is not None else "made"


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold an advisory lock on ``path`` where the system has them (without: work may be done twice, never wrong)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_if_whole(folder: Path) -> Packed | None:
    try:
        return open_packed(folder)
    except DataError:
        return None


def open_packed(folder: str | os.PathLike[str], *, verify: bool = False) -> Packed:
    """Open a folder that ``prepare`` made. ``verify``: read all tokens and compare digests, not sizes alone.

    Raises ``DataError`` when it is missing, of another version or damaged.
    """
    folder = Path(folder)
    try:
        facts = load(folder / "facts.json", PackedFacts)
    except DocumentError as error:
        raise DataError(f"packed data in {folder} cannot be used: {error}") from None
    if facts.format != _FORMAT:
        raise DataError(f"packed data in {folder} has format {facts.format}, expected {_FORMAT}; remove the folder")
    for split, part in zip(SPLITS, (facts.train, facts.validation), strict=True):
        file = folder / f"{split}.bin"
        expected = part.tokens * np.dtype(facts.dtype).itemsize
        found = file.stat().st_size if file.is_file() else -1
        if found != expected:
            raise DataError(f"packed data: {file} has {max(found, 0)} bytes, expected {expected}; remove the folder")
        if verify and _digest_file(file) != part.digest:
            raise DataError(f"packed data: {file} has changed since it was written; remove the folder")
    return Packed(folder, facts, load_tokenizer(folder))


def _digest_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the packed folder under another name, then give it its own: a reader never sees half of it."""
    shutil.rmtree(folder, ignore_errors=True)
    for stray in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(stray, ignore_errors=True)
    temporary = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    temporary.mkdir(parents=True)
    try:
        dtype = np.dtype("<u2" if tokenizer.size <= 1 << 16 else "<u4")
        train, validation = _write_tokens(corpus, tokenizer, temporary, dtype)
        tokenizer.save(temporary)
        save(temporary / "facts.json", PackedFacts(
            format=_FORMAT, vocabulary=tokenizer.size, dtype=dtype.name, tokenizer=tokenizer.digest,
            train=train, validation=validation))
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_tokens(corpus: Corpus, tokenizer: Tokenizer, folder: Path, dtype: np.dtype) -> tuple[SplitFacts, SplitFacts]:
    end = np.full(1, tokenizer.end, dtype=dtype)
    counts = {split: [0, 0, 0] for split in SPLITS}
    states = {split: hashlib.sha256() for split in SPLITS}
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context(open(folder / f"{split}.bin", "wb")) for split in SPLITS}
        documents = corpus.documents()
        while batch := list(islice(documents, _BATCH_DOCUMENTS)):
            encoded = tokenizer.encode_all([document.text for document in batch])
            for split in SPLITS:
                chosen = [(document, ids) for document, ids in zip(batch, encoded, strict=True)
                          if _split_of(corpus, document) == split]
                if not chosen:
                    continue
                row = np.concatenate([part for _, ids in chosen for part in (ids.astype(dtype), end)])
                files[split].write(row.data)
                states[split].update(row.data)
                count = counts[split]
                count[0] += len(chosen)
                count[1] += sum(len(document.text) for document, _ in chosen)
                count[2] += len(row)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    train, validation = (SplitFacts(documents=counts[split][0], characters=counts[split][1], tokens=counts[split][2],
                                    digest=states[split].hexdigest()) for split in SPLITS)
    return train, validation


def _split_of(corpus: Corpus, document: Document) -> str:
    return "validation" if corpus.held_out(document.name) else "train"


def compare(own: PackedFacts, head: PackedFacts, machine: str) -> None:
    """Raise ``DataError`` when ``machine``'s packed data is not the head's: names the machine and all that differs."""
    if own.digest == head.digest:
        return
    differences = []
    for split in SPLITS:
        mine, theirs = (getattr(facts, split) for facts in (own, head))
        for field in ("documents", "characters", "tokens"):
            if getattr(mine, field) != getattr(theirs, field):
                differences.append(f"{split} {field} {getattr(mine, field)} instead of {getattr(theirs, field)}")
        if mine.digest != theirs.digest and not any(line.startswith(split) for line in differences):
            differences.append(f"{split} token ids differ")
    if own.tokenizer != head.tokenizer:
        differences.insert(0, f"tokenizer {own.tokenizer[:12]} instead of {head.tokenizer[:12]}")
    if own.dtype != head.dtype:
        differences.append(f"dtype {own.dtype} instead of {head.dtype}")
    raise DataError(f"machine {machine} has other data than the head: {'; '.join(differences)}; give it the same files "
                    "(for 'stdlib': the same version of Python)")


class PackedBatches:
    """The ``Batches`` of ``runtime.world`` over packed data: a function of (split, step, sample), no state."""

    def __init__(self, packed: Packed, *, seed: int, global_batch: int, sequence_length: int) -> None:
        self.packed = packed
        self.seed = seed
        self.global_batch = global_batch
        self.sequence_length = sequence_length

    def sequences(self, split: str) -> int:
        return self.packed.sequences(split, self.sequence_length)

    def ids(self, split: str, step: int, first: int, samples: int) -> tuple[int, ...]:
        """Sequence ids of samples ``first``.. of ``step`` (of the validation split: of no step)."""
        total = self.sequences(split)
        if total < 1:
            raise DataError(f"the {split} split has {self.packed.split(split).tokens} tokens, not one sequence of "
                            f"{self.sequence_length}")
        if split == "validation":
            return held_out(first, samples, total)
        return samples_at(self.seed, step * self.global_batch + first, samples, total)

    def microbatch(self, split: str, step: int, first: int, samples: int) -> dict[str, torch.Tensor]:
        """``tokens`` and ``targets``, both int64 (B, L), for samples ``first`` .. ``first + samples`` of the step."""
        row, length = self.packed.tokens(split), self.sequence_length
        both = np.empty((samples, length + 1), dtype=np.int64)
        for place, sequence in enumerate(self.ids(split, step, first, samples)):
            both[place] = row[sequence * length:sequence * length + length + 1]
        whole = torch.from_numpy(both)
        return {"tokens": whole[:, :-1].contiguous(), "targets": whole[:, 1:].contiguous()}
