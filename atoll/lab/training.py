"""The path of real machines inside a lab: ``atoll train`` on one machine, ``atoll worker NAME`` on each other one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll import records
from atoll.errors import LabError
from atoll.lab.lab import Lab

__all__ = ["ATOLL", "train_in_lab"]

ATOLL = (sys.executable, "-m", "atoll.cli.main")
_POLL_S = 0.05
_FAREWELL_S = 20.0


def train_in_lab(lab: Lab, job: str | os.PathLike[str], folder: str | os.PathLike[str], *,
                 plan: str | os.PathLike[str] | None = None, head: str | None = None, port: int = 7700,
                 run: str = "run", options: Sequence[str] = (), timeout_s: float = 600.0) -> dict[str, Any]:
    """Train ``job`` on the machines of ``lab`` and return what ``atoll train --json`` printed at the end.

    The head (default: the first machine) writes a bundle of keys for every machine that takes part into
    ``folder``/``run``/keys; as soon as one is there its worker is started, as a person would who reads the line that the
    head prints. What they say goes to ``folder``/MACHINE.log; what they pack of the data stays in ``folder`` for the next
    run. ``options``: more of them for ``atoll train``.
    Raises ``LabError`` with the last line of whoever failed first, or when ``timeout_s`` have passed.
    """
    base = Path(folder)
    base.mkdir(parents=True, exist_ok=True)
    head = head or lab.layout.machines[0]
    place, document = base / run, base / "cluster.yaml"
    records.save(document, lab.addressed(port))
    command = [*ATOLL, "train", str(job), "--cluster", str(document), "--run", str(place), "--machine", head, "--json",
               *options]
    if plan is not None:
        command += ["--plan", str(plan)]
    processes = {head: _start(lab, head, command, base)}
    deadline = time.monotonic() + timeout_s
    while processes[head].poll() is None:
        for machine in lab.layout.machines:
            keys = place / "keys" / f"{machine}.pem"
            if machine not in processes and keys.exists():
                processes[machine] = _start(lab, machine, [
                    *ATOLL, "worker", machine, "--cluster", str(document), "--keys", str(keys), "--home", str(base / machine)],
                    base)
        if time.monotonic() > deadline:
            raise LabError(f"the training in the lab did not end within {timeout_s:.0f} s; "
                           f"{head} said last: {_last(base / f'{head}.log')}; see the logs in {base}")
        time.sleep(_POLL_S)
    codes = {machine: _end(process) for machine, process in processes.items()}
    for machine, code in codes.items():
        if code != 0:
            said = _last(base / f"{machine}.log") or _last(base / f"{machine}.out") or "nothing"
            raise LabError(f"the training in the lab failed: machine {machine} ended with exit code {code} and said: {said}")
    try:
        result = json.loads(_last(base / f"{head}.out"))
    except json.JSONDecodeError:
        raise LabError(f"the training in the lab ended without a result; see the logs in {base}") from None
    return dict(result)


def _start(lab: Lab, machine: str, command: Sequence[str], base: Path) -> subprocess.Popen[Any]:
    with open(base / f"{machine}.out", "wb") as out, open(base / f"{machine}.log", "wb") as log:
        return lab.run(machine, command, {"PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL, stdout=out, stderr=log)


def _end(process: subprocess.Popen[Any]) -> int:
    """The exit code; a worker that does not leave after its head did has failed."""
    try:
        return process.wait(_FAREWELL_S)
    except subprocess.TimeoutExpired:
        return 1


def _last(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else ""
