"""One worker through Atoll against a plain PyTorch loop: the same GPT, the same batches, the same optimizer.

Both train the same model from the same weights on the same tokens, step by step in turn, so that whatever else the
machine does meets both. The plain loop is Hugging Face's module with SDPA, gradient accumulation, clipping, AdamW (fused,
its fastest form on a CPU) and warm-up with cosine. Atoll runs captured stages through the lane engine and writes spans.
The figure is the median over pairs of steps of Atoll's time divided by the plain loop's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from contract import finish, quick

from atoll.graph.spec import ModelSpec
from atoll.plan.job import PRECISIONS
from atoll.plan.layout import Layout
from atoll.plan.lower import lower
from atoll.plan.plan import Plan, ReplicaPlan, StagePlacement
from atoll.policies.optim.spec import OptimizerSpec, learning_rate
from atoll.runtime.capture.stage import build_stage, capture
from atoll.runtime.clock import Clock
from atoll.runtime.engine import Engine
from atoll.runtime.kernels.optimizers import optimizer
from atoll.runtime.state import ParameterStore
from atoll.runtime.transport.local import LocalHub
from atoll.runtime.worker_state import World
from atoll.runtime.world import Stop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTH, SAMPLES, MICROBATCHES = 128, 4, 2
CONFIG = {"vocab_size": 1024, "n_positions": LENGTH, "n_embd": 256, "n_layer": 4, "n_head": 4}
SPEC = OptimizerSpec()


class Tokens:
    """Random tokens, made beforehand for all steps."""

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, CONFIG["vocab_size"], (steps, SAMPLES * MICROBATCHES, LENGTH + 1), generator=generator)

    def microbatch(self, split: str, step: int, first: int, samples: int) -> dict[str, torch.Tensor]:
        block = self.rows[step, first:first + samples]
        return {"tokens": block[:, :-1].contiguous(), "targets": block[:, 1:].contiguous()}


def plain_step(module: torch.nn.Module, data: Tokens, steps: int) -> Callable[[int], float]:
    """A training step as anybody would write it; returns the loss of the step, summed over tokens."""
    leaves = list(module.parameters())
    rule = torch.optim.AdamW([{"params": [p for p in leaves if p.ndim >= 2], "weight_decay": SPEC.weight_decay},
                              {"params": [p for p in leaves if p.ndim < 2], "weight_decay": 0.0}],
                             betas=SPEC.betas, eps=SPEC.epsilon, fused=True)

    def run(step: int) -> float:
        for group in rule.param_groups:
            group["lr"] = learning_rate(SPEC, step, steps)
        rule.zero_grad(set_to_none=True)
        total = 0.0
        for microbatch in range(MICROBATCHES):
            batch = data.microbatch("train", step, microbatch * SAMPLES, SAMPLES)
            logits = module(batch["tokens"], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
            (loss / (SAMPLES * MICROBATCHES * LENGTH)).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(leaves, SPEC.clip_norm)
        rule.step()
        return total

    return run


def hugging_face() -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", **CONFIG, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
                                  eos_token_id=None)
    module: torch.nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return module.train()


def atoll_step(module: torch.nn.Module, data: Tokens, steps: int) -> Callable[[int], float]:
    """The same step as a program of one worker, from the weights of ``module``."""
    captured = capture(ModelSpec(family="gpt2", config=CONFIG), LENGTH)
    graph = captured.graph
    placement = StagePlacement(first=graph.operators[0].name, last=graph.operators[-1].name, worker="here", recompute=False)
    plan = Plan(job="overhead", cluster="here", graph=graph.name, schedule="1f1b", chunks=1, microbatch_samples=SAMPLES,
                replicas=(ReplicaPlan(stages=(placement,), microbatches=MICROBATCHES),), bucket_bytes=1 << 25,
                collective="ring", native=True)
    program = lower(plan, graph, {"here": "island"}, PRECISIONS["fp32"])
    stage = build_stage(captured, 0, len(graph.operators), device="cpu")
    weights = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in stage.parameters.items():
            parameter.copy_(weights[name])
    store, stop = ParameterStore({0: stage}, program.buckets, torch.float32), Stop()
    world = World(name="here", program=program, stages={0: stage}, loss=graph.loss, store=store,
                  edges={(edge.source, edge.target): edge for edge in Layout.of(plan, graph).replicas[0].edges},
                  optimizer=optimizer(store, SPEC), optimizer_spec=SPEC, total_steps=steps,
                  step_tokens=SAMPLES * MICROBATCHES * LENGTH, tokens_per_sample=LENGTH,
                  channel=LocalHub(["here"]).channel("here", stop), batches=data, stop=stop, clock=Clock())
    engine = Engine(world)
    return lambda step: engine.run_step(step).loss_sum


def timed(run: Callable[[int], float], step: int) -> tuple[float, float]:
    started = time.perf_counter()
    loss = run(step)
    return time.perf_counter() - started, loss


def main() -> int:
    steps, warm = (26, 4) if quick(__doc__ or "") else (84, 4)
    torch.set_num_threads(1)
    data, module = Tokens(steps), hugging_face()
    runs = {"atoll": atoll_step(module, data, steps), "plain": plain_step(module, data, steps)}
    times: dict[str, list[float]] = {"atoll": [], "plain": []}
    apart = 0.0
    for step in range(steps):
        losses = {}
        for name in ("atoll", "plain") if step % 2 else ("plain", "atoll"):
            seconds, losses[name] = timed(runs[name], step)
            if step >= warm:
                times[name].append(seconds)
        apart = max(apart, abs(losses["atoll"] / losses["plain"] - 1))
    ratios = [a / p for a, p in zip(times["atoll"], times["plain"], strict=True)]
    figures = {"ratio": statistics.median(ratios), "atoll_step_s": statistics.median(times["atoll"]),
               "plain_step_s": statistics.median(times["plain"]), "ratio_first_quartile": statistics.quantiles(ratios, n=4)[0],
               "ratio_third_quartile": statistics.quantiles(ratios, n=4)[2], "pairs": len(ratios), "losses_apart": apart}
    print(f"a step: Atoll {figures['atoll_step_s'] * 1e3:.1f} ms, plain PyTorch {figures['plain_step_s'] * 1e3:.1f} ms; "
          f"median ratio of {len(ratios)} pairs {figures['ratio']:.4f}")

    def picture(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(ratios, ".", label="one pair of steps")
        axes.axhline(figures["ratio"], color="black", label=f"median {figures['ratio']:.3f}")
        axes.axhline(1.03, color="red", linestyle="--", label="goal 1.03")
        axes.set(xlabel="pair", ylabel="step time, Atoll / plain PyTorch", title="One worker through Atoll")
        axes.legend()

    return finish("overhead", figures, {"ratio": ("<=", 1.03), "losses_apart": ("<=", 1e-4)}, picture)


if __name__ == "__main__":
    sys.exit(main())
