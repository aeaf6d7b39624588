"""The order of the samples: a function of (seed, step) alone, computable at any position, nothing stored.

The training stream is endless: position ``p`` lies in epoch ``p // total``; inside an epoch a keyed permutation of
``range(total)`` gives the sample id. Step ``k`` takes positions ``k * global_batch`` up to ``(k + 1) * global_batch``,
so an epoch may end inside a step. Who computes which sample is the plan's affair and never enters here.

The permutation is a Feistel network over Z_a x Z_a with a = ceil(sqrt(total)), walked until it lands inside the
domain (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Because a*a < total + 2*sqrt(total) + 1 the
walk takes hardly more than one visit; cost: about ``ROUNDS`` integer mixes a sample, no memory.
"""

from __future__ import annotations

import hashlib
from math import isqrt

__all__ = ["ROUNDS", "held_out", "permute", "samples", "samples_at"]

ROUNDS = 8
_MASK = (1 << 64) - 1
_HELD_OUT_SEED = -1


def _mix(value: int) -> int:
    """The 64-bit finaliser of SplitMix (Steele, Lea and Flood, 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    raw = hashlib.sha512(f"atoll sample order {seed} {epoch}".encode()).digest()
    return tuple(int.from_bytes(raw[8 * i:8 * i + 8], "little") for i in range(ROUNDS))


def permute(seed: int, epoch: int, offset: int, total: int) -> int:
    """The sample id at ``offset`` (0 <= offset < total) of ``epoch``: a bijection of ``range(total)`` onto itself."""
    if not 0 <= offset < total:
        raise ValueError(f"offset {offset} lies outside an epoch of {total} samples")
    return _walk(_keys(seed, epoch), offset, total)


def _walk(keys: tuple[int, ...], value: int, total: int) -> int:
    side = isqrt(total - 1) + 1
    while True:
        left, right = divmod(value, side)
        for key in keys:
            left, right = right, (left + _mix((right + key) & _MASK)) % side
        value = left * side + right
        if value < total:
            return value


def samples_at(seed: int, first: int, count: int, total: int) -> tuple[int, ...]:
    """Sample ids at positions ``first`` .. ``first + count`` of the endless training stream over ``total`` samples."""
    if total < 1:
        raise ValueError("an order needs at least one sample")
    ids: list[int] = []
    position, last = first, first + count
    while position < last:
        epoch, offset = divmod(position, total)
        taken = min(last - position, total - offset)
        keys = _keys(seed, epoch)
        ids.extend(_walk(keys, offset + i, total) for i in range(taken))
        position += taken
    return tuple(ids)


def samples(seed: int, step: int, global_batch: int, total: int) -> tuple[int, ...]:
    """Sample ids of step ``step`` (0-based), in order; every id comes exactly once in each epoch."""
    return samples_at(seed, step * global_batch, global_batch, total)


def held_out(first: int, count: int, total: int) -> tuple[int, ...]:
    """Validation sample ids ``first`` .. ``first + count``: one fixed shuffle for all jobs, steps and seeds.

    Shuffled so that a few samples already speak for all documents; more than ``total`` of them start over.
    """
    if total < 1:
        raise ValueError("an order needs at least one sample")
    keys = _keys(_HELD_OUT_SEED, 0)
    return tuple(_walk(keys, position % total, total) for position in range(first, first + count))
