"""One short name for every instruction, PyTorch's where PyTorch has one ("2F0", "2SEND_F0"), so that people can compare.

``[stage][kind][microbatch]`` for compute and for what stages hand on; a message that skips stages names the other end too
("2SEND_F0>5", "5RECV_F0<2"). All else is a word and what it works on: "LOAD 0.3", "SEND partial[3.1.a]", "COMMIT".
Names are unique among the instructions of one worker, apart from collectives of the same chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.program.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Commit,
    Forward,
    Instruction,
    Load,
    Native,
    Receive,
    Recompute,
    Reduce,
    Save,
    Send,
    Update,
    Vote,
)

__all__ = ["LETTERS", "NOTATIONS", "buffer_notation", "notation"]

LETTERS: Mapping[type[Instruction], str] = {Forward: "F", Backward: "B", BackwardInput: "I", BackwardWeight: "W",
                                            Recompute: "R"}
"""PyTorch's letters of compute (I: gradient of the inputs, W: of the weights, B: of both); R for recompute is ours."""


def buffer_notation(buffer: Buffer) -> str:
    """("reduced", 3, 1) as "reduced[3.1]", ("total",) as "total"."""
    kind, *ids = buffer
    return f"{kind}[{'.'.join(map(str, ids))}]" if ids else str(kind)


def _compute(instruction: Any) -> str:
    return f"{instruction.stage}{LETTERS[type(instruction)]}{instruction.microbatch}"


def _message(word: str, arrow: str) -> Callable[[Any], str]:
    def name(instruction: Any) -> str:
        buffer = instruction.buffer
        if buffer[0] not in ("activation", "delta"):
            return f"{word} {buffer_notation(buffer)}"
        _, source, target, microbatch = buffer
        forth = buffer[0] == "activation"
        here, there = (source, target) if forth == (word == "SEND") else (target, source)
        skips = f"{arrow}{there}" if target != source + 1 else ""
        return f"{here}{word}_{'F' if forth else 'B'}{microbatch}{skips}"
    return name


def _stages(instruction: Any) -> str:
    return ".".join(map(str, instruction.stages))


NOTATIONS: Mapping[type[Instruction], Callable[[Any], str]] = {
    **dict.fromkeys(LETTERS, _compute),
    Send: _message("SEND", ">"),
    Receive: _message("RECV", "<"),
    Native: lambda i: f"{i.collective.upper()} {'.'.join(map(str, i.source[1:]))}",
    Reduce: lambda i: f"REDUCE {buffer_notation(i.target)}",
    Load: lambda i: f"LOAD {i.stage}.{i.microbatch}",
    Save: lambda i: f"SAVE {_stages(i)}",
    Update: lambda i: f"UPDATE {i.rule} {_stages(i)}",
    Vote: lambda i: "VOTE",
    Commit: lambda i: "COMMIT",
}


def notation(instruction: Instruction) -> str:
    """The name of an instruction in traces, messages and drawings."""
    return NOTATIONS[type(instruction)](instruction)
