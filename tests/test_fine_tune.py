"""Fine-tuning as a whole: a Hugging Face folder made on the spot, trained by ``atoll train``, exported, loaded back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from atoll.cli.main import main
from atoll.policies.data.spec import DataSpec
from atoll.policies.optim.spec import OptimizerSpec, learning_rate
from atoll.runtime.data.packed import PackedBatches, prepare

STEPS, BATCH, LENGTH = 3, 4, 16
JOB = """
name: tune
model: {{folder: {folder}, weights: folder}}
data: {{source: texts, validation: 0}}
sequence_length: 16
global_batch: 4
steps: 3
optimizer: {{learning_rate: 0.001, warmup_steps: 1, clip_norm: 0}}
plan: {{stages: 2, replicas: 1, microbatch: 2, schedule: 1f1b, chunks: 1}}
"""
CLUSTER = """
islands: {here: {bandwidth: 10 Gbit/s}}
machines:
  - {name: a, island: here, devices: [{kind: cpu-core, memory: 1 GiB}]}
  - {name: b, island: here, devices: [{kind: cpu-core, memory: 1 GiB}]}
emulation: {cpu_share: 1.0}
"""


def folder_with_random_weights(path: Path) -> torch.nn.Module:
    """A small GPT-2 as ``transformers`` saves it; 257 tokens for the byte tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=32, vocab_size=257, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0, bos_token_id=256, eos_token_id=256)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(path)
    return model


def atoll(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["atoll", *words])
    try:
        main()
    except SystemExit as end:
        assert not end.code


def trained_plainly(model: torch.nn.Module, folder: Path) -> None:
    """What plain PyTorch makes of the same weights on the same batches."""
    packed = prepare(DataSpec(source="texts", validation=0), LENGTH, folder / "runs" / ".cache", base=folder)
    batches = PackedBatches(packed, seed=0, global_batch=BATCH, sequence_length=LENGTH)
    spec = OptimizerSpec(learning_rate=0.001, warmup_steps=1, clip_norm=0)
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == decayed], "weight_decay": decay}
              for decayed, decay in ((True, spec.weight_decay), (False, 0.0))]
    rule = torch.optim.AdamW(groups, lr=spec.learning_rate, betas=spec.betas, eps=spec.epsilon, fused=True)
    for step in range(STEPS):
        batch = batches.microbatch("train", step, 0, BATCH)
        logits = model(batch["tokens"]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch["targets"].flatten(), reduction="sum") / (BATCH * LENGTH)
        loss.backward()
        for group in rule.param_groups:
            group["lr"] = learning_rate(spec, step, STEPS)
        rule.step()
        rule.zero_grad()


def test_a_folder_is_trained_exported_and_loaded_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
    plain = folder_with_random_weights(tmp_path / "given")
    (tmp_path / "job.yaml").write_text(JOB.format(folder="given"))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    atoll(["train", "job.yaml", "--cluster", "cluster.yaml", "--json"], monkeypatch)
    atoll(["export", "runs/tune", "out", "--json"], monkeypatch)
    tokens = torch.arange(24).reshape(1, 24) * 7 % 257
    with torch.no_grad():
        before = plain(tokens).logits.clone()
    trained_plainly(plain, tmp_path)
    with torch.no_grad():
        expected, exported = plain(tokens).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
    assert (expected - before).abs().max() > 1e-3  # it did learn something
    torch.testing.assert_close(exported, expected, rtol=0, atol=1e-5)
