"""``trace.jsonl``: the header on the first line, then one span a line.

A run that dies leaves a last line without its newline; such a line is dropped by the reader, everything before it is kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from atoll.errors import DocumentError
from atoll.records import to_json, write_atomically
from atoll.trace.span import Span, Trace, TraceHeader

__all__ = ["SCHEMA", "TraceWriter", "read_trace", "write_trace"]

SCHEMA = 1

R = TypeVar("R", bound=msgspec.Struct)


class TraceWriter:
    """Writes a trace while it happens; flushes at every call, so that a killed run leaves all it wrote. A context manager."""

    def __init__(self, path: str | os.PathLike[str], header: TraceHeader) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(target, "wb")  # noqa: SIM115 - this class is the context manager
        self._file.write(to_json(header) + b"\n")
        self._file.flush()

    def write(self, spans: Iterable[Span]) -> None:
        self._file.write(b"".join(to_json(span) + b"\n" for span in spans))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def write_trace(path: str | os.PathLike[str], trace: Trace) -> None:
    """Write a whole trace at once, atomically."""
    write_atomically(path, to_json(trace.header) + b"\n" + b"".join(to_json(span) + b"\n" for span in trace.spans))


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read ``trace.jsonl``. Raises ``DocumentError`` naming file and line."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read: {error.strerror}") from None
    lines = data.split(b"\n")[:-1]  # what follows the last newline was not finished
    if not lines:
        raise DocumentError(f"{path}: found no complete line, expected the header of a trace on the first one")
    header = _decode(lines[0], TraceHeader, path, 1)
    if header.schema != SCHEMA:
        raise DocumentError(f"{path}: line 1: found schema {header.schema}, this Atoll reads {SCHEMA}; "
                            "read it with the version that wrote it")
    decoder = msgspec.json.Decoder(Span)
    spans: list[Span] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            spans.append(decoder.decode(line))
        except msgspec.MsgspecError:
            spans.append(_decode(line, Span, path, number))
    return Trace(header=header, spans=tuple(spans))


def _decode(line: bytes, kind: type[R], path: str | os.PathLike[str], number: int) -> R:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise DocumentError(f"{path}: line {number}: {error}; expected a {kind.__name__} with the fields "
                            f"{', '.join(kind.__struct_fields__)}") from None
