"""Whole runs through the command line, and what goes wrong in them: one sentence with the place and the remedy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.wire

ATOLL = (sys.executable, "-m", "atoll.cli.main")
JOB = """
name: small
model: {{family: gpt2, config: {{n_layer: 2, n_embd: 16, n_head: 2, n_positions: 16}}}}
data: {{source: words, tokenizer: {{kind: byte}}, validation: 0}}
sequence_length: 16
global_batch: 4
steps: {steps}
seed: {seed}
checkpoint: {{every: 2}}
max_pause: 20 s
"""
ALONE = """
islands: {home: {bandwidth: 1 Gbit/s}}
machines: [{name: here, island: home, devices: [{kind: cpu-core}]}]
"""


def folder_with_job(folder: Path, steps: int = 4, seed: int = 1) -> Path:
    words = folder / "words"
    words.mkdir(exist_ok=True)
    for number in range(8):
        (words / f"{number}.txt").write_text(" ".join(f"{number} times {other} is {number * other}." for other in range(40)))
    (folder / "job.yaml").write_text(JOB.format(steps=steps, seed=seed))
    (folder / "alone.yaml").write_text(ALONE)
    return folder


def atoll(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ATOLL, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **more})


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert said.startswith("atoll: ") and "Traceback" not in done.stderr, done.stderr
    return said


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with the checkpoints after two and four."""
    folder = folder_with_job(tmp_path_factory.mktemp("trained"))
    done = atoll(folder, "train", "job.yaml", "--cluster", "alone.yaml", "--run", "run", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["losses"]) == 4 and result["saved"] == 4
    assert (folder / "run" / "profile.json").exists()
    return folder


def copied(trained: Path, folder: Path) -> Path:
    subprocess.run(["cp", "-r", str(trained), str(folder / "copy")], check=True)
    return folder_with_job(folder / "copy", steps=6)


@pytest.mark.parametrize("harm", ["truncated", "flipped"])
def test_a_broken_shard_is_said_and_the_checkpoint_before_it_is_used(trained: Path, tmp_path: Path, harm: str) -> None:
    folder = copied(trained, tmp_path)
    (shard,) = (folder / "run/checkpoints/step-00000004").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    if harm == "truncated":
        del data[len(data) // 2:]
    else:
        data[-5] ^= 1
    shard.write_bytes(data)
    done = atoll(folder, "train", "job.yaml", "--cluster", "alone.yaml", "--run", "run", "--resume")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "step-00000004" in said and "going on after step 2 of 6" in said
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 2, 3, 4, 5]
    for early, late in zip(lines[2:4], lines[4:6], strict=True):
        assert early["loss"] == late["loss"], "resumed under the same plan, losses are equal to the bit"
    proved = json.loads(atoll(folder, "ledger", "run", "--json").stdout)
    assert proved["proof"] == {"steps": 6, "samples": 24, "epochs": 0, "rest": 24, "rewound": 2}
    assert proved["about"] | {"sequences": 0} == {"seed": 1, "global_batch": 4, "sequences": 0}


def test_a_ledger_with_a_lost_step_names_it(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path)
    lines = (folder / "run/ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "run/ledger.jsonl").write_text("".join([*lines[:2], *lines[3:]]))
    assert "found step 2 at position 8, expected step 1 at 4" in refusal(atoll(folder, "ledger", "run"))
    assert "name the folder of a run" in refusal(atoll(folder, "ledger", "nowhere"))


def test_a_checkpoint_of_another_job_is_refused(trained: Path, tmp_path: Path) -> None:
    folder = copied(trained, tmp_path)
    folder_with_job(folder, steps=6, seed=2)
    before = sorted(path.name for path in (folder / "run").rglob("*"))
    said = refusal(atoll(folder, "train", "job.yaml", "--cluster", "alone.yaml", "--run", "run", "--resume"))
    assert "seed (1 in the checkpoint, 2 in the job)" in said
    assert sorted(path.name for path in (folder / "run").rglob("*")) == before


def test_an_empty_corpus_and_one_shorter_than_a_sequence_are_refused(tmp_path: Path) -> None:
    folder = folder_with_job(tmp_path)
    for file in (folder / "words").iterdir():
        file.write_text("")
    for text, sentence in (("", "empty"), ("too short", "sequence")):
        (folder / "words/0.txt").write_text(text)
        said = refusal(atoll(folder, "train", "job.yaml", "--cluster", "alone.yaml", "--run", "run"))
        assert sentence in said
        assert not (folder / "run").exists()


def ports(count: int) -> list[int]:
    """Free ones, each with as many free ones after it."""
    for first in range(21000, 29000, 16):
        if all(_free(first + 4 * number + after) for number in range(count) for after in range(3)):
            return [first + 4 * number for number in range(count)]
    raise OSError("no free ports")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def two_machines(folder: Path) -> tuple[int, int]:
    first, second = ports(2)
    (folder / "two.yaml").write_text(f"""
islands: {{home: {{bandwidth: 1 Gbit/s}}, lab: {{bandwidth: 1 Gbit/s}}}}
machines:
  - {{name: a1, island: home, address: "127.0.0.1:{first}", devices: [{{kind: cpu-core}}]}}
  - {{name: b1, island: lab, address: "127.0.0.1:{second}", devices: [{{kind: cpu-core}}]}}
links: [{{between: [home, lab], bandwidth: 100 Mbit/s}}]
""")
    return first, second


def test_a_port_in_use_is_said_before_anything_is_written(tmp_path: Path) -> None:
    folder = folder_with_job(tmp_path)
    first, _ = two_machines(folder)
    with socket.create_server(("0.0.0.0", first)):
        said = refusal(atoll(folder, "train", "job.yaml", "--cluster", "two.yaml", "--machine", "a1", "--run", "run"))
    assert f"machine a1: port {first}" in said and "another port" in said
    assert not (folder / "run").exists()


def test_two_workers_that_claim_one_name(tmp_path: Path) -> None:
    """The second is refused in one sentence; the first and the run do not notice."""
    folder = folder_with_job(tmp_path, steps=40)
    two_machines(folder)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    head = subprocess.Popen([*ATOLL, "train", "job.yaml", "--cluster", "two.yaml", "--machine", "a1", "--run", "run"],
                            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    bundle = folder / "run/keys/b1.pem"
    deadline = time.monotonic() + 120
    while not bundle.exists() and head.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    (folder / "b1.pem").write_bytes(bundle.read_bytes())
    (folder / "b1.pem").chmod(0o600)
    command = [*ATOLL, "worker", "b1", "--cluster", "two.yaml", "--home"]
    workers = [subprocess.Popen([*command, name], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env=environment) for name in ("one", "two")]
    said = [worker.communicate(timeout=200) for worker in workers]
    out, err = head.communicate(timeout=200)
    assert head.returncode == 0, err + out
    assert sorted(worker.returncode == 0 for worker in workers) == [False, True]
    (sentence,) = [err for worker, (_, err) in zip(workers, said, strict=True) if worker.returncode]
    assert "already takes part" in sentence and "end one of them" in sentence and "Traceback" not in sentence


def test_a_worker_without_its_keys_is_told_where_they_come_from(tmp_path: Path) -> None:
    folder = folder_with_job(tmp_path)
    two_machines(folder)
    assert "there is no b1.pem here" in refusal(atoll(folder, "worker", "b1", "--cluster", "two.yaml"))


@pytest.mark.skipif(os.geteuid() != 0, reason="a full disk is made with a tmpfs, which needs root")
def test_a_full_disk_ends_the_run_in_one_sentence_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    folder = folder_with_job(tmp_path, steps=40)
    small = folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(small)], check=True)
    try:
        text = (folder / "job.yaml").read_text().replace("every: 2", "every: 2, keep: 30").replace("n_embd: 16", "n_embd: 32")
        (folder / "job.yaml").write_text(text)
        said = refusal(atoll(folder, "train", "job.yaml", "--cluster", "alone.yaml", "--run", "small/run"))
        assert "machine here failed while doing save after" in said and "is full" in said and "free space there" in said
        kept = sorted(path.parent.name for path in (small / "run/checkpoints").glob("step-*/manifest.json"))
        assert kept and kept[0] == "step-00000002", "what was saved before stays whole"
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
