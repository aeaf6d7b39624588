"""The relay of ``relay.c`` for computers without a C compiler: the same arguments, the same behaviour, more time a packet.

Run as ``python relay.py (NETNS DEVICE NETNS DEVICE NS_FORWARD NS_BACKWARD)...``; needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

__all__ = ["main"]

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_BATCH = 64


def open_tun(netns: str, device: str) -> int:
    """Descriptor of an existing TUN device in a named network namespace; leaves this thread in that namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    space = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    if libc.setns(space, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {netns}")
    os.close(space)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun


def _deliver(queue: deque[tuple[int, bytes]], target: int) -> None:
    while queue and queue[0][0] <= time.monotonic_ns():
        try:
            os.write(target, queue[0][1])
        except BlockingIOError:
            return
        except OSError:
            pass  # a packet that the other side does not take is lost, as on any network
        queue.popleft()


def _collect(source: int, queue: deque[tuple[int, bytes]], delay_ns: int) -> None:
    for _ in range(_BATCH):
        try:
            packet = os.read(source, 65536)
        except BlockingIOError:
            return
        queue.append((time.monotonic_ns() + delay_ns, packet))


def main(arguments: list[str]) -> int:
    if not arguments or len(arguments) % 6:
        print("usage: relay (NETNS DEVICE NETNS DEVICE NS_FORWARD NS_BACKWARD)...", file=sys.stderr)
        return 2
    directions: list[tuple[int, int, int, deque[tuple[int, bytes]]]] = []
    for at in range(0, len(arguments), 6):
        first = open_tun(arguments[at], arguments[at + 1])
        second = open_tun(arguments[at + 2], arguments[at + 3])
        directions.append((first, second, int(arguments[at + 4]), deque()))
        directions.append((second, first, int(arguments[at + 5]), deque()))
    waiting = select.epoll()
    by_source = {source: (queue, delay_ns) for source, _, delay_ns, queue in directions}
    for descriptor in (0, *by_source):
        waiting.register(descriptor, select.EPOLLIN)
    print("ready", flush=True)
    while True:
        for _, target, _, queue in directions:
            _deliver(queue, target)
        due = min((queue[0][0] for _, _, _, queue in directions if queue), default=None)
        left = -1.0 if due is None else max(due - time.monotonic_ns(), 0) / 1e9
        if 0 < left < 0.001:  # epoll counts whole milliseconds, and would wait too long
            time.sleep(min(left, 0.0002))
            left = 0
        for descriptor, _ in waiting.poll(left if left <= 0 else max(left - 0.001, 0)):
            if descriptor == 0:
                return 0
            _collect(descriptor, *by_source[descriptor])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
