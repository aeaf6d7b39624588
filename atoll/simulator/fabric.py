"""Flows on shared segments: a fluid model with max-min fair rates (Bertsekas and Gallager, Data Networks, 1992, section 6.5).

A *lane* is one ordered stream of messages (a worker to a peer, or one edge of a ring); at most one of its messages is in
flight. Whenever a flow starts or ends, the rates of all flows that share segments with it, also at second hand, are set
anew; the rest of the network is not touched. Rates for one set of lanes never change, so they are worked out once and kept.

All arithmetic is in integers: an amount is bytes x 1e9 x ``SCALE``, a rate is bytes/s x ``SCALE``, so amount / rate is ns, a
segment divides exactly among up to 16 flows, and the order in which simultaneous flows start leaves no trace in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush

__all__ = ["AMOUNT", "SCALE", "Fabric", "flow_ns"]

SCALE = 720720
"""Least common multiple of 1..16."""
AMOUNT = 10**9 * SCALE
"""Amount of one byte."""


def flow_ns(amount: int, bytes_per_s: int) -> int:
    """Time of a flow that has its way for itself, rounded up."""
    return -(-amount // (bytes_per_s * SCALE))


class Fabric:
    """The state of all flows. ``heap`` receives (time, lane) for every end that now seems due; an entry counts only if
    ``due[lane]`` still says that time when it comes up."""

    __slots__ = ("_capacity", "_left", "_overlap", "_rate", "_rates", "_routes", "_since", "_top", "active", "due", "heap")

    def __init__(self, routes: Sequence[tuple[int, ...]], capacity: Sequence[int], top: Sequence[int],
                 heap: list[tuple[int, int]]) -> None:
        """``routes``: segments (indices into ``capacity``, bytes/s) of each lane; ``top``: bytes/s of each lane alone."""
        lanes = len(routes)
        self.heap = heap
        self.active = 0
        self.due = [-1] * lanes
        self._left = [0] * lanes
        self._rate = [0] * lanes
        self._since = [0] * lanes
        self._top = [rate * SCALE for rate in top]
        self._routes = routes
        self._capacity = capacity
        self._overlap = overlaps(routes)
        self._rates: dict[int, tuple[tuple[int, int], ...]] = {}

    def start(self, lane: int, amount: int, now: int) -> None:
        """Put ``amount`` > 0 on ``lane``, which must be free."""
        self._left[lane] = amount
        self._since[lane] = now
        others = self._overlap[lane] & self.active
        self.active |= 1 << lane
        if others:
            self._rate[lane] = 0
            self.due[lane] = -1
            self._share(self._component(1 << lane), now)
        else:
            rate = self._rate[lane] = self._top[lane]
            end = self.due[lane] = now - (-amount // rate)
            heappush(self.heap, (end, lane))

    def end(self, lane: int, now: int) -> None:
        """Take the flow on ``lane``, which is due now, off the network."""
        self.due[lane] = -1
        self.active &= ~(1 << lane)
        others = self._overlap[lane] & self.active
        while others:
            component = self._component(others & -others)
            self._share(component, now)
            others &= ~component

    def _component(self, seed: int) -> int:
        """All active lanes that share segments with ``seed``, also at second hand (bit masks)."""
        overlap, active = self._overlap, self.active
        found = fresh = seed
        while fresh:
            reached = 0
            while fresh:
                low = fresh & -fresh
                reached |= overlap[low.bit_length() - 1]
                fresh ^= low
            fresh = reached & active & ~found
            found |= fresh
        return found

    def _share(self, component: int, now: int) -> None:
        rates = self._rates.get(component)
        if rates is None:
            rates = self._rates[component] = fair_rates(_bits(component), self._routes, self._capacity)
        current, due, left, since = self._rate, self.due, self._left, self._since
        for lane, rate in rates:
            old = current[lane]
            if rate != old:
                if old:
                    left[lane] -= old * (now - since[lane])
                since[lane] = now
                current[lane] = rate
                rest = left[lane]
                end = now - (-rest // rate) if rest > 0 else now
                if end != due[lane]:
                    due[lane] = end
                    heappush(self.heap, (end, lane))


def overlaps(routes: Sequence[tuple[int, ...]]) -> list[int]:
    """For each lane the other lanes (bit mask) that use one of its segments."""
    users: dict[int, int] = {}
    for lane, route in enumerate(routes):
        for segment in route:
            users[segment] = users.get(segment, 0) | 1 << lane
    result = []
    for lane, route in enumerate(routes):
        mask = 0
        for segment in route:
            mask |= users[segment]
        result.append(mask & ~(1 << lane))
    return result


def fair_rates(lanes: Sequence[int], routes: Sequence[tuple[int, ...]],
               capacity: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Max-min fair rates (bytes/s x ``SCALE``) of ``lanes``: fill all at one pace; whoever meets a full segment stops.

    Cost: O(segments x lanes) at worst.
    """
    left: dict[int, int] = {}
    users: dict[int, set[int]] = {}
    for lane in lanes:
        for segment in routes[lane]:
            left[segment] = capacity[segment] * SCALE
            users.setdefault(segment, set()).add(lane)
    rates: dict[int, int] = {}
    while users:
        tightest = min(users, key=lambda segment: left[segment] // len(users[segment]))
        rate = max(1, left[tightest] // len(users[tightest]))
        for lane in tuple(users[tightest]):
            rates[lane] = rate
            for segment in routes[lane]:
                left[segment] -= rate
                users[segment].discard(lane)
                if not users[segment]:
                    del users[segment]
    return tuple(rates.items())


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
