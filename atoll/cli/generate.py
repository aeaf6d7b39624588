"""``atoll generate`` and ``atoll export``: what a trained checkpoint is good for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.common import JsonOption, Output, printable

__all__ = ["export_command", "generate_command"]

RunArgument = Annotated[Path, typer.Argument(help="Folder of a run (runs/NAME).")]


def generate_command(
    run: RunArgument,
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(help="How many tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Only among the k likeliest.")] = 50,
    top_p: Annotated[float | None, typer.Option(help="Only among the likeliest that make up p.")] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds write equal text.", min=0, max=2**63 - 1)] = 0,
    as_json: JsonOption = False,
) -> None:
    """Continue a text with the newest checkpoint of a run.

    Example:  atoll generate runs/demo "def add(a, b):" --tokens 100
    """
    from atoll.runtime.generate import generate

    output, notes = Output(as_json), Notes()
    text = generate(run, prompt, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, say=notes.say)
    if not as_json:
        print(printable(text) if sys.stdout.isatty() else text)
    output.finish({"prompt": prompt, "text": text, "notes": notes.said})


def export_command(
    run: RunArgument,
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    as_json: JsonOption = False,
) -> None:
    """Write the newest checkpoint as a Hugging Face folder that ``transformers`` loads.

    Example:  atoll export runs/demo my-model
    """
    from atoll.runtime.export import export

    output, notes = Output(as_json), Notes()
    folder = export(run, out, say=notes.say)
    output.show(f"written: {folder}; load it with AutoModelForCausalLM.from_pretrained({str(folder)!r})")
    output.finish({"folder": str(folder), "notes": notes.said})


class Notes:
    """What a checkpoint has to say for itself (one that was skipped): on standard error, so that text can be piped on."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, note: str) -> None:
        self.said.append(note)
        print(f"atoll: {note}", file=sys.stderr)
