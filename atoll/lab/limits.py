"""CPU share and memory cap of a machine of the lab, by control groups (version 1 or 2)."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from atoll.cluster.catalogue import resolve
from atoll.cluster.cluster import Cluster, Machine
from atoll.errors import LabError

__all__ = ["PERIOD_US", "cores", "drop", "groups", "make", "members", "memory_bytes", "remnants"]

PERIOD_US = 20_000
"""Scheduling period. Who was idle may use the quota of a whole period at once: with the kernel's usual 100 ms, a half-speed
device would do the first 50 ms of work at full speed after every wait. A period of the kernel's tick is too short: its
bandwidth is handed out in slices of up to 5 ms, and what a slice cannot use is lost (measured: 4 ms gives a steady process
2 to 14 % less than its share, 10 ms gives it to within 2 %), and after every period the caches must be filled anew
(measured: with 10 ms the same training work takes 6 % more CPU time than unlimited, with 20 ms 3 %)."""

_LEAST_US = 1_000  # the kernel grants no smaller quota; smaller shares get a longer period

_ROOT = Path("/sys/fs/cgroup")


def cores(cluster: Cluster, machine: Machine) -> float | None:
    """Cores that stand for the devices of ``machine``: speed x cpu_share, summed. None: the cluster is not emulated."""
    if cluster.emulation is None:
        return None
    return sum(device.speed * device.count for device in machine.devices) * cluster.emulation.cpu_share


def memory_bytes(machine: Machine) -> int | None:
    """Host memory of ``machine``: as given, else the memory of its CPU devices; None for accelerators with no figure."""
    if machine.host_memory is not None:
        return int(machine.host_memory)
    if all(device.kind.lower().startswith("cpu") for device in machine.devices):
        return sum(int(resolve(device).memory or 0) * device.count for device in machine.devices)
    return None


def _parent(controller: str) -> Path:
    """The group under which ours is made: our own in version 1 (its limits go on holding), the root in version 2."""
    own = "/"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            own = path
    return _ROOT / controller / own.lstrip("/")


def groups(name: str) -> dict[str, Path]:
    """Controller ("cpu", "memory") -> directory of the group ``name``; only those that this computer offers."""
    found: dict[str, Path] = {}
    unified = _ROOT / "cgroup.controllers"
    for controller in ("cpu", "memory"):
        if unified.exists() and controller in unified.read_text().split():
            found[controller] = _ROOT / name
        elif (_ROOT / controller / "cgroup.procs").exists():
            found[controller] = _parent(controller) / name
    return found


def make(name: str, cpu: float | None, memory: int | None) -> list[Path]:
    """Make the group with its limits; return the directories whose ``cgroup.procs`` a process must join. Raises
    ``LabError`` when a limit is wanted that this computer cannot set."""
    offered = groups(name)
    wanted = {"cpu": cpu, "memory": memory}
    joined: list[Path] = []
    for controller, limit in wanted.items():
        if limit is None:
            continue
        if controller not in offered:
            raise LabError(f"the lab cannot limit the {controller} of a machine: no control group offers it under {_ROOT}; "
                           "mount it, or ask for a lab without limits (limits=False)")
        directory = offered[controller]
        try:
            _limit(directory, controller, limit)
        except OSError as error:
            raise LabError(f"the lab cannot limit the {controller} of a machine in {directory}: {error.strerror}; run as "
                           "root, or ask for a lab without limits (limits=False)") from None
        if directory not in joined:
            joined.append(directory)
    return joined


def _limit(directory: Path, controller: str, limit: float) -> None:
    second_version = directory.parent == _ROOT and (_ROOT / "cgroup.controllers").exists()
    if second_version:
        (_ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
    directory.mkdir(exist_ok=True)
    if controller == "cpu":
        period = max(PERIOD_US, round(_LEAST_US / limit))
        quota = max(_LEAST_US, round(limit * period))
        if second_version:
            (directory / "cpu.max").write_text(f"{quota} {period}")
        else:
            (directory / "cpu.cfs_period_us").write_text(str(period))
            (directory / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (directory / ("memory.max" if second_version else "memory.limit_in_bytes")).write_text(str(int(limit)))


def members(directory: Path) -> list[int]:
    """Process ids in the group."""
    try:
        return [int(line) for line in (directory / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def drop(directory: Path, *, patience_s: float = 2.0) -> bool:
    """Remove an empty group; False when processes are still in it."""
    end = time.monotonic() + patience_s
    while directory.exists():
        with contextlib.suppress(OSError):
            os.rmdir(directory)
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def remnants(prefix: str) -> list[Path]:
    """Groups whose name begins with ``prefix``, left by whoever."""
    parents = {path.parent for path in groups(prefix).values()}
    return [path for parent in parents if parent.is_dir() for path in parent.iterdir() if path.name.startswith(prefix)]
