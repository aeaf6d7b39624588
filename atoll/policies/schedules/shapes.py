"""What several schedules share: how stages lie on ranks, and the record of a claim."""

from __future__ import annotations

from atoll.records import Record

__all__ = ["ScheduleClaim", "looped", "refuse_counts", "v_shaped"]


class ScheduleClaim(Record):
    """``peak_activations``: per rank the most ("saved", s, m) buffers alive at once, each freed at the end of its Backward
    or BackwardWeight. One counts one stage (chunk) of one microbatch."""

    peak_activations: tuple[int, ...]


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """Rank of each stage when the model passes all ranks in turn, ``chunks`` times."""
    return tuple(range(ranks)) * chunks


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Rank of each of 2 x ``ranks`` stages when the model goes down the ranks and comes back up."""
    return (*range(ranks), *reversed(range(ranks)))


def refuse_counts(name: str, ranks: int, microbatches: int, chunks: int, allowed: range) -> str | None:
    """Why the numbers are no pipeline at all, or not one of ``allowed`` chunks (None: they are)."""
    if ranks < 1 or microbatches < 1:
        return (f"{name} was asked for {ranks} ranks and {microbatches} microbatches; a pipeline has at least one rank and "
                "one microbatch")
    if chunks not in allowed:
        wanted = (f"exactly {allowed.start}" if len(allowed) == 1 else f"at least {allowed.start}")
        return f"{name} was asked for {chunks} stages a rank and has {wanted}; set chunks to {allowed.start}"
    return None
