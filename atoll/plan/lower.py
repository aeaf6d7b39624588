"""From a plan to its program, in named passes:

    layout    cuts, workers, edges between stages                              (plan.layout)
    buckets   which gradients are summed where                                 (plan.buckets)
    compute   the schedule's order, filled in with edges, inputs and buckets
    sends     each activation and delta is sent as soon as it is written
    exchange  buckets are summed among their holders                           (plan.exchange)
    agree     vote, commit, update                                             (plan.agreement)
    weave     receives, where they are needed                                  (plan.weave)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.graph.graph import DTYPE_BYTES, Edge, Graph
from atoll.plan.agreement import agree
from atoll.plan.buckets import BucketPlan, plan_buckets
from atoll.plan.exchange import exchange
from atoll.plan.job import Precision
from atoll.plan.layout import Layout, ReplicaLayout
from atoll.plan.plan import Plan
from atoll.plan.weave import weave_receives
from atoll.policies.collectives.table import find as find_collective
from atoll.policies.schedules.table import find as find_schedule
from atoll.program.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Buffer,
    Forward,
    Instruction,
    Load,
    Recompute,
    Save,
    Send,
    Update,
    Vote,
)
from atoll.program.program import Program, WorkerProgram

__all__ = ["lower"]


def lower(plan: Plan, graph: Graph, islands: Mapping[str, str], precision: Precision, kind: str = "train",
          rule: str = "adamw") -> Program:
    """Return the program of one step.

    ``islands``: island of each worker. ``kind``: "train"; "evaluate" (forward only; take the plan from
    ``layout.evaluation_plan``); "save" (every worker writes its state). Raises ``PlanError`` on an impossible plan.
    """
    layout = Layout.of(plan, graph)
    workers = layout.workers
    island = {worker: islands[worker] for worker in workers}
    collective = find_collective(plan.collective)
    buckets = plan_buckets(plan, layout, island, precision.master, collective) if kind != "evaluate" else ()
    drafts: dict[str, list[Instruction]] = {}
    for replica in layout.replicas:
        if kind == "save":
            computed: dict[str, list[Instruction]] = {worker: [] for worker in replica.ranks}
        else:
            orders = _orders(plan, replica, kind)
            computed = {worker: _compute(orders[rank], replica, layout, buckets, worker, kind)
                        for rank, worker in enumerate(replica.ranks)}
        drafts.update(computed)
    element_bytes = DTYPE_BYTES[precision.master]
    if kind == "train":
        exchange(drafts, buckets, collective, element_bytes)
    for worker, instructions in drafts.items():
        mine = [bucket for bucket in buckets if worker in bucket.stages]
        if kind == "save":
            instructions.append(_save(worker, layout, mine, element_bytes))
        evidence = tuple(summed for bucket in mine for summed in _summed(bucket)) if kind == "train" else ()
        instructions.append(_vote(worker, mine, evidence, instructions, kind))
        instructions.extend(agree(worker, workers, island))
        if kind == "train":
            instructions.append(Update(rule=rule, stages=layout.replica(worker).stages_of(worker), gradients=evidence))
    woven = weave_receives(drafts)
    return Program(kind=kind, microbatch_samples=plan.microbatch_samples, buckets=tuple(b.bucket for b in buckets),
                   workers=tuple(_part(worker, layout, buckets, woven[worker]) for worker in workers))


def _part(worker: str, layout: Layout, buckets: Iterable[BucketPlan], instructions: tuple[Instruction, ...]) -> WorkerProgram:
    replica = layout.replica(worker)
    return WorkerProgram(worker=worker, replica=replica.number,
                         stages=tuple(replica.stages[stage] for stage in replica.stages_of(worker)),
                         buckets=tuple(b.bucket.index for b in buckets if worker in b.stages),
                         instructions=instructions)  # type: ignore[arg-type]


def _orders(plan: Plan, replica: ReplicaLayout, kind: str) -> tuple[tuple[Instruction, ...], ...]:
    """Bare compute instructions per rank; forward only for evaluation, stage by stage."""
    if kind == "train":
        return find_schedule(plan.schedule).order(len(replica.ranks), replica.microbatches, plan.chunks)
    return tuple(tuple(Forward(stage=stage, microbatch=microbatch) for stage in replica.stages_of(worker)
                       for microbatch in range(replica.microbatches)) for worker in replica.ranks)


def _compute(order: tuple[Instruction, ...], replica: ReplicaLayout, layout: Layout, buckets: tuple[BucketPlan, ...],
             worker: str, kind: str) -> list[Instruction]:
    """The worker's compute in the schedule's order, filled in, with its loads, recomputations and sends."""
    result: list[Instruction] = []
    for bare in order:
        assert isinstance(bare, Forward | Backward | BackwardInput | BackwardWeight)
        gradients: tuple[Buffer, ...] = tuple(
            ("gradient", b.bucket.index, chunk) for b in buckets if bare.stage in b.stages.get(worker, ())
            for chunk in range(b.bucket.chunks))
        if isinstance(bare, Forward):
            result.extend(_forward(bare, replica, layout, worker, kind))
        else:
            result.extend(_backward(bare, replica, layout.samples, worker, gradients))
    return result


def _forward(bare: Forward, replica: ReplicaLayout, layout: Layout, worker: str, kind: str) -> list[Instruction]:
    stage, microbatch = bare.stage, bare.microbatch
    low, high = replica.cuts[stage], replica.cuts[stage + 1]
    inputs = layout.index.inputs_of(low, high)
    outward = [edge for edge in replica.edges if edge.source == stage]
    keep = "" if kind == "evaluate" else "kept" if replica.recompute[stage] else "saved"
    result: list[Instruction] = []
    if inputs:
        result.append(Load(stage=stage, microbatch=microbatch,
                           size_bytes=sum(tensor.size_bytes(layout.samples) for tensor in inputs)))
    result.append(Forward(stage=stage, microbatch=microbatch, keep=keep, takes_input=bool(inputs),
                          sources=tuple(edge.source for edge in replica.edges if edge.target == stage),
                          targets=tuple(edge.target for edge in outward), gives_loss=stage == len(replica.stages) - 1))
    result.extend(Send(buffer=("activation", stage, edge.target, microbatch), peer=replica.workers[edge.target],
                       size_bytes=edge.forward_bytes(layout.samples))
                  for edge in outward if replica.workers[edge.target] != worker)
    return result


def _backward(bare: Backward | BackwardInput | BackwardWeight, replica: ReplicaLayout, samples: int, worker: str,
              gradients: tuple[Buffer, ...]) -> list[Instruction]:
    stage, microbatch = bare.stage, bare.microbatch
    if isinstance(bare, BackwardWeight):
        return [BackwardWeight(stage=stage, microbatch=microbatch, gradients=gradients)]

    def differentiable(edge: Edge) -> bool:
        return edge.backward_bytes(1) > 0

    inward = [edge for edge in replica.edges if edge.target == stage and differentiable(edge)]
    result: list[Instruction] = []
    if replica.recompute[stage]:
        result.append(Recompute(stage=stage, microbatch=microbatch))
    result.append(type(bare)(stage=stage, microbatch=microbatch, gradients=gradients,
                             sources=tuple(edge.source for edge in inward),
                             targets=tuple(edge.target for edge in replica.edges
                                           if edge.source == stage and differentiable(edge))))
    result.extend(Send(buffer=("delta", edge.source, stage, microbatch), peer=replica.workers[edge.source],
                       size_bytes=edge.backward_bytes(samples))
                  for edge in inward if replica.workers[edge.source] != worker)
    return result


def _summed(plan: BucketPlan) -> tuple[Buffer, ...]:
    kind = "gradient" if plan.how == "alone" else "reduced"
    return tuple((kind, plan.bucket.index, chunk) for chunk in range(plan.bucket.chunks))


def _save(worker: str, layout: Layout, buckets: list[BucketPlan], element_bytes: int) -> Save:
    """Weights and two moments of everything this worker is the first holder of (other holders have the same)."""
    elements = sum(plan.bucket.elements for plan in buckets if plan.bucket.holders[0] == worker)
    return Save(worker=worker, stages=layout.replica(worker).stages_of(worker), size_bytes=3 * elements * element_bytes)


def _vote(worker: str, buckets: list[BucketPlan], evidence: tuple[Buffer, ...], instructions: list[Instruction],
          kind: str) -> Vote:
    if kind == "save":
        evidence = (("snapshot", worker),)
    elif any(isinstance(instruction, Forward) and instruction.gives_loss for instruction in instructions):
        evidence += (("loss",),)
    counted = tuple(plan.bucket.index for plan in buckets if plan.bucket.holders[0] == worker) if kind == "train" else ()
    return Vote(worker=worker, counted=counted, evidence=evidence)
