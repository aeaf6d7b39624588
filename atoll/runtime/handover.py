"""Files between the head and a machine that does not share its disk: shards up, checkpoints down, over the control service.

Chunks of at most ``PIECE_BYTES``; a file arrives under another name and gets its own when it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from atoll.errors import CheckpointError
from atoll.runtime.checkpoint.shards import ShardEntry, receive_shard

__all__ = ["PIECE_BYTES", "Files", "pieces", "shard_header", "write_file"]

PIECE_BYTES = 1 << 20


class _Shard(msgspec.Struct, frozen=True):
    step: int
    entry: ShardEntry


def shard_header(step: int, entry: ShardEntry) -> bytes:
    """What an upload begins with."""
    return msgspec.json.encode(_Shard(step=step, entry=entry))


def pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Chunks of any size as chunks that fit a message."""
    for chunk in chunks:
        view = memoryview(chunk)
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start:start + PIECE_BYTES])


def write_file(path: str | os.PathLike[str], chunks: Iterable[bytes]) -> None:
    """Write a file that arrives in pieces; its name appears when it is whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class Files:
    """The head's side. ``checkpoints``: where uploaded shards go. ``offered``: the folders whose files may be fetched."""

    def __init__(self, checkpoints: Path, offered: Iterable[Path]) -> None:
        self._checkpoints = checkpoints
        self._offered = [folder.resolve() for folder in offered]

    def take(self, worker: str, chunks: Iterator[bytes]) -> None:
        """Receive one shard of ``worker``. Raises ``CheckpointError`` when it is not what its header says."""
        try:
            shard = msgspec.json.decode(next(chunks, b""), type=_Shard)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise CheckpointError(f"worker {worker} sent a shard with a malformed header: {error}") from None
        if shard.entry.worker != worker:
            raise CheckpointError(f"worker {worker} sent a shard in the name of worker {shard.entry.worker}")
        receive_shard(self._checkpoints, shard.step, shard.entry, chunks)

    def give(self, path: str) -> Iterator[bytes]:
        """The file at ``path`` in pieces. Raises ``CheckpointError`` for one that is not offered."""
        target = Path(path).resolve()
        if not any(target.is_relative_to(folder) for folder in self._offered) or not target.is_file():
            raise CheckpointError(f"{path}: the head offers no such file")
        with open(target, "rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
