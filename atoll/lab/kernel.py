"""What the lab asks of the kernel: namespaces, devices, routes, rates; each as one batch of ``ip`` or ``tc`` commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from atoll.errors import LabError
from atoll.lab.topology import CORE, Cable, End, Layout

__all__ = ["FALLBACK", "MTU", "build", "commands", "congestion_control", "counter", "delete_namespace", "namespaces",
           "obstacle", "pids", "queue", "run_batch"]

MTU = 9000
"""Jumbo frames: headers stay below one percent, and the relay sees few packets."""

FALLBACK = "without it, an emulated cluster is shaped inside its processes: atoll train with `emulation` in cluster.yaml"


def queue(bytes_per_s: int, longest_ns: int) -> tuple[int, int]:
    """(burst, limit) in bytes of the token bucket of a segment: at least two frames, about 1 ms, may pass at once; the
    queue before it holds what TCP needs to keep it busy: the round trip of the longest way plus 50 ms."""
    burst = max(2 * (MTU + 18), bytes_per_s // 1000)
    limit = max(256 * 1024, round(bytes_per_s * (2 * longest_ns / 1e9 + 0.05)))
    return burst, min(limit, 1 << 30)


def run_batch(tool: str, lines: Iterable[str], *, namespace: str | None = None) -> None:
    """Run ``ip`` or ``tc`` with one command a line, in a named network namespace. Raises ``LabError`` at the first that
    fails, with the command and what the kernel said."""
    text = list(lines)
    if not text:
        return
    argv = [tool, *(["-n", namespace] if namespace else []), "-batch", "-"]
    done = subprocess.run(argv, input="\n".join(text) + "\n", capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    said = done.stderr.strip().splitlines()
    number = next((int(line.rsplit(":", 1)[1]) for line in said if line.startswith("Command failed")), 1)
    raise LabError(f"the lab cannot be built: `{tool} {text[number - 1]}` failed: {said[0] if said else 'no reason given'}; "
                   f"{FALLBACK}")


def commands(layout: Layout, names: dict[str, str]) -> dict[tuple[str, str], list[str]]:
    """(tool, namespace) -> commands that build ``layout``; ``names``: machine or ``CORE`` -> network namespace. Devices
    first, then addresses, rates and routes, in this order."""
    batches: dict[tuple[str, str], list[str]] = {("ip", names[where]): [] for where in (CORE, *layout.machines)}
    rates: dict[tuple[str, str], list[str]] = {}
    for number, cable in enumerate(layout.cables):
        _cable(batches, names, cable, number)
        for end, rate in ((cable.first, cable.forward_bytes_per_s), (cable.second, cable.backward_bytes_per_s)):
            burst, limit = queue(rate, layout.longest_ns)
            rates.setdefault(("tc", names[end.namespace]), []).append(
                f"qdisc add dev {end.device} root tbf rate {rate * 8}bit burst {burst} limit {limit}")
    for machine, address in layout.addresses.items():
        batches["ip", names[machine]] += [f"address add {address}/32 dev eth0", "link set lo up"]
        if machine in layout.loops:
            burst, limit = queue(layout.loops[machine], 0)
            rates.setdefault(("tc", names[machine]), []).append(
                f"qdisc add dev lo root tbf rate {layout.loops[machine] * 8}bit burst {max(burst, 70_000)} limit {limit}")
    for where in (CORE, *layout.machines):
        devices = [end.device for cable in layout.cables for end in (cable.first, cable.second) if end.namespace == where]
        batches["ip", names[where]] += [f"link set {device} mtu {MTU} up" for device in devices]
    for machine, address in layout.addresses.items():
        batches["ip", names[machine]].append(f"route add default dev eth0 src {address}")
    for machine, target, device in layout.routes:
        batches["ip", names[machine]].append(f"route add {target}/32 dev {device} src {layout.addresses[machine]}")
    batches["ip", names[CORE]] += _rules(layout)
    return batches | rates


def _cable(batches: dict[tuple[str, str], list[str]], names: dict[str, str], cable: Cable, number: int) -> None:
    first, second = cable.first, cable.second
    if cable.delayed:
        for end in (first, second):
            batches["ip", names[end.namespace]] += [f"tuntap add dev {end.device} mode tun",
                                                    f"link set {end.device} txqueuelen 4000"]
        return
    # One hardware address for both ends, and no ARP: whatever is sent into a cable is for whoever is at its other end.
    same = f"02:00:00:00:{number // 256:02x}:{number % 256:02x}"
    batches["ip", names[first.namespace]] += [
        f"link add {first.device} address {same} type veth peer name {second.device} address {same} "
        f"netns {names[second.namespace]}",
        f"link set {first.device} arp off"]
    batches["ip", names[second.namespace]].append(f"link set {second.device} arp off")


def _rules(layout: Layout) -> list[str]:
    """Tables of the core: one for each device packets come in by, one more for each source that leaves it differently."""
    tables: dict[tuple[str, str | None], int] = {}
    lines: list[str] = []
    for rule in layout.rules:
        key = (rule.came_in, rule.source)
        if key not in tables:
            tables[key] = 1000 + len(tables)
            where = f"from {rule.source} " if rule.source else ""
            lines.append(f"rule add {where}iif {rule.came_in} lookup {tables[key]} priority {100 if rule.source else 200}")
        lines.append(f"route add {rule.target}/32 dev {rule.leaves} table {tables[key]}")
    return lines


def build(layout: Layout, names: dict[str, str]) -> None:
    """Make all namespaces and what is in them. Raises ``LabError``; the caller takes down what stands by then."""
    run_batch("ip", [f"netns add {names[where]}" for where in (CORE, *layout.machines)])
    for where in (CORE, *layout.machines):
        _sysctl(names[where], forward=where == CORE)
    batches = commands(layout, names)
    creating = {key: [line for line in lines if line.startswith(("link add", "tuntap"))] for key, lines in batches.items()}
    for (tool, namespace), lines in creating.items():
        run_batch(tool, lines, namespace=namespace)
    for (tool, namespace), lines in batches.items():
        run_batch(tool, [line for line in lines if line not in creating[tool, namespace]], namespace=namespace)


def _sysctl(namespace: str, *, forward: bool) -> None:
    """Forwarding in the core; in machines, TCP buffers large enough for fast links with a long way. The congestion
    control stays this computer's own: a namespace may not choose any that the whole computer is not open to."""
    own = {"net/ipv6/conf/all/disable_ipv6": "1", "net/ipv6/conf/default/disable_ipv6": "1",
           "net/ipv4/conf/all/rp_filter": "0", "net/ipv4/conf/default/rp_filter": "0"}
    settings = ({"net/ipv4/ip_forward": "1", "net/ipv4/conf/all/send_redirects": "0",
                 "net/ipv4/conf/default/send_redirects": "0"} if forward else
                {"net/ipv4/tcp_rmem": "4096 131072 67108864", "net/ipv4/tcp_wmem": "4096 65536 67108864"})
    script = "\n".join(f"[ ! -e /proc/sys/{key} ] || echo '{value}' > /proc/sys/{key} 2>/dev/null || true"
                       for key, value in {**own, **settings}.items())
    subprocess.run(["ip", "netns", "exec", namespace, "sh", "-c", script], check=False, capture_output=True)


def congestion_control(namespace: str) -> str:
    """What TCP paces itself by in ``namespace``: "bbr", "cubic", ..."""
    done = subprocess.run(["ip", "netns", "exec", namespace, "cat", "/proc/sys/net/ipv4/tcp_congestion_control"],
                          capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def counter(namespace: str, device: str) -> int:
    """Bytes sent into ``device`` since it was made (what its queue dropped or still holds is not in it)."""
    done = subprocess.run(["ip", "netns", "exec", namespace, "cat", f"/sys/class/net/{device}/statistics/tx_bytes"],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"device {device} of namespace {namespace} has no counter: {done.stderr.strip()}; is the lab still up?")
    return int(done.stdout)


def namespaces(prefix: str) -> list[str]:
    directory = Path("/run/netns")
    return sorted(path.name for path in directory.iterdir() if path.name.startswith(prefix)) if directory.is_dir() else []


def pids(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(word) for word in done.stdout.split()]


def delete_namespace(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def obstacle(names: Sequence[str]) -> str | None:
    """Why the lab cannot be built here, in one sentence with the remedy; None when it can. Tries it: makes and deletes
    two namespaces called ``names`` with a shaped cable of either kind."""
    if not sys.platform.startswith("linux"):
        return f"the lab needs Linux with network namespaces, found {sys.platform}; {FALLBACK}"
    if os.geteuid() != 0:
        return f"the lab needs root to make network namespaces, found user {os.geteuid()}; run it with sudo; {FALLBACK}"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the lab needs the command `{tool}`, which is not installed; install iproute2; {FALLBACK}"
    if not os.path.exists("/dev/net/tun"):
        return f"the lab needs /dev/net/tun to hold packets for the latency of a link; modprobe tun; {FALLBACK}"
    fast = {"forward": "x>y", "backward": "y>x", "forward_bytes_per_s": 10**6, "backward_bytes_per_s": 10**6}
    plain = Cable(first=End(namespace="x", device="eth0"), second=End(namespace=CORE, device="p0"), forward_ns=0, backward_ns=0,
                  **fast)  # type: ignore[arg-type]
    held = Cable(first=End(namespace=CORE, device="k0a"), second=End(namespace=CORE, device="k0b"), forward_ns=10**6,
                 backward_ns=10**6, **fast)  # type: ignore[arg-type]
    trial = Layout(machines=("x",), addresses={"x": "10.77.0.2"}, cables=(plain, held), rules=(), routes=(), loops={}, apart=(),
                   longest_ns=0)
    try:
        build(trial, {CORE: names[0], "x": names[1]})
    except LabError as error:
        return str(error)
    finally:
        for name in names:
            delete_namespace(name)
    return None
