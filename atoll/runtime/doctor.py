"""``atoll doctor``: is this machine fit, and what to do where it is not. Looks, changes nothing, never raises."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from atoll.records import Record
from atoll.units import format_bytes, format_duration

__all__ = ["PORTS", "Finding", "examine"]

PORTS = (7700, 7701)
"""A machine's address in cluster.yaml usually names the first; ``atoll probe --serve`` listens on the second."""

_OPTIONAL = {
    "transformers": "models and tokenizers in Hugging Face folders",
    "tokenizers": "byte-pair encodings trained on the corpus",
    "pyarrow": "corpora in .parquet and Hugging Face data sets on disk",
    "matplotlib": "pictures in the report",
}


class Finding(Record):
    """``level``: "good", "hint" (works, could be better) or "problem" (something will fail). ``remedy``: what to do."""

    level: str
    what: str
    found: str
    remedy: str = ""


def examine(*, folder: str | Path = ".", ports: Sequence[int] = PORTS,
            lab: Callable[[], str | None] | None = None) -> list[Finding]:
    """Examine this machine. ``folder``: where runs will be written. ``lab``: says why no lab can be built here, or None
    (``atoll.lab.lab.obstacle``; left out: not examined). An examination that breaks is itself a finding."""
    looks: dict[str, Callable[[], list[Finding]]] = {
        "python": _python, "torch": _torch, "memory": _memory, "disk": partial(_disk, Path(folder)), "clock": _clock,
        "network": _network, "ports": partial(_ports, ports), "packages": _packages,
    }
    if lab is not None:
        looks["lab"] = partial(_lab, lab)
    found: list[Finding] = []
    for what, look in looks.items():
        try:
            found += look()
        except Exception as error:  # whatever happens, the other examinations are worth having
            found.append(Finding(level="problem", what=what, found=f"could not be examined: {type(error).__name__}: {error}",
                                 remedy="report this as a bug of atoll doctor"))
    return found


def _python() -> list[Finding]:
    found = f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"
    if sys.maxsize < 2**32:
        return [Finding(level="problem", what="python", found=f"{found}, 32 bits", remedy="install a 64-bit Python")]
    return [Finding(level="good", what="python", found=found)]


def _torch() -> list[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Finding(level="problem", what="torch", found=f"cannot be imported: {error}",
                        remedy="pip install torch (planning and simulating work without it)")]
    found = [Finding(level="good", what="torch", found=f"{torch.__version__}, {torch.get_num_threads()} threads")]
    for backend in ("cuda", "xpu"):
        module = getattr(torch, backend, None)
        if module is None or not module.is_available():
            continue
        for index in range(module.device_count()):
            memory = module.get_device_properties(index).total_memory
            found.append(Finding(level="good", what=f"torch {backend}:{index}",
                                 found=f"{module.get_device_name(index)}, {format_bytes(memory)}"))
    if torch.backends.mps.is_available():
        found.append(Finding(level="good", what="torch mps", found=format_bytes(torch.mps.recommended_max_memory())))
    if len(found) == 1:
        card = shutil.which("nvidia-smi")
        found.append(Finding(level="problem" if card else "hint", what="torch devices", found="only the CPU",
                             remedy="nvidia-smi is here but PyTorch sees no GPU: install a CUDA build of PyTorch that suits "
                                    "the driver" if card else "training runs on the CPU; for a GPU install its driver and "
                                                              "a PyTorch build for it"))
    if not torch.distributed.is_available():
        found.append(Finding(level="problem", what="torch.distributed", found="not in this build",
                             remedy="install an official PyTorch build: machines of one island talk through it"))
    return found


def _memory() -> list[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{format_bytes(memory.available)} free of {format_bytes(memory.total)}"
    if memory.available < 2 * 2**30:
        return [Finding(level="problem", what="memory", found=text, remedy="end other programs: the demo needs about 2 GiB")]
    return [Finding(level="good", what="memory", found=text)]


def _disk(folder: Path) -> list[Finding]:
    place = folder
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    text = f"{format_bytes(free)} free under {folder}"
    if free < 2**30:
        return [Finding(level="problem", what="disk", found=text,
                        remedy="free at least 1 GiB, or give another folder with --out")]
    return [Finding(level="good", what="disk", found=text)]


def _clock() -> list[Finding]:
    ticks: set[int] = set()
    end = time.perf_counter() + 0.02
    last = time.monotonic_ns()
    while time.perf_counter() < end:
        now = time.monotonic_ns()
        if now != last:
            ticks.add(now - last)
            last = now
    step = min(ticks) if ticks else 20_000_000
    text = f"monotonic clock advances in steps of {format_duration(step)}"
    if step > 100_000:
        found = [Finding(level="hint", what="clock", found=text, remedy="spans shorter than that will look like nothing; use a "
                                                                        "machine with a finer clock for measurements")]
    else:
        found = [Finding(level="good", what="clock", found=text)]
    return found + _synchronised()


def _synchronised() -> list[Finding]:
    if shutil.which("timedatectl") is None:
        return []
    done = subprocess.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"], capture_output=True, text=True,
                          timeout=5, check=False)
    answer = done.stdout.strip()
    if done.returncode or answer not in ("yes", "no"):
        return []
    if answer == "yes":
        return [Finding(level="good", what="clock synchronisation", found="the system clock follows a time server")]
    return [Finding(level="hint", what="clock synchronisation", found="the system clock follows no time server",
                    remedy="timedatectl set-ntp true (run keys are only valid for some time; clocks hours apart refuse them)")]


def _ports(ports: Sequence[int]) -> list[Finding]:
    taken: list[int] = []
    for port in ports:
        try:
            socket.create_server(("", port)).close()
        except OSError:
            taken.append(port)
    if taken:
        return [Finding(level="problem", what="ports", found=f"in use or forbidden: {', '.join(map(str, taken))}",
                        remedy="end the program that listens there, or choose another port (address in cluster.yaml, --port)")]
    return [Finding(level="good", what="ports", found=f"free: {', '.join(map(str, ports))}")]


def _network(setting: Path = Path("/proc/sys/net/ipv4/tcp_congestion_control")) -> list[Finding]:
    """How TCP paces itself: loss-based control halves its rate whenever the queue of a slow link overflows."""
    if not setting.exists():
        return []
    found = setting.read_text().strip()
    if found == "bbr":
        return [Finding(level="good", what="network", found="TCP is paced by bbr")]
    return [Finding(level="hint", what="network", found=f"TCP is paced by {found}",
                    remedy="where slow links are shared, bbr keeps them busier (a step of the demo: 6.2 s instead of 6.7 s): "
                           "as root, sysctl -w net.core.default_qdisc=fq net.ipv4.tcp_congestion_control=bbr")]


def _packages() -> list[Finding]:
    missing = [name for name in _OPTIONAL if not _importable(name)]
    if not missing:
        return [Finding(level="good", what="packages", found="all optional packages are here")]
    return [Finding(level="hint", what=f"packages: {name}", found="not installed",
                    remedy=f"pip install {name} (for {_OPTIONAL[name]})") for name in missing]


def _importable(name: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(name) is not None
    return False


def _lab(obstacle: Callable[[], str | None]) -> list[Finding]:
    reason = obstacle()
    if reason is None:
        return [Finding(level="good", what="lab", found="network namespaces, rates and delays can be built here")]
    return [Finding(level="hint", what="lab", found=reason, remedy="only needed for `atoll lab` and its tests; emulated "
                                                                   "clusters run without it")]
