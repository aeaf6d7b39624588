"""``atoll probe`` and ``atoll doctor``: what this machine is, what it can do, and whether it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.common import JsonOption, Output

__all__ = ["doctor", "probe"]


def probe(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write cluster.yaml there.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of this machine (default: its host name).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: matrix throughput by dtype, memory, disk.

    Example:  atoll probe --out cluster.yaml
    """
    raise NotImplementedError


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine and say what to do.

    Example:  atoll doctor
    """
    raise NotImplementedError
