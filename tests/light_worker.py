"""A worker without a model, for tests of processes and links: each step hands a number once around the ring of workers.

Run as ``python tests/light_worker.py NAME --head ... --keys ...`` (what ``drive`` is given as its command). What it does
beside that is in ``documents.data``: {"step_s": pause in each turn, "fail": {worker: step at which it
raises}, "program": a digest to claim, "largest_bytes": of its messages}.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from atoll.cluster.calibration import Calibration
from atoll.cluster.network import Network
from atoll.errors import DataError
from atoll.runtime.clock import Clock
from atoll.runtime.control import Measure, Member, Report
from atoll.runtime.keys import Bundle
from atoll.runtime.liveness import Timeouts
from atoll.runtime.transport.links import Links
from atoll.runtime.worker import Documents, Place, Turn, leave, main
from atoll.runtime.world import Stop
from atoll.trace.span import Span


class LightCrew:
    card = ""

    def __init__(self, documents: Documents, place: Place, bundle: Bundle, times: Timeouts, clock: Clock, stop: Stop) -> None:
        self.documents, self.name, self.clock, self.stop = documents, place.name, clock, stop
        self.program = (documents.data or {}).get("program", documents.program)
        workers = documents.plan.workers
        position = workers.index(self.name)
        self.first = position == 0
        self.sends_to = [workers[(position + 1) % len(workers)]]
        self.receives_from = [workers[position - 1]]
        network = Network(documents.cluster)
        shaped = Path(documents.run) / "links.bin" if documents.cluster.emulation is not None else None
        self.links = Links(self.name, workers, network, documents.head, bundle, stop, times, buckets=shaped,
                           largest_message_bytes=(documents.data or {}).get("largest_bytes", 1 << 20),
                           device=torch.device("cpu"))
        self.at = ""

    def run(self, turn: Turn) -> Report:
        options = self.documents.data or {}
        if options.get("fail", {}).get(self.name) == turn.step:
            raise DataError("the corpus ends here")
        started = self.clock.now()
        label = f"{turn.kind}:{turn.step}"
        self.at = "2B3 on compute"
        time.sleep(options.get("step_s", 0.0))
        channel = self.links.channel
        total = torch.zeros(1, dtype=torch.float64)
        for lap in ("sum", "tell"):
            if not self.first:
                total = channel.receive(self.receives_from[0], f"{label}:{lap}")[0] + (lap == "sum")
            channel.send(self.sends_to[0], f"{label}:{lap}", [total])
            if self.first:
                total = channel.receive(self.receives_from[0], f"{label}:{lap}")[0]
        self.at = ""
        span = Span(worker=self.name, step=turn.step, instruction=0, name="0F0", lane="compute", start_ns=started,
                    end_ns=self.clock.now())
        return Report(kind=turn.kind, step=turn.step, spans=(span,), figures={
            "loss": float(total), "tokens": 8, "gradient_norm": 1.0, "learning_rate": 0.1, "committed": 1.0})

    def doing(self) -> str:
        return self.at

    def close(self) -> None:
        return None


def assemble(documents: Documents, place: Place, bundle: Bundle, times: Timeouts, clock: Clock, stop: Stop,
             member: Member) -> LightCrew:
    return LightCrew(documents, place, bundle, times, clock, stop)


def measure(request: Measure, worker: str, stop: Stop) -> tuple[Calibration, ...]:
    return (Calibration(kind="cpu-core", speed=1.0, graph=worker, work=1, precision="fp32", samples=request.sizes[0],
                        operators={}, update_ns_per_element=request.seconds, reduce_ns_per_byte=1.0, launch_ns=1),)


if __name__ == "__main__":
    torch.set_num_threads(1)
    leave(main(assemble, measure, sys.argv[1:]))
