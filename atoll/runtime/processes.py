"""The worker processes that the head started here: their logs, their ends."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from atoll.errors import WorkplaceError

__all__ = ["Processes"]

_POLL_S = 0.02


class Processes:
    """One child a worker; what it prints goes to ``logs/NAME.log``."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._told: set[str] = set()

    def start(self, worker: str, command: Sequence[str], *, one_thread: bool) -> None:
        """``one_thread``: the process stands for a device of an emulated cluster and must not take more than a core."""
        environment = dict(os.environ, PYTHONUNBUFFERED="1", GRPC_VERBOSITY="ERROR", TORCH_CPP_LOG_LEVEL="ERROR")
        if one_thread:
            environment.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            with open(self._log(worker), "wb") as log:
                self._running[worker] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT,
                                                         stdin=subprocess.DEVNULL, env=environment)
        except OSError as error:
            raise WorkplaceError(f"worker {worker} cannot be started here: {error.strerror or error}") from None

    def _log(self, worker: str) -> Path:
        return self._logs / f"{worker.replace(':', '-')}.log"

    def pids(self) -> dict[str, int]:
        return {worker: process.pid for worker, process in self._running.items()}

    def ended(self) -> Iterator[tuple[str, int]]:
        """Workers that ended since the last call, with their exit codes (negative: the signal)."""
        for worker, process in self._running.items():
            if worker not in self._told and (code := process.poll()) is not None:
                self._told.add(worker)
                yield worker, code

    def last_line(self, worker: str) -> str:
        """The last thing a worker printed, or "" when it said nothing (or runs elsewhere)."""
        try:
            lines = self._log(worker).read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:500] if lines else ""

    def wait(self, timeout_s: float, *, frozen: bool = False) -> None:
        """Return when all have ended, at the latest after ``timeout_s``. ``frozen``: do not wait for one that the system
        shows as stopped."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if all(process.poll() is not None or (frozen and _stopped(process.pid)) for process in self._running.values()):
                return
            time.sleep(_POLL_S)

    def end(self) -> None:
        """End whoever still runs (also a frozen one) and reap all."""
        for process in self._running.values():
            if process.poll() is None:
                process.kill()
        for process in self._running.values():
            process.wait()


def _stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP), as far as the system tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
