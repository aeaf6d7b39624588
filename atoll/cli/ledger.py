"""``atoll ledger``: prove from a run's own notes that no sample was lost or used twice."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.common import JsonOption, Output
from atoll.errors import DataError

__all__ = ["ledger"]


def ledger(run: Annotated[Path, typer.Argument(help="Folder of a run (runs/NAME), or its ledger.jsonl.")],
           as_json: JsonOption = False) -> None:
    """Count every sample that a run has used: each exactly once an epoch, in order, through all stops and resumes. Exit code 2
    and the first step that is wrong, where one is.

    Example:  atoll ledger runs/demo
    """
    from atoll.runtime.data.ledger import about, prove

    path = run / "ledger.jsonl" if run.is_dir() else run
    if not path.exists():
        raise DataError(f"{path}: no ledger there; name the folder of a run, such as runs/demo")
    said, proof = about(path), prove(path)
    output = Output(as_json)
    output.show(f"{proof.steps:,} steps of {said.global_batch} used {proof.samples:,} samples of {said.sequences:,} sequences",
                f"whole epochs, each sequence once: {proof.epochs:,}; of the next, all different: {proof.rest:,}",
                "nothing was lost or used twice" + (f"; {proof.rewound:,} steps were done again after a stop and count once"
                                                    if proof.rewound else ""))
    output.finish({"about": said, "proof": proof})
