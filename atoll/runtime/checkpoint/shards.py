"""One shard: the tensors of one worker in one safetensors file, written and hashed in a single pass.

A tensor is kept under its logical name ("parameter/NAME", "moment1/NAME", ...). A shard may hold a flat index range of
it only; then its key carries the range: ``NAME[low:high]`` and the tensor in the file has one axis. The writer streams,
so that a shard can go to a file or over a link without a second copy in memory; the format is that of the
``safetensors`` library, which reads it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from atoll.errors import CheckpointError, WorkplaceError
from atoll.records import Record
from atoll.units import format_bytes

__all__ = ["Piece", "ShardEntry", "TensorEntry", "disk_error", "encode", "read_flat", "read_whole", "receive_shard",
           "shard_chunks", "step_folder", "verify_shard", "write_shard"]

CHUNK_BYTES = 4 << 20

_CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


class Piece:
    """Elements ``low`` to ``high`` (flat, row-major) of a logical tensor of ``shape``; ``tensor`` holds just these."""

    def __init__(self, tensor: torch.Tensor, shape: tuple[int, ...], low: int, high: int) -> None:
        if tensor.numel() != high - low or not 0 <= low <= high <= prod(shape):
            raise ValueError(f"a piece of {tensor.numel()} elements cannot be [{low}:{high}] of a tensor of shape "
                             f"{shape}")
        self.tensor, self.shape, self.low, self.high = tensor, shape, low, high


class TensorEntry(Record):
    """``shape``: of the whole logical tensor; ``low``/``high``: the flat range of it that the shard holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: int
    high: int

    @property
    def whole(self) -> bool:
        return self.low == 0 and self.high == prod(self.shape)

    @property
    def key(self) -> str:
        return self.name if self.whole else f"{self.name}[{self.low}:{self.high}]"


class ShardEntry(Record):
    """What a worker reports of its shard; goes into the manifest. ``file`` is named after its content."""

    worker: str
    file: str
    sha256: str
    size_bytes: int
    tensors: tuple[TensorEntry, ...]


def encode(tensors: Mapping[str, torch.Tensor | Piece]) -> tuple[tuple[TensorEntry, ...], Iterator[bytes | memoryview]]:
    """The entries and the bytes of a safetensors file of ``tensors``, a chunk at a time, tensors sorted by name.

    The tensors are read when their chunk is asked for and must not change until then.
    """
    pieces = {name: value if isinstance(value, Piece) else Piece(value, tuple(value.shape), 0, value.numel())
              for name, value in sorted(tensors.items())}
    entries = tuple(TensorEntry(name=name, shape=piece.shape, dtype=str(piece.tensor.dtype).removeprefix("torch."),
                                low=piece.low, high=piece.high) for name, piece in pieces.items())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry, piece in zip(entries, pieces.values(), strict=True):
        if piece.tensor.dtype not in _CODES:
            raise CheckpointError(f"checkpoint: {entry.name} has dtype {entry.dtype}; allowed: "
                                  f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _CODES)}")
        size = piece.tensor.numel() * piece.tensor.element_size()
        header[entry.key] = {"dtype": _CODES[piece.tensor.dtype], "data_offsets": [position, position + size],
                             "shape": list(piece.shape) if entry.whole else [piece.high - piece.low]}
        position += size
    return entries, _stream(header, list(pieces.values()))


def _stream(header: dict[str, object], pieces: list[Piece]) -> Iterator[bytes | memoryview]:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for piece in pieces:
        if piece.tensor.numel() == 0:
            continue
        flat = piece.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        view = flat.numpy().data
        for start in range(0, len(view), CHUNK_BYTES):
            yield view[start:start + CHUNK_BYTES]


def write_shard(folder: str | os.PathLike[str], step: int, worker: str,
                tensors: Mapping[str, torch.Tensor | Piece]) -> ShardEntry:
    """Write the shard of ``worker`` for ``step`` below ``folder``; only ``finish`` makes the checkpoint exist.

    Temporary file, fsync, rename. Raises ``WorkplaceError`` when the disk is full; then nothing of it stays behind.
    """
    entries, chunks = encode(tensors)
    digest, size = _write(folder, step, worker, chunks, None)
    return ShardEntry(worker=worker, file=_shard_name(worker, digest), sha256=digest, size_bytes=size, tensors=entries)


def receive_shard(folder: str | os.PathLike[str], step: int, entry: ShardEntry,
                  chunks: Iterable[bytes | memoryview]) -> ShardEntry:
    """Write a shard that arrives over a link (``shard_chunks`` of the other side) and check it against ``entry``.

    Raises ``CheckpointError`` when it is not, ``WorkplaceError`` when the disk is full.
    """
    if entry.file != _shard_name(entry.worker, entry.sha256):
        raise CheckpointError(f"checkpoint of step {step}: worker {entry.worker} names its shard {entry.file!r}, which "
                              "is not the "
                              "name that its content gives")
    _write(folder, step, entry.worker, chunks, entry)
    return entry


def shard_chunks(folder: str | os.PathLike[str], step: int, entry: ShardEntry) -> Iterator[bytes]:
    """The bytes of a shard on disk, for a link to carry."""
    with open(step_folder(folder, step) / entry.file, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _shard_name(worker: str, digest: str) -> str:
    """Named after the content, so that writing a step again never touches the file an existing manifest names."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', worker).lstrip('.') or '_'}-{digest[:12]}.safetensors"


def step_folder(folder: str | os.PathLike[str], step: int) -> Path:
    return Path(folder) / f"step-{step:08d}"


def _write(folder: str | os.PathLike[str], step: int, worker: str, chunks: Iterable[bytes | memoryview],
           expected: ShardEntry | None) -> tuple[str, int]:
    target = step_folder(folder, step)
    temporary = target / f".{_shard_name(worker, 'shard')}.{os.getpid()}.tmp"
    state, size = hashlib.sha256(), 0
    try:
        target.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
                state.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        if expected is not None and (state.hexdigest(), size) != (expected.sha256, expected.size_bytes):
            raise CheckpointError(f"checkpoint of step {step}: the shard of worker {worker} arrived with {size} bytes, "
                                  f"SHA-256 {state.hexdigest()[:12]}; it was written with {expected.size_bytes} bytes, "
                                  f"{expected.sha256[:12]}")
        os.replace(temporary, target / _shard_name(worker, state.hexdigest()))
        sync_folder(target)
    except OSError as error:
        _discard(temporary)
        raise disk_error(error, target, step) from None
    except BaseException:
        _discard(temporary)
        raise
    return state.hexdigest(), size


def _discard(temporary: Path) -> None:
    temporary.unlink(missing_ok=True)
    try:
        temporary.parent.rmdir()  # only when nothing else is in it
    except OSError:
        return


def sync_folder(folder: Path) -> None:
    """Make names written in ``folder`` survive a power cut (systems that cannot open a folder do so by themselves)."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def disk_error(error: OSError, target: Path, step: int) -> WorkplaceError:
    """The sentence for a checkpoint that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        there = target if target.exists() else target.parent
        free = format_bytes(shutil.disk_usage(there).free) if there.exists() else "nothing"
        return WorkplaceError(f"checkpoint of step {step}: the disk of {target.parent} is full ({free} free); free "
                              "space there or lower "
                              "checkpoint.keep; the checkpoints before it are untouched")
    return WorkplaceError(f"checkpoint of step {step}: {target} cannot be written: {error.strerror or error}; "
                          "the checkpoints before it are untouched")


def verify_shard(path: Path, entry: ShardEntry) -> str | None:
    """What is wrong with the file (a phrase), or None when it is byte for byte what was written."""
    try:
        size = path.stat().st_size
        if size != entry.size_bytes:
            return f"{path.name} has {size} of {entry.size_bytes} bytes"
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                return f"{path.name} does not match its SHA-256 (bits have changed)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    return None


def read_whole(path: Path, entry: TensorEntry) -> torch.Tensor:
    """The tensor (or piece) of ``entry`` as it is kept."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt", device="cpu") as file:
        tensor: torch.Tensor = file.get_tensor(entry.key)
    return tensor


def read_flat(path: Path, entry: TensorEntry, low: int, high: int) -> torch.Tensor:
    """Elements ``low``..``high`` (flat indices of the logical tensor, in the entry's range); reads only their rows."""
    from safetensors import safe_open

    low, high = low - entry.low, high - entry.low
    with safe_open(str(path), framework="pt", device="cpu") as file:
        shape = entry.shape if entry.whole else (entry.high - entry.low,)
        if not shape:
            scalar: torch.Tensor = file.get_tensor(entry.key)
            return scalar.reshape(-1)[low:high]
        row = max(1, prod(shape[1:]))
        first, last = low // row, -(-high // row)
        rows: torch.Tensor = file.get_slice(entry.key)[first:last]
    return rows.reshape(-1)[low - first * row:high - first * row]
