"""Ring all-reduce: reduce-scatter, then all-gather (Patarasuk and Yuan, 2009)."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.errors import ProgramError
from atoll.program.instructions import Buffer, Instruction, Receive, Reduce, Send
from atoll.program.program import Bucket
from atoll.records import Record

__all__ = ["Ring"]


class Ring(Record):
    """Fewest bytes a member can send: 2(n-1)/n of the bucket, in 2(n-1) hops, each of one link's latency.

    The bucket has one chunk for each of the n holders. Holder r hands chunk r on first; each next holder adds its own
    gradient and hands the sum on, until holder c-1 (round the ring) finishes chunk c and sends it round again. One holder
    adds last, all others copy its bits, so everyone ends with the same bits. A group of one does nothing.

    Time on even links: 2(n-1) latency + 2(n-1)/n bytes/bandwidth. Where latencies are long and buckets small, another
    collective with fewer hops is faster.
    """

    name: str = "ring"
    source: str = "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations (Patarasuk and Yuan, 2009)"

    def chunks(self, group_size: int) -> int:
        return group_size

    def instructions(self, bucket: Bucket, element_bytes: int, worker: str) -> tuple[Instruction, ...]:
        return tuple(_steps(bucket, element_bytes, worker))

    def bytes_sent(self, bucket: Bucket, element_bytes: int, worker: str) -> int:
        """Twice the bucket, less the chunk this worker finishes (never sent on unfinished) and the one that reaches it last."""
        size = len(bucket.holders)
        if size == 1:
            return 0
        rank = _rank(bucket, worker)
        finishes, last = (rank + 1) % size, (rank + 2) % size
        return 2 * bucket.elements * element_bytes - sum(_chunk_bytes(bucket, c, element_bytes) for c in (finishes, last))


def _rank(bucket: Bucket, worker: str) -> int:
    if worker not in bucket.holders or bucket.chunks != len(bucket.holders):
        raise ProgramError(f"bucket {bucket.index} has {bucket.chunks} chunks and the holders {', '.join(bucket.holders)}: "
                           f"a ring needs one chunk a holder, and {worker} among them")
    return bucket.holders.index(worker)


def _chunk_bytes(bucket: Bucket, chunk: int, element_bytes: int) -> int:
    low, high = bucket.chunk(chunk)
    return (high - low) * element_bytes


def _steps(bucket: Bucket, element_bytes: int, worker: str) -> Iterator[Instruction]:
    """("partial", b, c, w) is the sum of chunk c over the holders up to w: both ends of a hop call it by that name."""
    size = len(bucket.holders)
    rank = _rank(bucket, worker)
    if size == 1:
        return
    before, behind = bucket.holders[rank - 1], bucket.holders[(rank + 1) % size]

    def sized(chunk: int) -> int:
        return _chunk_bytes(bucket, chunk, element_bytes)

    def partial(chunk: int, by: str) -> Buffer:
        return ("partial", bucket.index, chunk, by)

    def finished(chunk: int) -> Buffer:
        return ("reduced", bucket.index, chunk)

    own: Buffer = ("gradient", bucket.index, rank)
    yield Reduce(target=partial(rank, worker), sources=(own,), size_bytes=sized(rank))
    yield Send(buffer=partial(rank, worker), peer=behind, size_bytes=sized(rank))
    for hop in range(1, size):
        chunk = (rank - hop) % size
        last = hop == size - 1
        yield Receive(buffer=partial(chunk, before), peer=before, size_bytes=sized(chunk))
        target = finished(chunk) if last else partial(chunk, worker)
        yield Reduce(target=target, sources=(("gradient", bucket.index, chunk), partial(chunk, before)),
                     size_bytes=2 * sized(chunk))
        yield Send(buffer=target, peer=behind, size_bytes=sized(chunk))
    for hop in range(1, size):
        chunk = (rank + 1 - hop) % size
        yield Receive(buffer=finished(chunk), peer=before, size_bytes=sized(chunk))
        if hop < size - 1:
            yield Send(buffer=finished(chunk), peer=behind, size_bytes=sized(chunk))
