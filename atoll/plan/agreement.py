"""How all workers agree that a step counts: votes gather in each island, islands exchange tallies, the total comes back.

A message crosses between two islands once in each direction and step, so the agreement costs one latency of the slowest link.
Sums run in the order of the workers and of the islands, so everyone holds the same bits.
"""

from __future__ import annotations

from atoll.program.instructions import Buffer, Commit, Instruction, Reduce, Send

__all__ = ["VOTE_BYTES", "agree"]

VOTE_BYTES = 32
"""Four float64: sum of squared gradients, sum of losses, tokens, count of non-finite values."""


def agree(worker: str, workers: tuple[str, ...], islands: dict[str, str]) -> tuple[Instruction, ...]:
    """What ``worker`` does between its Vote and its Commit (Receives are woven in by ``plan.weave``)."""
    own = islands[worker]
    names = tuple(dict.fromkeys(islands[name] for name in workers))
    members = {island: tuple(name for name in workers if islands[name] == island) for island in names}
    leader = {island: group[0] for island, group in members.items()}
    result: list[Instruction] = []

    def send(buffer: Buffer, peer: str) -> None:
        result.append(Send(buffer=buffer, peer=peer, size_bytes=VOTE_BYTES))

    if worker != leader[own]:
        send(("vote", worker), leader[own])
    else:
        votes: tuple[Buffer, ...] = tuple(("vote", name) for name in members[own])
        alone = len(names) == 1
        tally: Buffer = ("total",) if alone else ("tally", own)
        result.append(Reduce(target=tally, sources=votes, size_bytes=VOTE_BYTES * len(votes)))
        if not alone:
            for island in names:
                if island != own:
                    send(tally, leader[island])
            tallies: tuple[Buffer, ...] = tuple(("tally", island) for island in names)
            result.append(Reduce(target=("total",), sources=tallies, size_bytes=VOTE_BYTES * len(tallies)))
        for name in members[own][1:]:
            send(("total",), name)
    result.append(Commit(group=workers))
    return tuple(result)
