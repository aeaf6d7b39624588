"""What people get wrong: one sentence with the place and the remedy, an exit code, nothing written. No torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from atoll.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
JOB = (ROOT / "examples/demo/job.yaml").read_text()
CLUSTER = (ROOT / "examples/demo/cluster.yaml").read_text()


def run(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of ``atoll`` run inside ``folder``."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["atoll", *words])
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return int(code or 0), out, err  # type: ignore[call-overload]


CASES = {
    "unknown field": (JOB.replace("warmup_steps", "warmup_step"), CLUSTER,
                      ["job.yaml", "optimizer", "warmup_step", "warmup_steps"]),
    "impossible unit": (JOB, CLUSTER.replace("50 Mbit/s", "50 Mbit"), ["cluster.yaml", "50 Mbit", "Mbit/s"]),
    "unknown island": (JOB, CLUSTER.replace("between: [reef, lagoon]", "between: [reef, lagun]"), ["lagun", "lagoon"]),
    "unknown family": (JOB.replace("family: gpt2", "family: gpt7"), CLUSTER, ["gpt7", "known"]),
    "fits no plan": (JOB.replace("n_embd: 160", "n_embd: 8000"), CLUSTER, ["fits no plan", "lacks", "more memory on"]),
    "too long": (JOB.replace("sequence_length: 128", "sequence_length: 4096"), CLUSTER, ["4096", "128"]),
    "no steps": (JOB.replace("steps: 60", "steps: 0"), CLUSTER, ["steps", "0"]),
    "empty file": ("", CLUSTER, ["job.yaml", "empty"]),
    "no yaml": ("a: [1, 2", CLUSTER, ["job.yaml", "line"]),
    "unknown schedule": (JOB + "plan: {schedule: 1f2b}\n", CLUSTER, ["1f2b", "1f1b"]),
    "unknown precision": (JOB + "precision: fp12\n", CLUSTER, ["fp12", "bf16"]),
    "field twice": (JOB + "seed: 2\n", CLUSTER, ["seed"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_an_exit_code_and_nothing_written(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    job, cluster, expected = CASES[case]
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "cluster.yaml").write_text(cluster)
    before = sorted(path.name for path in tmp_path.iterdir())
    code, _, err = run(["plan", "job.yaml", "--cluster", "cluster.yaml", "--out", "plan.yaml"], tmp_path, monkeypatch, capsys)
    assert code != 0 and "Traceback" not in err
    flat = " ".join(err.split())
    assert flat.startswith("atoll: ") and all(word in flat for word in expected), flat
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_json_gives_one_object_for_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["plan", "missing.yaml", "--json"], tmp_path, monkeypatch, capsys)
    answer = json.loads(out)
    assert code == answer["exit_code"] != 0 and "missing.yaml" in answer["error"]


def test_a_plan_for_other_machines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    words = ["plan", "job.yaml", "--cluster", "cluster.yaml", "--out", "plan.yaml", "--no-advice", "--seconds", "0.1"]
    assert run(words, tmp_path, monkeypatch, capsys)[0] == 0
    plan = (tmp_path / "plan.yaml").read_text()
    used = next(name for name in ("coral", "sponge", "perch", "shrimp") if name in plan)
    (tmp_path / "plan.yaml").write_text(plan.replace(used, "nemo"))
    words = ["simulate", "job.yaml", "--cluster", "cluster.yaml", "--plan", "plan.yaml"]
    code, _, err = run(words, tmp_path, monkeypatch, capsys)
    assert code != 0 and "nemo" in err and "Traceback" not in err


def test_a_profile_of_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    measured = {"kind": "cpu-core", "speed": 1.0, "graph": "gpt2", "work": 1, "precision": "float32", "samples": 4,
                "operators": {}, "update_ns_per_element": 1.0, "reduce_ns_per_byte": 1.0, "launch_ns": 1}
    (tmp_path / "profile.json").write_text(json.dumps({"measured": [measured]}))
    for verb in ("plan", "simulate"):
        code, _, err = run([verb, "job.yaml", "--cluster", "cluster.yaml", "--profile", "profile.json"], tmp_path, monkeypatch,
                           capsys)
        assert code != 0 and "was not measured for this model" in " ".join(err.split())
