"""Tensors as bytes and back: a small header that is checked, then the raw bytes; never an object.

A message is cut into frames of at most ``FRAME_BYTES``. The first frame is: length of the header (4 bytes, little
endian), the header (JSON: label, number in the stream, dtype and shape of every tensor), then payload; all further
frames are payload. Payload is the tensors' bytes in order, contiguous, in the byte order of the machines (little
endian; others are refused when the module is used). Cost: one copy out of the tensor and one into it on each side.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import msgspec
import torch

__all__ = ["DTYPES", "FRAME_BYTES", "MAX_HEADER_BYTES", "Header", "Message", "RefusedError", "allocate", "byte_view",
           "check_header", "decode_header", "encode_header", "frames_of", "header_of", "messages_in"]

FRAME_BYTES = 1 << 20
_LENGTH_BYTES = 4
MAX_HEADER_BYTES = 1 << 16
_MAX_LABEL = 512
_MAX_TENSORS = 1024
_MAX_AXES = 16

DTYPES: dict[str, torch.dtype] = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class RefusedError(ValueError):
    """A message that is malformed, out of order or larger than agreed; the text says what was found and allowed."""


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``sequence``: number of the message in its stream, from 0. ``tensors``: (dtype, shape) of each, in order."""

    label: str
    sequence: int
    tensors: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def payload_bytes(self) -> int:
        return sum(prod(shape) * DTYPES[dtype].itemsize for dtype, shape in self.tensors)


class Message(msgspec.Struct, frozen=True):
    header: Header
    tensors: list[torch.Tensor]


_DECODER = msgspec.json.Decoder(Header)


def header_of(label: str, sequence: int, tensors: Sequence[torch.Tensor]) -> Header:
    """Raises ``RefusedError`` for a dtype that has no name on the wire."""
    if sys.byteorder != "little":
        raise RefusedError("this machine is big endian; tensors travel as little-endian bytes")
    for tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise RefusedError(f"{label}: a tensor of {tensor.dtype} cannot be sent; allowed: {', '.join(DTYPES)}")
    return Header(label=label, sequence=sequence,
                  tensors=tuple((_NAMES[tensor.dtype], tuple(tensor.shape)) for tensor in tensors))


def encode_header(header: Header) -> bytes:
    data = msgspec.json.encode(header)
    if len(data) > MAX_HEADER_BYTES:
        raise RefusedError(f"{header.label}: the header would take {len(data)} bytes, allowed: {MAX_HEADER_BYTES}; "
                           "send fewer tensors in one message")
    return data


def decode_header(data: bytes | memoryview, limit_bytes: int) -> Header:
    """Read a header that a peer sent and check it against the limits, before anything is allocated for it."""
    try:
        header = _DECODER.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise RefusedError(f"the header of a message is malformed ({error})") from None
    check_header(header, limit_bytes)
    return header


def check_header(header: Header, limit_bytes: int) -> None:
    if len(header.label) > _MAX_LABEL or len(header.tensors) > _MAX_TENSORS or header.sequence < 0:
        raise RefusedError(f"a message labelled {header.label[:40]!r} has {len(header.tensors)} tensors and number "
                           f"{header.sequence}; allowed: labels up to {_MAX_LABEL} letters, up to {_MAX_TENSORS} tensors")
    for dtype, shape in header.tensors:
        if dtype not in DTYPES:
            raise RefusedError(f"{header.label}: found dtype {dtype[:40]!r}, allowed: {', '.join(DTYPES)}")
        if len(shape) > _MAX_AXES or any(size < 0 for size in shape):
            raise RefusedError(f"{header.label}: found shape {shape[:_MAX_AXES]}, allowed: up to {_MAX_AXES} axes, "
                               "none negative")
        if max(shape, default=0) > limit_bytes:  # also when another axis is 0: no such tensor is ever meant
            raise RefusedError(f"{header.label}: found shape {shape} in a message of at most {limit_bytes} bytes")
    if header.payload_bytes > limit_bytes:
        raise RefusedError(f"{header.label}: the message has {header.payload_bytes} bytes, allowed: {limit_bytes}")


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it (bfloat16 and bool included)."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def allocate(header: Header) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=DTYPES[dtype]) for dtype, shape in header.tensors]


def frames_of(header: Header, tensors: Sequence[torch.Tensor]) -> Iterator[bytes]:
    """The message as frames; each tensor is read when its frame is asked for."""
    encoded = encode_header(header)
    parts: list[bytes | memoryview] = [len(encoded).to_bytes(_LENGTH_BYTES, "little"), encoded]
    room = FRAME_BYTES - _LENGTH_BYTES - len(encoded)
    for tensor in tensors:
        view = byte_view(tensor.detach().cpu().contiguous())
        start = 0
        while start < len(view):
            piece = view[start:start + room]
            parts.append(piece)
            start += len(piece)
            room -= len(piece)
            if room == 0:
                yield b"".join(parts)
                parts, room = [], FRAME_BYTES
    if parts:
        yield b"".join(parts)


def messages_in(frames: Iterable[bytes], limit_bytes: int) -> Iterator[Message]:
    """The messages in a stream of frames, in order. Raises ``RefusedError`` at the first that breaks a rule."""
    stream = iter(frames)
    for sequence, frame in enumerate(stream):
        header, payload = _first(frame, limit_bytes)
        if header.sequence != sequence:
            raise RefusedError(f"{header.label}: found message number {header.sequence}, expected {sequence}")
        tensors = allocate(header)
        _fill(header, [byte_view(tensor) for tensor in tensors], payload, stream)
        yield Message(header=header, tensors=tensors)


def _first(frame: bytes, limit_bytes: int) -> tuple[Header, memoryview]:
    view = memoryview(frame)
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    if len(view) < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, len(view) - _LENGTH_BYTES):
        raise RefusedError(f"a message begins with {len(view)} bytes that are no header")
    end = _LENGTH_BYTES + length
    return decode_header(view[_LENGTH_BYTES:end], limit_bytes), view[end:]


def _fill(header: Header, targets: list[memoryview], payload: memoryview, stream: Iterator[bytes]) -> None:
    for target in targets:
        filled = 0
        while filled < len(target):
            if not payload:
                payload = memoryview(next(stream, b""))
                if not payload:
                    raise RefusedError(f"{header.label}: the stream ended or paused inside the message")
            piece = payload[:len(target) - filled]
            target[filled:filled + len(piece)] = piece
            filled += len(piece)
            payload = payload[len(piece):]
    if payload:
        raise RefusedError(f"{header.label}: {len(payload)} bytes more than its header says")
