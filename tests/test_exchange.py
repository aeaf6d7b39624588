"""Where gradients are summed among the instructions: no circle of waits for any plan, and no lane held up without need."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.graph.graph import Graph, Operator, ParameterSpec, TensorSpec
from atoll.plan.job import PRECISIONS
from atoll.plan.lower import lower
from atoll.plan.plan import Plan, ReplicaPlan, StagePlacement
from atoll.program.check import check
from atoll.program.instructions import Native, Reduce, Send
from atoll.program.program import Program

pytestmark = pytest.mark.null

BLOCKS = 8
ISLANDS = ("reef", "lagoon", "bay")


def graph() -> Graph:
    """embed -> eight blocks -> head, tied to the embedding."""
    def hidden(number: int) -> TensorSpec:
        return TensorSpec(name=f"x{number}", shape=(1, 4, 8), dtype="float32")

    operators = [Operator(name="embed", kind="embedding", inputs=("tokens",), outputs=(hidden(0),), parameters=("w",))]
    operators += [Operator(name=f"block{i}", kind="linear", inputs=(f"x{i}",), outputs=(hidden(i + 1),), parameters=(f"b{i}",))
                  for i in range(BLOCKS)]
    loss = TensorSpec(name="loss", shape=(1,), dtype="float32")
    operators.append(Operator(name="head", kind="linear", inputs=(f"x{BLOCKS}", "targets"), outputs=(loss,), parameters=("w",)))
    tokens = tuple(TensorSpec(name=name, shape=(1, 4), dtype="int64") for name in ("tokens", "targets"))
    return Graph(name="toy", inputs=tokens, operators=tuple(operators), loss="loss", parameters=(
        ParameterSpec(name="w", shape=(16, 8), dtype="float32", aliases=("head.w",)),
        *(ParameterSpec(name=f"b{i}", shape=(8, 8), dtype="float32") for i in range(BLOCKS))))


def lowered(cuts: list[tuple[int, ...]], ranks: list[tuple[str, ...]], islands: dict[str, str], *, schedule: str = "1f1b",
            chunks: int = 1, bucket_bytes: int = 256, native: bool = False) -> Program:
    """``cuts``: per replica, the operators at which a new stage begins. ``ranks``: its workers, stage after stage."""
    names = [operator.name for operator in graph().operators]
    replicas = []
    for inner, workers in zip(cuts, ranks, strict=True):
        edges = (0, *inner, len(names))
        replicas.append(ReplicaPlan(microbatches=4, stages=tuple(
            StagePlacement(first=names[low], last=names[high - 1], worker=workers[stage % len(workers)], recompute=False)
            for stage, (low, high) in enumerate(pairwise(edges)))))
    plan = Plan(job="", cluster="toy", graph="toy", schedule=schedule, chunks=chunks, microbatch_samples=1,
                bucket_bytes=bucket_bytes, collective="ring", native=native, replicas=tuple(replicas))
    return lower(plan, graph(), islands, PRECISIONS["fp32"])


@st.composite
def plans(draw: st.DrawFn) -> Program:
    chunks = draw(st.sampled_from((1, 1, 2)))
    replicas = draw(st.integers(1, 4))
    cuts, ranks, islands = [], [], {}
    for replica in range(replicas):
        size = draw(st.sampled_from((2, 4) if chunks == 2 else (1, 2, 3, 4)))
        inner = draw(st.lists(st.integers(1, BLOCKS + 1), min_size=size * chunks - 1, max_size=size * chunks - 1, unique=True))
        cuts.append(tuple(sorted(inner)))
        ranks.append(tuple(f"r{replica}w{rank}" for rank in range(size)))
        islands |= {worker: draw(st.sampled_from(ISLANDS)) for worker in ranks[-1]}
    return lowered(cuts, ranks, islands, schedule="interleaved-1f1b" if chunks == 2 else "1f1b", chunks=chunks,
                   bucket_bytes=draw(st.sampled_from((4, 256, 600, 10**6))), native=draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(plans())
def test_no_plan_waits_in_a_circle_or_sums_what_is_not_whole(program: Program) -> None:
    check(program)
    for part in program.workers:
        summing: set[tuple[object, ...]] = set()
        for step in part.instructions:
            if isinstance(step, Reduce | Native):
                summing |= {buffer[:2] for buffer in step.reads if buffer[0] == "gradient"}
            else:
                assert not summing & {buffer[:2] for buffer in step.writes if buffer[0] == "gradient"}, part.worker


def test_a_first_hop_never_stands_behind_a_wait() -> None:
    """Two replicas cut differently: w00 shares some buckets with w10 and some with w11. What it has ready goes out at once,
    to both, whichever of them is late."""
    program = lowered([(6,), (3,)], [("w00", "w01"), ("w10", "w11")],
                      {"w00": "reef", "w01": "reef", "w10": "lagoon", "w11": "lagoon"})
    (part,) = (part for part in program.workers if part.worker == "w00")
    sums = [step for step in part.instructions if isinstance(step, Reduce) and step.target[0] in ("partial", "reduced")]
    waits = [any(source[0] == "partial" for source in step.sources) for step in sums]
    peers = {step.peer for step in part.instructions if isinstance(step, Send) and step.buffer[0] == "partial"}
    assert {"w10", "w11"} <= peers
    first = [step.target[1] for step, waiting in zip(sums, waits, strict=True) if not waiting]
    assert waits[:4] == [False] * 4 and True in waits[4:6], "the first hops of four buckets, then what waits"
    assert len(first) > 4 and first == sorted(first), "in the common order"
