"""Flows on shared segments: a fluid model with max-min fair rates (Bertsekas and Gallager, Data Networks, 1992, section 6.5).

A *lane* is one ordered stream of messages (a worker to a peer, or one edge of a ring); at most one of its messages is in
flight. Whenever a flow starts or ends, the rates of all flows that share segments with it, also at second hand, are set
anew; the rest of the network is not touched. Three things make that cheap:

- a segment that carries all lanes in flight at their full rates is not *short* and joins nobody to anybody;
- lanes whose only limit is one short segment form a *pool*: all have the same rate, so it is enough to count how much each has
  been served (processor sharing), and a start or end costs O(log flows);
- elsewhere the rates for one set of lanes are worked out once and kept.

All arithmetic is in integers: an amount is bytes x 1e9 x ``SCALE``, a rate is bytes/s x ``SCALE``, so amount / rate is ns, a
segment divides exactly among up to 16 flows, and the order in which simultaneous flows start leaves no trace in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

__all__ = ["AMOUNT", "SCALE", "Fabric", "fair_rates", "flow_ns", "prune", "shared_with"]

SCALE = 720720
"""Least common multiple of 1..16."""
AMOUNT = 10**9 * SCALE
"""Amount of one byte."""

Route = tuple[int, ...]
"""Segments, as indices into a list of capacities (bytes/s)."""


def flow_ns(amount: int, bytes_per_s: int) -> int:
    """Time of a flow that has its way for itself, rounded up."""
    return -(-amount // (bytes_per_s * SCALE))


def prune(routes: Sequence[Route], capacity: Sequence[int], top: Sequence[int]) -> list[Route]:
    """Leave out segments that can never be short: those with room for all their lanes at once, each at its ``top`` rate."""
    wanted: dict[int, int] = {}
    for route, rate in zip(routes, top, strict=True):
        for segment in route:
            wanted[segment] = wanted.get(segment, 0) + rate
    return [tuple(segment for segment in route if wanted[segment] > capacity[segment]) for route in routes]


def shared_with(routes: Sequence[Route]) -> list[int]:
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


class Fabric:
    """The state of all flows. ``heap`` receives (time, lane) for ends that now seem next; an entry counts only if
    ``due[lane]`` still says that time when it comes up."""

    __slots__ = ("_amount", "_capacity", "_load", "_pool", "_pools", "_queued", "_rate", "_rates", "_routes", "_since", "_top",
                 "_users", "due", "heap")

    def __init__(self, routes: Sequence[Route], capacity: Sequence[int], top: Sequence[int],
                 heap: list[tuple[int, int]]) -> None:
        """``routes``: segments of each lane; ``capacity``: bytes/s of each segment; ``top``: of each lane alone."""
        lanes = len(routes)
        self.heap = heap
        self.due = [-1] * lanes
        self._queued = [-1] * lanes
        self._amount = [0] * lanes  # left at ``_since``; in a pool: what the pool will have served when this flow is through
        self._rate = [0] * lanes
        self._since = [0] * lanes
        self._top = [rate * SCALE for rate in top]
        self._pool: list[_Pool | None] = [None] * lanes
        self._routes = routes
        self._capacity = [rate * SCALE for rate in capacity]
        self._load = [0] * len(capacity)  # sum of the top rates of the lanes in flight
        self._users = [0] * len(capacity)  # lanes in flight, a bit mask
        self._pools: list[_Pool | None] = [None] * len(capacity)
        self._rates: dict[int, tuple[tuple[int, int], ...]] = {}

    def start(self, lane: int, amount: int, now: int) -> None:
        """Put ``amount`` > 0 on ``lane``, which must be free."""
        load, capacity, users, bit, top = self._load, self._capacity, self._users, 1 << lane, self._top[lane]
        short, several = -1, False
        for segment in self._routes[lane]:
            load[segment] += top
            users[segment] |= bit
            if load[segment] > capacity[segment]:
                several = short >= 0
                short = segment
        self._amount[lane] = amount
        self._since[lane] = now
        if short < 0:
            self._rate[lane] = top
            end = self.due[lane] = self._queued[lane] = now - (-amount // top)
            heappush(self.heap, (end, lane))
            return
        self._rate[lane] = 0
        pool = self._pools[short]
        if pool is not None and not several and top >= capacity[short]:
            pool.serve(now)
            self._enter(pool, lane, amount)
            self._next_of(pool, now)
        else:
            self._share(self._component(bit), now)

    def end(self, lane: int, now: int) -> None:
        """Take the flow on ``lane``, which is due now, off the network."""
        self.due[lane] = self._queued[lane] = -1
        pool = self._pool[lane]
        if pool is not None:
            pool.serve(now)
            heappop(pool.flows)
            pool.head = -1
            self._pool[lane] = None
        load, capacity, users, bit, top = self._load, self._capacity, self._users, 1 << lane, self._top[lane]
        freed = 0
        for segment in self._routes[lane]:
            users[segment] ^= bit
            if load[segment] > capacity[segment]:
                freed |= users[segment]
            load[segment] -= top
        if pool is not None:
            if pool.flows:
                self._next_of(pool, now)
            else:
                self._pools[pool.segment] = None
            return
        while freed:
            component = self._component(freed & -freed)
            self._share(component, now)
            freed &= ~component

    def _enter(self, pool: _Pool, lane: int, amount: int) -> None:
        done = self._amount[lane] = pool.served + amount
        self._pool[lane] = pool
        self.due[lane] = -1
        heappush(pool.flows, (done, lane))

    def _next_of(self, pool: _Pool, now: int) -> None:
        """Say when the first flow of a pool will be through."""
        done, lane = pool.flows[0]
        rest = (done - pool.served) * len(pool.flows)
        end = now - (-rest // pool.rate) if rest > 0 else now
        if pool.head >= 0 and pool.head != lane:
            self.due[pool.head] = -1
        pool.head = lane
        if self.due[lane] != end:
            self.due[lane] = end
            heappush(self.heap, (end, lane))

    def _component(self, seed: int) -> int:
        """All lanes in flight that share short segments with ``seed``, also at second hand (bit masks)."""
        load, capacity, users, routes = self._load, self._capacity, self._users, self._routes
        found = fresh = seed
        while fresh:
            reached = 0
            while fresh:
                low = fresh & -fresh
                fresh ^= low
                for segment in routes[low.bit_length() - 1]:
                    if load[segment] > capacity[segment]:
                        reached |= users[segment]
            fresh = reached & ~found
            found |= fresh
        return found

    def _share(self, component: int, now: int) -> None:
        """Set the rates of ``component`` and say when the first of its flows will be through."""
        rates = self._rates.get(component)
        if rates is None:
            lanes = _bits(component)
            segment = self._only_short(lanes)
            if segment >= 0:
                self._make_pool(segment, lanes, now)
                return
            rates = self._rates[component] = fair_rates(lanes, self._routes, self._capacity, self._top)
        current, due, amount, since, pools = self._rate, self.due, self._amount, self._since, self._pool
        first, first_lane = -1, -1
        for lane, rate in rates:
            if pools[lane] is not None:
                self._leave(lane, now)
            old = current[lane]
            if rate != old:
                rest = amount[lane] = amount[lane] - old * (now - since[lane])
                since[lane] = now
                current[lane] = rate
                due[lane] = end = now - (-rest // rate) if rest > 0 else now
            else:
                end = due[lane]
            if end < first or first < 0:
                first, first_lane = end, lane
        if self._queued[first_lane] != first:
            self._queued[first_lane] = first
            heappush(self.heap, (first, first_lane))

    def _only_short(self, lanes: Sequence[int]) -> int:
        """The one segment that is short for all ``lanes`` and the only limit of each; -1 where it is not so simple."""
        load, capacity = self._load, self._capacity
        found = {segment for lane in lanes for segment in self._routes[lane] if load[segment] > capacity[segment]}
        if len(found) != 1:
            return -1
        segment = found.pop()
        return segment if all(self._top[lane] >= capacity[segment] for lane in lanes) else -1

    def _make_pool(self, segment: int, lanes: Sequence[int], now: int) -> None:
        pool = _Pool(segment, self._capacity[segment], now)
        for lane in lanes:
            if self._pool[lane] is not None:
                self._leave(lane, now)
            else:
                self._amount[lane] -= self._rate[lane] * (now - self._since[lane])
            self._rate[lane] = 0
            self._queued[lane] = -1
            self._enter(pool, lane, self._amount[lane])
        self._pools[segment] = pool
        self._next_of(pool, now)

    def _leave(self, lane: int, now: int) -> None:
        """Turn a flow of a pool into one that is followed by itself; the whole pool goes, so its heap is left alone."""
        pool = self._pool[lane]
        assert pool is not None
        pool.serve(now)
        self._amount[lane] -= pool.served
        self._since[lane] = now
        self._rate[lane] = 0
        self._pool[lane] = None
        self._pools[pool.segment] = None
        self.due[lane] = -1


class _Pool:
    """The lanes in flight of a segment that is the only limit of each of them: all have the same rate.

    ``served``: amount that a flow in it from the beginning has got by ``since``; ``flows``: heap of (served when this one
    is through, lane); ``head``: the lane that was said to be next.
    """

    __slots__ = ("flows", "head", "rate", "segment", "served", "since")

    def __init__(self, segment: int, rate: int, now: int) -> None:
        self.segment = segment
        self.rate = rate
        self.served = 0
        self.since = now
        self.head = -1
        self.flows: list[tuple[int, int]] = []

    def serve(self, now: int) -> None:
        if now > self.since:
            self.served += self.rate * (now - self.since) // len(self.flows) if self.flows else 0
            self.since = now


def fair_rates(lanes: Sequence[int], routes: Sequence[Route], capacity: Sequence[int],
               top: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Max-min fair rates of ``lanes``: fill all at one pace; a lane stops at its ``top`` or when a segment is full.

    ``capacity``, ``top`` and the result are in one unit. Cost: O(segments x lanes) at worst.
    """
    users: dict[int, list[int]] = {}
    for lane in lanes:
        for segment in routes[lane]:
            if segment in users:
                users[segment].append(lane)
            else:
                users[segment] = [lane]
    count = {segment: len(several) for segment, several in users.items() if len(several) > 1}
    left = {segment: capacity[segment] for segment in count}
    limit = {lane: min([top[lane], *[capacity[segment] for segment in routes[lane] if segment not in count]])
             for lane in lanes}
    slowest = sorted(lanes, key=limit.__getitem__, reverse=True)
    rates: dict[int, int] = {}
    while len(rates) < len(limit):
        while slowest and slowest[-1] in rates:
            slowest.pop()
        pace, stopped = limit[slowest[-1]], [slowest[-1]]
        for segment, several in count.items():
            share = left[segment] // several
            if share < pace:
                pace, stopped = share, users[segment]
        pace = max(1, pace)
        for lane in stopped:
            if lane not in rates:
                rates[lane] = pace
                for segment in routes[lane]:
                    if segment in count:
                        left[segment] -= pace
                        count[segment] -= 1
                        if not count[segment]:
                            del count[segment]
    return tuple(rates.items())


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
