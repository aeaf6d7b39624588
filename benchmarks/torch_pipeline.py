"""The other side of ``pipeline.py``: four processes of ``torch.distributed.pipelining``. Not run alone.

The stages are Atoll's own stage modules wrapped as ``torch.nn.Module``, all else is PyTorch's: ``PipelineStage``,
``Schedule1F1B``, a Gloo process group, ``clip_grads_with_norm_``, fused AdamW. The gradient norm and the loss are summed
over the four in one all-reduce, so that everybody clips alike.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline import STAGES, Gate, Setting, cuts
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

from atoll.policies.optim.spec import learning_rate
from atoll.records import load
from atoll.runtime.capture.stage import Captured, Stage, build_stage, capture
from atoll.runtime.capture.weights import initialise
from atoll.runtime.data.packed import PackedBatches, prepare
from atoll.runtime.worker import leave


class Wrapped(torch.nn.Module):
    """A stage with one tensor in and one out, as PyTorch's pipelines want it."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        for name, parameter in stage.parameters.items():
            self.register_parameter(name.replace(".", "_"), parameter)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.stage({self.stage.inputs[0]: tensor})[self.stage.outputs[0]]


def main(folder: Path, gate: str, data: Path) -> int:
    """Capture once, then be four processes. Returns 0 if all four ended well."""
    setting = load(folder / "setting.yaml", Setting)
    torch.set_num_threads(1)
    captured = capture(setting.job.model, setting.length, setting.samples)
    children = []
    for rank in range(STAGES):
        child = os.fork()
        if not child:
            code = 1
            try:
                train(rank, setting, captured, folder, Gate(gate, "torch"), data)
                code = 0
            except BaseException:
                traceback.print_exc()
            leave(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


def train(rank: int, setting: Setting, captured: Captured, folder: Path, gate: Gate, data: Path) -> None:
    """All steps of one stage."""
    job = setting.job
    bounds = cuts(captured, setting.layers)
    last = rank == STAGES - 1
    stage = build_stage(captured, bounds[rank], bounds[rank + 1] - last, device="cpu")  # the loss is the schedule's
    initialise(stage.parameters, captured, job.seed)
    assert len(stage.inputs) == len(stage.outputs) == 1, f"stage {rank}: {stage.inputs} -> {stage.outputs}"
    batches = PackedBatches(prepare(job.data, job.sequence_length, data), seed=job.seed, global_batch=job.global_batch,
                            sequence_length=job.sequence_length)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=STAGES)
    schedule = Schedule1F1B(PipelineStage(Wrapped(stage), rank, STAGES, torch.device("cpu")), setting.microbatches,
                            loss_fn=lambda logits, targets: cross_entropy(
                                logits.flatten(0, 1), targets.flatten(), reduction="sum") / job.step_tokens,
                            scale_grads=False)
    leaves = list(stage.parameters.values())
    rule = torch.optim.AdamW([{"params": [p for p in leaves if p.ndim >= 2], "weight_decay": job.optimizer.weight_decay},
                              {"params": [p for p in leaves if p.ndim < 2], "weight_decay": 0.0}],
                             betas=job.optimizer.betas, eps=job.optimizer.epsilon, fused=True)
    losses = []
    for step in range(job.total_steps):
        if step % setting.turn == 0:
            gate.wait()
        for group in rule.param_groups:
            group["lr"] = learning_rate(job.optimizer, step, job.total_steps)
        rule.zero_grad()
        batch = batches.microbatch("train", step, 0, job.global_batch) if rank == 0 or last else {}
        parts: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch["tokens"])
        elif last:
            schedule.step(target=batch["targets"], losses=parts, return_outputs=False)
        else:
            schedule.step()
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        sums = torch.stack([torch.nn.utils.get_total_norm(gradients).double().square(),
                            torch.stack(parts).double().sum().detach() if last else torch.zeros((), dtype=torch.float64)])
        dist.all_reduce(sums)
        norm = sums[0].sqrt().float()
        if norm > job.optimizer.clip_norm:
            torch.nn.utils.clip_grads_with_norm_(leaves, job.optimizer.clip_norm, norm)
        rule.step()
        losses.append(float(sums[1]) * job.step_tokens)
        if (step + 1) % setting.turn == 0:
            gate.done()
    if last:
        (folder / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
