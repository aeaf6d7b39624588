"""A checkpoint as a Hugging Face folder, and text sampled from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from atoll.errors import CheckpointError, DataError, GraphError, WorkplaceError
from atoll.graph.spec import ModelSpec
from atoll.plan.job import Job
from atoll.runtime.capture.models import model_source
from atoll.runtime.checkpoint.shards import write_shard
from atoll.runtime.checkpoint.store import Facts, finish, job_facts
from atoll.runtime.data.tokenizer import Tokenizer, byte_level, train_bpe
from atoll.runtime.export import export
from atoll.runtime.generate import choose, generate

torch.set_num_threads(1)

SEQUENCE = 32
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 300, "n_positions": 48, "n_embd": 32, "n_layer": 3, "n_head": 4},
    "gpt2 untied": {"vocab_size": 300, "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4,
                    "tie_word_embeddings": False},
    "llama": {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48},
    "llama tied": {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                   "num_attention_heads": 4, "max_position_embeddings": 48, "tie_word_embeddings": True},
    "qwen3": {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48},
    "gpt_neox": {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "max_position_embeddings": 48},
}


class Bigrams(nn.Module):
    """A user's own module: the next token from this one."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten(), reduction="sum")


class Mute(Bigrams):
    logits = None  # type: ignore[assignment]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).sum()


def _module_job(name: str) -> Job:
    return Job(model=ModelSpec(module=f"{__name__}:{name}", arguments={"vocabulary": 257}), sequence_length=SEQUENCE,
               global_batch=2, steps=4)


def _job(shape: str) -> Job:
    model = ModelSpec(family=shape.split(maxsplit=1)[0], config=SHAPES[shape])
    return Job(model=model, sequence_length=SEQUENCE, global_batch=2, steps=4)


def _trained(folder: Path, job: Job, tokenizer: Tokenizer | None, *, change: str = "") -> nn.Module:
    """A run folder with one checkpoint of random weights, saved by two workers, and the module that it stands for."""
    source = model_source(job.model, SEQUENCE)
    torch.manual_seed(7)
    module = source.build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    weights = {f"parameter/{name.removeprefix(source.prefix)}": parameter.detach()
               for name, parameter in module.named_parameters()}
    if change == "missing":
        weights.popitem()
    elif change == "unknown":
        weights["parameter/nobody"] = torch.zeros(2)
    elif change == "shape":
        weights[next(iter(weights))] = torch.zeros(3, 3)
    names = list(weights)
    parts = {"north": names[:len(names) // 2], "south": names[len(names) // 2:]}
    entries = [write_shard(folder / "checkpoints", 4, worker, {name: weights[name] for name in part}
                           | {name.replace("parameter/", "exp_avg/"): torch.zeros_like(weights[name]) for name in part})
               for worker, part in parts.items()]
    finish(folder / "checkpoints", 4, entries, Facts(job=job_facts(job), step=4, updates=4, tokens=256, position=8))
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer")
    return module


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_loads_what_is_exported(tmp_path: Path, shape: str) -> None:
    import transformers

    module = _trained(tmp_path / "run", _job(shape), byte_level())
    out = export(tmp_path / "run", tmp_path / "out")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    tokens = torch.randint(0, 257, (3, SEQUENCE), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(tokens).logits
        assert torch.allclose(logits, module.model(tokens, use_cache=False).logits, atol=1e-5, rtol=0)
    assert logits.std() > 0.1
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 256
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (SHAPES[shape].get("tie_word_embeddings", shape == "gpt2"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = "def f(x):\n    return 'é漢'  # twice  "
    assert tokenizer(text)["input_ids"] == list(text.encode()) and tokenizer.decode(list(text.encode())) == text


def test_large_models_come_in_several_files_and_bpe_goes_along(tmp_path: Path) -> None:
    import transformers

    bpe = train_bpe(["many words make many tokens " * 9], 280)
    module = _trained(tmp_path / "run", _job("llama"), bpe)
    out = export(tmp_path / "run" / "checkpoints" / "step-00000004", tmp_path / "out", max_shard="40KB")
    assert len(list(out.glob("model-*.safetensors"))) > 1 and (out / "model.safetensors.index.json").is_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(model.lm_head.weight, module.model.lm_head.weight)
    assert transformers.AutoTokenizer.from_pretrained(out)("many words")["input_ids"] == bpe.encode("many words").tolist()


def test_an_exported_folder_is_a_model_folder_again(tmp_path: Path) -> None:
    """A job that fine-tunes what was exported has the same model in every field that says what it computes."""
    _trained(tmp_path / "run", _job("llama tied"), byte_level())
    out = export(tmp_path / "run", tmp_path / "out")
    again = Job(model=ModelSpec(folder=str(out), weights="folder"), sequence_length=SEQUENCE, global_batch=2, steps=4)
    models = [job_facts(job)["model"] for job in (again, _job("llama tied"))]
    assert models[0]["family"] == models[1]["family"] == "llama"
    assert {name: models[0]["config"][name] for name in models[1]["config"]} == models[1]["config"]


@pytest.mark.parametrize(("change", "message"), [("missing", "is missing"), ("unknown", "nobody"), ("shape", r"\(3, 3\)")])
def test_weights_that_do_not_fit_are_named(tmp_path: Path, change: str, message: str) -> None:
    _trained(tmp_path / "run", _job("llama"), byte_level(), change=change)
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_exported_is_said_and_nothing_is_written(tmp_path: Path) -> None:
    _trained(tmp_path / "run", _module_job("Bigrams"), byte_level())
    with pytest.raises(GraphError, match="no Hugging Face form"):
        export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(WorkplaceError, match="already exists"):
        export(tmp_path / "run", tmp_path / "run")
    with pytest.raises(CheckpointError, match="no such folder"):
        export(tmp_path / "none", tmp_path / "out")
    (tmp_path / "void").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        export(tmp_path / "void", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "void"}


def test_the_previous_good_checkpoint_is_exported_and_that_is_said(tmp_path: Path) -> None:
    _trained(tmp_path / "run", _job("gpt2"), byte_level())
    (tmp_path / "run" / "checkpoints" / "step-00000009").mkdir()
    (tmp_path / "run" / "checkpoints" / "step-00000009" / "manifest.json").write_text("{")
    said: list[str] = []
    export(tmp_path / "run", tmp_path / "out", say=said.append)
    assert "step 9 is skipped" in said[0] and "step 4 is used" in said[1]


# --- generation -------------------------------------------------------------------------------------------------


def test_greedy_text_is_what_transformers_generates(tmp_path: Path) -> None:
    import transformers

    _trained(tmp_path / "run", _job("llama"), byte_level())
    model = transformers.AutoModelForCausalLM.from_pretrained(export(tmp_path / "run", tmp_path / "out"))
    ids = torch.tensor([list(b"abc")])
    model.generation_config.suppress_tokens = list(range(257, 300))
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[0].tolist()
    assert generate(tmp_path / "run", "abc", tokens=20, temperature=0) == byte_level().decode(theirs)


@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_sampling_is_bound_to_its_seed_and_goes_past_the_positions(tmp_path: Path, shape: str) -> None:
    _trained(tmp_path / "run", _job(shape), byte_level())
    texts = [generate(tmp_path / "run", "def f", tokens=60, top_k=None, temperature=1.0, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("def f") for text in texts)


def test_the_cache_changes_nothing(tmp_path: Path) -> None:
    """Greedy continuation in one call equals asking for one token at a time from the grown prompt."""
    tokenizer = train_bpe(["many words make many tokens " * 9], 280)
    _trained(tmp_path / "run", _job("gpt2"), tokenizer)
    text = generate(tmp_path / "run", "many", tokens=6, temperature=0)
    from atoll.runtime.checkpoint.trained import open_trained
    from atoll.runtime.export import hugging_face_model

    trained = open_trained(tmp_path / "run")
    model = hugging_face_model(trained)
    ids = tokenizer.encode("many").tolist()
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1, :tokenizer.size].argmax()))
    assert text == tokenizer.decode(ids)


def test_a_users_module_generates_by_its_logits(tmp_path: Path) -> None:
    module = _trained(tmp_path / "run", _module_job("Bigrams"), byte_level())
    successor = module.table.weight.argmax(1)
    token, expected = ord("a"), b"a"
    for _ in range(40):
        token = int(successor[token])
        if token == 256:
            break
        expected += bytes([token])
    assert generate(tmp_path / "run", "a", tokens=40, temperature=0) == expected.decode(errors="replace")
    _trained(tmp_path / "mute", _module_job("Mute"), byte_level())
    with pytest.raises(GraphError, match="no method logits"):
        generate(tmp_path / "mute", "a")


def test_impossible_wishes_are_refused(tmp_path: Path) -> None:
    _trained(tmp_path / "run", _job("gpt2"), None)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        generate(tmp_path / "run", "a")
    for wrong in ({"tokens": -1}, {"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0},
                  {"top_p": 1.5}):
        with pytest.raises(DataError, match=next(iter(wrong))):
            generate(tmp_path / "run", "a", **wrong)  # type: ignore[arg-type]


def test_choosing_follows_the_distribution() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    source = torch.Generator().manual_seed(0)

    def shares(temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
        drawn = torch.tensor([choose(logits, temperature, top_k, top_p, source) for _ in range(4000)])
        return [(drawn == token).double().mean().item() for token in range(4)]

    assert shares(1.0, None, None) == pytest.approx([0.1, 0.4, 0.2, 0.3], abs=0.035)  # 4.5 standard deviations
    assert shares(1.0, 2, None) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.035)
    assert shares(1.0, None, 0.65) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.035)
    assert shares(1.0, None, 0.75) == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.035)
    assert shares(0.5, None, None) == pytest.approx([1 / 30, 16 / 30, 4 / 30, 9 / 30], abs=0.035)
    assert shares(0, None, None) == [0, 1, 0, 0]
