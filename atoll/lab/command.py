"""``atoll lab -- COMMAND``: any command, also another project's, once per machine of a cluster, under its links."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from atoll import records
from atoll.cluster.cluster import Cluster
from atoll.lab.lab import Lab
from atoll.lab.limits import memory_bytes
from atoll.units import format_bytes

__all__ = ["PORT", "run_everywhere", "surroundings"]

PORT = 7700
"""The port of every machine's address in the cluster document that commands find at ``ATOLL_CLUSTER``."""


def surroundings(lab: Lab, machine: str, document: str) -> dict[str, str]:
    """What a command finds in its environment. Atoll's own words, and those that ``torch.distributed`` (init method
    ``env://``), Gloo and NCCL look for, so that other projects' programs start unchanged."""
    machines = list(lab.layout.machines)
    rank = str(machines.index(machine))
    return {
        "ATOLL_MACHINE": machine, "ATOLL_RANK": rank, "ATOLL_WORLD_SIZE": str(len(machines)),
        "ATOLL_ADDRESS": lab.address(machine),
        "ATOLL_ADDRESSES": ",".join(f"{name}={lab.address(name)}" for name in machines),
        "ATOLL_CLUSTER": document,
        "RANK": rank, "WORLD_SIZE": str(len(machines)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": rank,
        "MASTER_ADDR": lab.address(machines[0]), "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0",
        "PYTHONUNBUFFERED": "1",
    }


def run_everywhere(cluster: Cluster, argv: Sequence[str], *, env: Mapping[str, str] | None = None, out: IO[str] | None = None,
                   limits: bool = True, report: bool = True) -> int:
    """Run ``argv`` once on every machine of ``cluster``; return 0, or the exit code of the first that failed.

    ``{machine}``, ``{rank}``, ``{address}``, ``{head}`` and ``{cluster}`` inside an argument become the machine's name,
    its place in the document, its address, the first machine's address, and the path of a cluster document whose
    addresses are the lab's; the environment is that of ``surroundings`` and ``env``. Every line of output is written to
    ``out`` behind the machine's name. When one fails, the others are ended (SIGTERM, two seconds, SIGKILL); none outlives
    this call. ``report``: at the end, the bytes of every segment that was used. Raises ``LabError``.
    """
    out = sys.stdout if out is None else out
    lock = threading.Lock()
    with _stop_on_signal(), Lab(cluster, limits=limits) as lab, tempfile.TemporaryDirectory(prefix="atoll-lab-") as folder:
        document = str(Path(folder) / "cluster.yaml")
        records.save(document, lab.addressed(PORT))
        for note in lab.notes:
            _write(out, lock, f"lab: {note}\n")
        width = max(map(len, lab.layout.machines))
        processes: dict[str, subprocess.Popen[str]] = {}
        readers: list[threading.Thread] = []
        for rank, machine in enumerate(lab.layout.machines):
            words = {"{machine}": machine, "{rank}": str(rank), "{address}": lab.address(machine),
                     "{head}": lab.address(lab.layout.machines[0]), "{cluster}": document}
            process = lab.run(machine, [_fill(argument, words) for argument in argv],
                              {**surroundings(lab, machine, document), **(env or {})}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", bufsize=1)
            processes[machine] = process
            readers.append(threading.Thread(target=_copy, args=(process, f"{machine:{width}} | ", out, lock), daemon=True))
            readers[-1].start()
        code = _wait(processes, _caps(cluster) if limits else {}, out, lock)
        _end(processes.values())
        for reader in readers:
            reader.join(timeout=2)
        if report:
            for segment in lab.network.capacity:
                if sent := lab.bytes(segment):
                    _write(out, lock, f"lab: {segment}: {sent} bytes\n")
        return code


def _fill(argument: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        argument = argument.replace(word, value)
    return argument


def _wait(processes: Mapping[str, subprocess.Popen[str]], caps: Mapping[str, str], out: IO[str], lock: threading.Lock) -> int:
    """Until all have ended well, or the first has failed; its exit code (128 + the signal that killed it)."""
    left = dict(processes)
    while left:
        for machine, process in list(left.items()):
            code = process.poll()
            if code is None:
                continue
            del left[machine]
            if code != 0:
                why = f"was killed by signal {-code}{caps.get(machine, '')}" if code < 0 else f"ended with exit code {code}"
                _write(out, lock, f"lab: the command on {machine} {why}; ending the others\n")
                return code if code > 0 else 128 - code
        time.sleep(0.02)
    return 0


def _caps(cluster: Cluster) -> dict[str, str]:
    found = {machine.name: memory_bytes(machine) for machine in cluster.machines}
    return {name: f" (its memory is capped at {format_bytes(cap)})" for name, cap in found.items() if cap is not None}


def _end(processes: Iterable[subprocess.Popen[str]]) -> None:
    living = [process for process in processes if process.poll() is None]
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in living:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
        end = time.monotonic() + 2
        for process in living:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        living = [process for process in living if process.poll() is None]


def _copy(process: subprocess.Popen[str], prefix: str, out: IO[str], lock: threading.Lock) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        _write(out, lock, f"{prefix}{line}" if line.endswith("\n") else f"{prefix}{line}\n")


def _write(out: IO[str], lock: threading.Lock, text: str) -> None:
    with lock, contextlib.suppress(BrokenPipeError):
        out.write(text)
        out.flush()


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[None]:
    """SIGTERM leaves through the clean-up, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
