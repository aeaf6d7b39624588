"""Membership: many seeded orders of events through coordinators that restart and are copied, members that die and return,
links that break; and the journal: events a second onto the disk, seconds until a coordinator is back.

The walks are those of ``tests/fleet.py``: no two generations at work at once at any moment, every journal gives its
coordinator's state, and once the faults end a generation works.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from contract import finish, quick

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from atoll.membership.events import Committed
from atoll.membership.journal import Journal
from tests.fleet import PATIENCE, walk
from tests.test_membership import EVENTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TURNS = 120


def walked(seeds: range) -> tuple[int, int, int, int, str]:
    """(events, generations begun, steps agreed on, walks that failed, the first failure)."""
    events = begun = steps = failed = 0
    first = ""
    for seed in seeds:
        try:
            fleet = walk(random.Random(seed), TURNS)
        except AssertionError as error:
            failed += 1
            first = first or f"seed {seed}: {error}"
            continue
        events += sum(len(head.events) for head in fleet.heads)
        begun += fleet.started
        steps += len(fleet.history)
    return events, begun, steps, failed, first


def journal(count: int) -> tuple[float, float]:
    """(events a second, each on disk before the next; seconds to open again and replay them)."""
    with tempfile.TemporaryDirectory(prefix="atoll-journal-", dir=".") as folder:
        path = Path(folder) / "journal"
        with Journal(path, "run", PATIENCE) as opened:
            opened.append(*EVENTS[:6])
            begin = time.perf_counter()
            for step in range(count):
                opened.append(Committed(generation=1_000_001, step=step + 1, at_ns=step))
            rate = count / (time.perf_counter() - begin)
        begin = time.perf_counter()
        with Journal(path, "run", PATIENCE) as opened:
            assert opened.roster().committed == count
        return rate, time.perf_counter() - begin


def main() -> int:
    short = quick(__doc__ or "")
    walks, blocks = (10_000, 20) if short else (100_000, 100)
    size = walks // blocks
    begin = time.perf_counter()
    with multiprocessing.Pool(os.cpu_count()) as pool:
        results = pool.map(walked, [range(size * block, size * (block + 1)) for block in range(blocks)], chunksize=1)
    seconds = time.perf_counter() - begin
    for failure in [result[4] for result in results if result[4]][:3]:
        print(failure)
    rate, back = journal(2_000 if short else 20_000)
    figures = {"event_orders": walks, "failed": sum(result[3] for result in results), "turns_of_each": TURNS,
               "generations": sum(result[1] for result in results), "steps": sum(result[2] for result in results),
               "seconds": seconds, "journal_events_per_s": rate, "replay_s": back}

    def picture(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.hist([result[1] / size for result in results], bins=20)
        axes.set(xlabel="generations that began in a walk (mean of a block of walks)", ylabel="blocks",
                 title=f"{walks:,} orders of events, {figures['failed']} failed")

    goals = {"failed": ("<=", 0.0)} | ({} if short else {"event_orders": (">=", 100_000.0)})
    return finish("membership", figures, goals, picture)


if __name__ == "__main__":
    sys.exit(main())
