"""Links of an emulated cluster, in user space and without root: a token bucket for each directed segment, and delay.

All processes of the emulation share one small file: for each segment, until when it is taken. A message is cut into
chunks; each chunk takes its time on every segment of its path (cut-through: the slowest decides), so flows that meet on
a segment share it chunk by chunk. The bytes themselves go over the real transport at once; what is held back is their
*release*: a small message after them says at which instant of the machine's monotonic clock the receiver may have
them (when their last byte has passed, plus the latency). So real transfer time hides behind the emulated one, and a
thread that wakes late does not slow the link down: reservations follow the link's own time, not the thread's.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath

import torch

from atoll.cluster.network import Path
from atoll.errors import WorkplaceError
from atoll.runtime.world import Channel, Stop

__all__ = ["Buckets", "Shaped"]

_CHUNK_NS = 4_000_000  # a chunk takes about this long on its slowest segment, within the two bounds below
_CHUNK_BYTES = (16 << 10, 256 << 10)
_AHEAD_NS = 2_000_000  # how far reservations run ahead of the clock, so that the link is never idle for a late thread
_SLICE_NS = 50_000_000
_SPIN_NS = 80_000
_WORDS = 2  # of 8 bytes, a segment: free from (ns), bytes passed


class Buckets:
    """The shared file: one line for each segment of ``capacity`` (name -> bytes/s), sorted by name.

    Every process opens the same path with the same capacities; the first one makes the file.
    """

    def __init__(self, path: str | os.PathLike[str], capacity: Mapping[str, int]) -> None:
        try:
            import fcntl
        except ImportError:
            raise WorkplaceError("an emulated cluster needs file locks as Unix systems have them; "
                                 "emulate on Linux or macOS, or describe real machines") from None
        self._index = {name: index for index, name in enumerate(sorted(capacity))}
        self._rate = {name: max(1, int(rate)) for name, rate in capacity.items()}
        size = max(1, len(self._index)) * _WORDS * 8
        try:
            self._file = open(path, "a+b")  # noqa: SIM115 - held open for the life of the buckets
            if os.fstat(self._file.fileno()).st_size < size:
                os.ftruncate(self._file.fileno(), size)
            self._map = mmap.mmap(self._file.fileno(), size)
        except OSError as error:
            raise WorkplaceError(f"{FilePath(path)}: the emulated links cannot be kept there: {error.strerror}") from None
        self._words = memoryview(self._map).cast("q")
        self._try_lock = lambda: fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._unlock = lambda: fcntl.flock(self._file, fcntl.LOCK_UN)
        self._threads = threading.Lock()

    @contextmanager
    def _held(self, stop: Stop) -> Iterator[None]:
        with self._threads:
            while True:
                try:
                    self._try_lock()
                    break
                except OSError:  # another process holds it: a few microseconds, unless it was frozen just there
                    stop.check()
                    time.sleep(2e-5)
            try:
                yield
            finally:
                self._unlock()

    def chunk_bytes(self, segments: Sequence[str]) -> int:
        slowest = min(self._rate[name] for name in segments)
        low, high = _CHUNK_BYTES
        return min(high, max(low, slowest * _CHUNK_NS // 10**9))

    def reserve(self, segments: Sequence[str], size: int, at_ns: int, stop: Stop) -> int:
        """Take ``size`` bytes on all segments, from ``at_ns`` on at the earliest; returns when the last byte has passed."""
        passed_ns = at_ns
        with self._held(stop):
            for name in segments:
                word = self._index[name] * _WORDS
                free_ns = max(self._words[word], at_ns) + size * 10**9 // self._rate[name]
                self._words[word] = free_ns
                self._words[word + 1] += size
                passed_ns = max(passed_ns, free_ns)
        return passed_ns

    def passed_bytes(self) -> dict[str, int]:
        """Bytes that went over each segment so far, by all processes."""
        return {name: self._words[index * _WORDS + 1] for name, index in self._index.items()}

    def close(self) -> None:
        self._words.release()
        self._map.close()
        self._file.close()


class Shaped:
    """A ``Channel`` around another one that keeps to the paths of an emulated cluster.

    ``path(a, b)``: the way of a message from worker a to worker b. Where it has no segment (inside one machine) nothing
    is shaped. A collective of the library costs what a ring costs: 2 (n-1)/n of the bytes over the way to the next
    member, and 2 (n-1) latencies, from the moment the last member has come.
    """

    def __init__(self, inner: Channel, name: str, buckets: Buckets, path: Callable[[str, str], Path], stop: Stop) -> None:
        self._inner, self._name, self._buckets, self._path, self._stop = inner, name, buckets, path, stop

    def prompt(self, peer: str, messages: int) -> bool:
        return False  # a send takes as long as the link that it plays

    def send(self, peer: str, label: str, tensors: Sequence[torch.Tensor]) -> int:
        path = self._path(self._name, peer)
        begin_ns = time.monotonic_ns()
        size = self._inner.send(peer, label, tensors)
        if not path.segments:
            return size
        passed_ns = self._pass(path.segments, size, begin_ns)
        self._inner.send(peer, _release(label), [torch.tensor(passed_ns + path.latency_ns)])
        self._until(passed_ns)
        return size

    def receive(self, peer: str, label: str) -> list[torch.Tensor]:
        tensors = self._inner.receive(peer, label)
        if self._path(peer, self._name).segments:
            [released_ns] = self._inner.receive(peer, _release(label))
            self._until(int(released_ns))
        return tensors

    def all_reduce(self, group: Sequence[str], tensor: torch.Tensor) -> None:
        members = list(group)
        count, place = len(members), members.index(self._name)
        path = self._path(self._name, members[(place + 1) % count])
        if count == 1 or not path.segments:
            self._inner.all_reduce(group, tensor)
            return
        arrivals = torch.zeros(count, dtype=torch.int64)
        arrivals[place] = time.monotonic_ns()
        self._inner.all_reduce(group, arrivals)
        self._inner.all_reduce(group, tensor)
        size = 2 * (count - 1) * tensor.nbytes // count
        passed_ns = self._pass(path.segments, size, int(arrivals.max()))
        self._until(passed_ns + 2 * (count - 1) * path.latency_ns)

    def close(self) -> None:
        self._inner.close()

    def _pass(self, segments: Sequence[str], size: int, begin_ns: int) -> int:
        """Send ``size`` bytes through the buckets; returns, up to ``_AHEAD_NS`` early, when the last one has passed."""
        chunk = self._buckets.chunk_bytes(segments)
        passed_ns = begin_ns
        for start in range(0, size, chunk):
            self._until(passed_ns - _AHEAD_NS)
            passed_ns = self._buckets.reserve(segments, min(chunk, size - start), passed_ns, self._stop)
        return passed_ns

    def _until(self, instant_ns: int) -> None:
        """Sleep until the monotonic clock shows ``instant_ns``; the last stretch is spun, as a sleep wakes up late."""
        while (left := instant_ns - time.monotonic_ns()) > 0:
            if left > _SPIN_NS:
                time.sleep(min(left - _SPIN_NS, _SLICE_NS) / 1e9)
                self._stop.check()


def _release(label: str) -> str:
    return f"release {label}"
