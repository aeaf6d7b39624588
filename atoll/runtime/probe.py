"""``atoll probe``: what this machine can do, measured; and the cluster document that says so.

Matrix throughput by dtype is the median over products that keep the device busy for a few hundred ms; memory bandwidth
counts bytes read and written by a copy; the disk is written with fsync and read past the page cache where the system
allows it. Links are measured by ``runtime.probe_links``.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from atoll.cluster import catalogue
from atoll.cluster.cluster import Device, Machine
from atoll.errors import WorkplaceError
from atoll.records import Record
from atoll.units import Bandwidth, Bytes, FlopRate, format_bandwidth, format_bytes, format_flop_rate

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "EFFICIENCY", "DeviceFacts", "MachineFacts", "decode_facts", "devices_here", "encode_facts", "machine_of",
           "names_differ", "probe_disk", "probe_machine", "rounded", "sentences"]

DTYPES = ("float32", "bfloat16", "float16", "float64")

EFFICIENCY = 0.7
"""Guess: what the operators of a transformer reach of the measured rate of large matrix products (a profile replaces it)."""


class DeviceFacts(Record):
    """``name``: as its driver calls it. ``backend``: "cuda", "mps", "xpu" or "cpu". ``flops``: measured, by dtype (what the
    device cannot do is left out). ``count``: devices of this name; one of them was measured."""

    name: str
    backend: str
    count: int
    memory_bytes: int
    flops: dict[str, int]
    memory_bytes_per_s: int


class MachineFacts(Record):
    """``port_bytes_per_s``: what the network adapter says it can do (None: it does not say). Disk figures: None when the
    folder cannot be written."""

    name: str
    devices: tuple[DeviceFacts, ...]
    cores: int
    host_memory_bytes: int
    disk_read_bytes_per_s: int | None = None
    disk_write_bytes_per_s: int | None = None
    port_bytes_per_s: int | None = None
    notes: tuple[str, ...] = ()


def probe_machine(name: str | None = None, *, budget_s: float = 0.3, folder: str | os.PathLike[str] = ".",
                  disk_bytes: int = 256 << 20) -> MachineFacts:
    """Measure this machine: about ``budget_s`` for each device and dtype, and the disk under ``folder`` (0 bytes: not).

    Raises ``WorkplaceError`` when PyTorch is not there.
    """
    notes: list[str] = []
    found = [_probe_device(backend, index, label, count, budget_s, notes) for backend, index, label, count in devices_here()]
    read = write = None
    if disk_bytes:
        try:
            read, write = probe_disk(folder, disk_bytes)
        except OSError as error:
            notes.append(f"disk not measured: {folder} cannot be written: {error.strerror}")
    return MachineFacts(name=name or _host_name(), devices=tuple(found), cores=len(_cores()),
                        host_memory_bytes=_host_memory(), disk_read_bytes_per_s=read, disk_write_bytes_per_s=write,
                        port_bytes_per_s=_port_rate(), notes=tuple(notes))


def devices_here() -> list[tuple[str, int, str, int]]:
    """(backend, index of the first, name, how many) for every kind of device here; the CPU only where there is no other."""
    torch = _torch()
    found: list[tuple[str, int, str, int]] = []
    for backend in ("cuda", "xpu"):
        module = getattr(torch, backend, None)
        if module is None or not module.is_available():
            continue
        names = [module.get_device_name(index) for index in range(module.device_count())]
        found += [(backend, names.index(name), name, names.count(name)) for name in dict.fromkeys(names)]
    mps = getattr(torch.backends, "mps", None)
    if mps is not None and mps.is_available():
        found.append(("mps", 0, _processor_name(), 1))
    return found or [("cpu", 0, _processor_name(), 1)]


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise WorkplaceError(f"atoll probe measures with PyTorch, which cannot be imported ({error}); install it: "
                             "pip install torch") from None
    return torch


def _probe_device(backend: str, index: int, name: str, count: int, budget_s: float, notes: list[str]) -> DeviceFacts:
    import torch

    device = torch.device(backend) if backend in ("cpu", "mps") else torch.device(backend, index)
    flops: dict[str, int] = {}
    for dtype in DTYPES:
        try:
            flops[dtype] = _matrix_rate(device, getattr(torch, dtype), budget_s)
        except (RuntimeError, TypeError) as error:
            notes.append(f"{name} cannot compute in {dtype}: {str(error).splitlines()[0][:80]}")
    if backend == "cpu":
        memory = _host_memory()
    elif backend == "mps":
        memory = int(torch.mps.recommended_max_memory())
    else:
        memory = int(getattr(torch, backend).get_device_properties(index).total_memory)
    return DeviceFacts(name=name, backend=backend, count=count, memory_bytes=memory, flops=flops,
                       memory_bytes_per_s=_copy_rate(device, memory, budget_s))


def _finish(device: torch.device) -> Callable[[], None]:
    import torch

    if device.type == "cpu":
        return lambda: None
    synchronize: Callable[[], None] = getattr(torch, device.type).synchronize
    return synchronize


def _rate(work: Callable[[], object], finish: Callable[[], None], amount: float, budget_s: float) -> int:
    """``amount`` per second: the median over single runs of ``work`` within ``budget_s``, at least three."""
    work()
    finish()
    taken: list[float] = []
    end = time.perf_counter() + budget_s
    while len(taken) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        finish()
        taken.append(time.perf_counter() - start)
    return round(amount / max(statistics.median(taken), 1e-9))


def _matrix_rate(device: torch.device, dtype: torch.dtype, budget_s: float) -> int:
    """FLOP/s of (n, n) x (n, n) products; n is doubled from 256 until one takes a tenth of the budget (at most 8192)."""
    import torch

    finish = _finish(device)
    size, rate = 256, 0
    while True:
        left, right = (torch.full((size, size), 0.5, dtype=dtype, device=device) for _ in range(2))
        result = torch.empty_like(left)

        def work(left: torch.Tensor = left, right: torch.Tensor = right, result: torch.Tensor = result) -> None:
            torch.mm(left, right, out=result)

        rate = _rate(work, finish, 2.0 * size**3, 0.0)
        if 2.0 * (2 * size) ** 3 / rate > budget_s / 10 * 4 or size >= 8192:
            return max(rate, _rate(work, finish, 2.0 * size**3, budget_s))
        size *= 2


def _copy_rate(device: torch.device, memory_bytes: int, budget_s: float) -> int:
    """Bytes read and written a second by copies of 128 MiB (less on small devices)."""
    import torch

    size = min(128 << 20, memory_bytes // 16)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return _rate(lambda: target.copy_(source), _finish(device), 2.0 * size, budget_s)


def probe_disk(folder: str | os.PathLike[str], size: int = 256 << 20) -> tuple[int, int]:
    """(read, write) in bytes/s of a file of ``size`` in ``folder``, which is removed. Raises ``OSError``."""
    block = os.urandom(1 << 20)
    path = Path(folder) / f".atoll-probe-{os.getpid()}"
    blocks = max(1, size >> 20)
    try:
        with open(path, "wb", buffering=0) as file:
            start = time.perf_counter()
            for _ in range(blocks):
                file.write(block)
            os.fsync(file.fileno())
            write = blocks * len(block) / (time.perf_counter() - start)
        with open(path, "rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter()
            while file.read(1 << 20):
                pass
            read = blocks * len(block) / (time.perf_counter() - start)
    finally:
        path.unlink(missing_ok=True)
    return round(read), round(write)


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname().split(".")[0]).strip("-._") or "here"


def _processor_name() -> str:
    import platform
    import subprocess

    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    with contextlib.suppress(OSError):
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return platform.processor() or platform.machine() or "cpu"


def _cores() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _host_memory() -> int:
    """Physical memory, or less where a control group grants less."""
    import psutil

    limits = [int(psutil.virtual_memory().total)]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    return min(limits)


def _port_rate() -> int | None:
    """Speed of the fastest network adapter that is up and says how fast it is."""
    import psutil

    with contextlib.suppress(OSError):
        rates = [adapter.speed for name, adapter in psutil.net_if_stats().items()
                 if adapter.isup and 0 < adapter.speed < 10**6 and name != "lo"]
        return max(rates) * 10**6 // 8 if rates else None
    return None


def machine_of(facts: MachineFacts, island: str, address: str | None = None) -> Machine:
    """The machine as the cluster document writes it: what was measured, and nothing else. Figures are rounded to three
    digits, for more they do not mean."""
    devices: list[Device] = []
    for device in facts.devices:
        kind = "cpu-core" if device.backend == "cpu" else catalogue.find(device.name) or _plain(device.name)
        devices.append(Device(kind=kind, count=device.count, memory=Bytes(device.memory_bytes),
                              flops={dtype: FlopRate(rounded(rate)) for dtype, rate in device.flops.items()},
                              memory_bandwidth=Bandwidth(rounded(device.memory_bytes_per_s)), efficiency=EFFICIENCY))
    disk = facts.disk_read_bytes_per_s
    return Machine(name=facts.name, island=island, address=address, devices=tuple(devices),
                   host_memory=Bytes(facts.host_memory_bytes),
                   disk_bandwidth=None if disk is None else Bandwidth(rounded(disk)))


def rounded(value: float) -> int:
    """To three significant digits."""
    return int(float(f"{value:.3g}"))


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")


def sentences(facts: MachineFacts) -> list[str]:
    """What was found, for people."""
    lines = [f"{facts.name}: {facts.cores} cores, {format_bytes(facts.host_memory_bytes)} of memory"]
    for device in facts.devices:
        rates = ", ".join(f"{dtype} {format_flop_rate(rate)}" for dtype, rate in device.flops.items())
        lines.append(f"{device.count} x {device.name} ({device.backend}): {format_bytes(device.memory_bytes)} at "
                     f"{device.memory_bytes_per_s / 1e9:.3g} GB/s; matrix products: {rates}")
    if facts.disk_read_bytes_per_s is not None and facts.disk_write_bytes_per_s is not None:
        lines.append(f"disk: reads {facts.disk_read_bytes_per_s / 1e6:.0f} MB/s, "
                     f"writes {facts.disk_write_bytes_per_s / 1e6:.0f} MB/s")
    if facts.port_bytes_per_s is not None:
        lines.append(f"network adapter: {format_bandwidth(facts.port_bytes_per_s)} by its own word")
    return [*lines, *facts.notes]


def decode_facts(data: bytes) -> MachineFacts:
    """Facts as another machine sent them (JSON). Raises ``WorkplaceError`` when it speaks another language."""
    try:
        return msgspec.json.decode(data, type=MachineFacts)
    except msgspec.MsgspecError as error:
        raise WorkplaceError(f"the other side's facts cannot be read ({error}); run one version of Atoll on both") from None


def encode_facts(facts: MachineFacts) -> bytes:
    return msgspec.json.encode(facts)


def names_differ(machines: Sequence[MachineFacts]) -> None:
    """Raises ``WorkplaceError`` when two machines call themselves the same."""
    names = [facts.name for facts in machines]
    for name in names:
        if names.count(name) > 1:
            raise WorkplaceError(f"two machines call themselves {name!r}; start one of them with atoll probe --name OTHER")
