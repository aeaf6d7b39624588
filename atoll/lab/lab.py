"""Machines of a ``cluster.yaml`` as network namespaces of this computer, joined by the cluster's links.

    with Lab(cluster) as lab:
        process = lab.run("coral", ["python", "train.py"])

Each machine is a namespace with an address of its own. Rates are enforced by the kernel (token bucket at every directed
segment, shared by all who use it), latency by a relay that holds packets, CPU share and memory by control groups. What
cannot be built is refused; nothing is left out silently. Needs root. Cost: some 10 ms of building per machine, and one
relay process for all links with latency.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec

from atoll.cluster.cluster import Cluster
from atoll.cluster.network import Network
from atoll.cluster.validation import near
from atoll.errors import LabError
from atoll.lab import kernel, limits
from atoll.lab.topology import CORE, OWN_LATENCY_NS, Layout, lay_out
from atoll.units import format_duration

__all__ = ["Lab", "obstacle", "sweep"]

_PREFIX = "atoll-lab-"
_STATE = Path("/run/atoll-lab")


def obstacle() -> str | None:
    """Why no lab can be built here, in one sentence with the remedy; None when one can. Tries it (about 0.1 s)."""
    name = _PREFIX + secrets.token_hex(4)
    return kernel.obstacle([f"{name}--core", f"{name}-x"])


class Lab:
    """A cluster, built. ``limits``: also hold machines to their CPU share (``cluster.emulation``) and memory.

    ``notes``: what a reader of figures should know (how latency is made, which pairs of machines have no way).
    Raises ``LabError`` when it cannot be built as described; what stood by then is taken down.
    """

    def __init__(self, cluster: Cluster, *, limits: bool = True, relay: Literal["auto", "c", "python"] = "auto") -> None:
        self.cluster = cluster
        self.network = Network(cluster)
        self.layout: Layout = lay_out(self.network)
        for machine in self.layout.loops:
            latency_ns = self.network.latency_ns[f"{machine}>{machine}"]
            if latency_ns > OWN_LATENCY_NS:
                raise LabError(f"the lab cannot hold back what workers of one machine hand each other: the link of {machine} "
                               f"with itself has a latency of {format_duration(latency_ns)}; at most "
                               f"{format_duration(OWN_LATENCY_NS)} (the loopback device's own) can be asked for")
        self.notes: list[str] = []
        self.limited = limits
        self.name = _PREFIX + secrets.token_hex(4)
        self.namespaces = {machine: f"{self.name}-{machine or '-core'}" for machine in (CORE, *self.layout.machines)}
        self._relay_choice = relay
        self._relay: subprocess.Popen[str] | None = None
        self._groups: dict[str, list[Path]] = {}
        self._processes: list[subprocess.Popen[Any]] = []
        self._lock: int | None = None

    def __enter__(self) -> Lab:
        if os.geteuid() != 0 or not sys.platform.startswith("linux") or not all(map(shutil.which, ("ip", "tc"))):
            raise LabError(obstacle() or "the lab cannot be built here")
        sweep()
        self._own()
        try:
            kernel.build(self.layout, self.namespaces)
            self._start_relay()
            if self.limited:
                for machine in self.cluster.machines:
                    self._groups[machine.name] = limits.make(f"{self.name}-{machine.name}", limits.cores(self.cluster, machine),
                                                             limits.memory_bytes(machine))
        except BaseException:
            self.close()
            raise
        self.notes.append(f"TCP is paced by {kernel.congestion_control(self.namespaces[self.cluster.machines[0].name])}, as on "
                          "this computer")
        if any(0 < own <= OWN_LATENCY_NS for cable in self.layout.cables for own in (cable.forward_ns, cable.backward_ns)):
            self.notes.append(f"latencies up to {format_duration(OWN_LATENCY_NS)} are the virtual devices' own (some 10 µs)")
        islands = {machine.name: machine.island for machine in self.cluster.machines}
        apart = sorted({(islands[source], islands[target]) for source, target in self.layout.apart})
        if apart:
            self.notes.append(f"not joined: {', '.join(f'{source}>{target}' for source, target in apart)}")
        self.notes += [f"{machine}: handing over inside the machine is limited on its loopback device, latency is its own"
                       for machine in self.layout.loops]
        if self.limited and self.cluster.emulation is None:
            self.notes.append("machines are not held to a CPU share: cluster.yaml has no emulation.cpu_share")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _own(self) -> None:
        """Hold a lock for as long as this process lives: whose lock is free has died, and ``sweep`` may clear it away."""
        _STATE.mkdir(parents=True, exist_ok=True)
        path = _STATE / self.name
        self._lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        path.rename(path.with_suffix(".lock"))  # only now is it looked at

    def _start_relay(self) -> None:
        arguments: list[str] = []
        for cable in self.layout.cables:
            if cable.delayed:
                for end in (cable.first, cable.second):
                    arguments += [self.namespaces[end.namespace], end.device]
                arguments += [str(cable.forward_ns), str(cable.backward_ns)]
        if not arguments:
            return
        command, how = _relay_command(self._relay_choice)
        self.notes.append(how)
        self._relay = subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True, start_new_session=True)
        _first_in_line(self._relay.pid)
        assert self._relay.stdout is not None and self._relay.stderr is not None
        if self._relay.stdout.readline().strip() != "ready":
            raise LabError(f"the lab cannot hold packets for the latency of links: {self._relay.stderr.read().strip()}; "
                           f"{kernel.FALLBACK}")
        if command[0] != sys.executable:
            os.unlink(command[0])

    def address(self, machine: str) -> str:
        """The IPv4 address of ``machine`` inside the lab. Raises ``LabError`` with near names."""
        if machine not in self.layout.addresses:
            raise LabError(f"the lab has no machine {machine!r}; {near(machine, self.layout.addresses)}")
        return self.layout.addresses[machine]

    def addressed(self, port: int = 7700) -> Cluster:
        """The cluster as its machines should see it inside: nothing emulated, every machine with its address and ``port``, and
        a device of an emulated cluster as the share of a core that it is held to (without limits: a whole core)."""
        emulation = self.cluster.emulation
        machines = []
        for machine in self.cluster.machines:
            devices = machine.devices
            if emulation is not None:
                devices = tuple(msgspec.structs.replace(
                    device, speed=device.speed * emulation.cpu_share if self.limited else 1.0) for device in devices)
            machines.append(msgspec.structs.replace(machine, address=f"{self.address(machine.name)}:{port}", devices=devices))
        return msgspec.structs.replace(self.cluster, machines=tuple(machines), emulation=None)

    def run(self, machine: str, argv: Sequence[str], env: Mapping[str, str] | None = None,
            **options: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` on ``machine``: in its namespace, under its limits, in a session of its own. ``env`` is added to
        this process's; ``options`` go to ``subprocess.Popen``. The process's id is the command's."""
        self.address(machine)
        joins = [str(directory / "cgroup.procs") for directory in self._groups.get(machine, [])]
        # Join the groups first: `ip netns exec` mounts /sys anew, and the groups are out of sight from then on.
        script = 'space=$1; shift; while [ "$1" != -- ]; do echo $$ > "$1" || exit 125; shift; done; shift; '\
                 'exec ip netns exec "$space" "$@"'
        command = ["sh", "-c", script, "lab", self.namespaces[machine], *joins, "--", *argv]
        surroundings = {**os.environ, "ATOLL_LAB": self.name, **(env or {})}
        process = subprocess.Popen(command, env=surroundings, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def bytes(self, segment: str) -> int:
        """Bytes that have left into the directed ``segment``, by its interface counter: frame headers included, what its
        queue dropped not. Raises ``LabError`` with near names."""
        try:
            end = self.layout.leaving(segment)
        except KeyError:
            raise LabError(f"the lab has no segment {segment!r}; {near(segment, self.network.capacity)}") from None
        return kernel.counter(self.namespaces[end.namespace], end.device)

    def close(self) -> None:
        """End all processes (SIGTERM, two seconds, SIGKILL), the relay, the namespaces, the groups. May be called twice."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + 2
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
            self._relay = None
        gone = _take_down(self.name)
        for process in self._processes:
            process.wait()
        self._processes.clear()
        if self._lock is not None:
            if gone:  # else the next lab's sweep finds the lock free and goes on
                (_STATE / f"{self.name}.lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def sweep() -> list[str]:
    """Clear away what labs of processes that died (kill -9, power) left: their processes, namespaces and groups. Labs that
    live are not touched. Returns the names of those cleared."""
    cleared: list[str] = []
    for path in sorted(_STATE.glob(f"{_PREFIX}*.lock")) if _STATE.is_dir() else []:
        with contextlib.suppress(OSError), open(path, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists() or os.fstat(lock.fileno()).st_ino != path.stat().st_ino:
                continue
            if _take_down(path.stem):  # else its lock stays, and the next sweep goes on
                path.unlink()
                cleared.append(path.stem)
    return cleared


def _take_down(name: str) -> bool:
    """End and remove whatever bears ``name``; False when a group would not go."""
    spaces = kernel.namespaces(f"{name}-")
    groups = limits.remnants(f"{name}-")
    for _ in range(100):
        living = {pid for space in spaces for pid in kernel.pids(space)}
        living |= {pid for group in groups for pid in limits.members(group)}
        living.discard(os.getpid())
        if not living:
            break
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for space in spaces:
        kernel.delete_namespace(space)
    left = [group for group in groups if not limits.drop(group)]
    return not left


def _first_in_line(pid: int) -> None:
    """A packet must not wait because the machines compute: the relay runs before them where the system allows it."""
    try:
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, -15)


def _relay_command(choice: str) -> tuple[list[str], str]:
    """The command that starts the relay, and the sentence that says which it is."""
    here = Path(__file__).parent
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    python = [sys.executable, "-E", "-s", str(here / "relay.py")]
    if choice == "python":
        return python, "latency is made by the Python relay, as asked"
    if not (here / "relay.c").exists():
        reason = "relay.c was not installed with Atoll"
    elif compiler is not None:
        handle, target = tempfile.mkstemp(prefix="atoll-relay-")
        os.close(handle)
        done = subprocess.run([compiler, "-O2", "-o", target, str(here / "relay.c")], capture_output=True, text=True,
                              check=False)
        if done.returncode == 0:
            os.chmod(target, 0o700)
            return [target], "latency is made by the C relay"
        os.unlink(target)
        reason = f"{compiler} refused it: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}"
    else:
        reason = "there is no C compiler"
    if choice == "c":
        raise LabError(f"the lab cannot build the C relay: {reason}; install gcc or choose the Python relay")
    return python, f"latency is made by the Python relay, good for 1 Gbit/s at most: {reason}"
