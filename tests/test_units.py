"""Quantities as people write them, documents there and back, and the ring's promise of a light start. No torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll import records, units
from atoll.errors import DocumentError
from atoll.plan.job import Job

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(("kind", "text", "value"), [
    (units.Bandwidth, "100 Mbit/s", 12_500_000), (units.Bandwidth, "1 Gbit/s", 125_000_000),
    (units.Bandwidth, "2.5GB/s", 2_500_000_000), (units.Bytes, "16 GiB", 16 * 2**30), (units.Bytes, "1.5 kB", 1500),
    (units.Duration, "25 ms", 25_000_000), (units.Duration, "20 s", 20 * 10**9), (units.FlopRate, "312 TFLOP/s", 312 * 10**12),
    (units.Count, "10B", 10**10), (units.Count, "500k", 500_000), (units.Bytes, 4096, 4096)])
def test_people_write_units(kind: type[units.Quantity], text: object, value: int) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(("kind", "text"), [
    (units.Bandwidth, "100 Mbit"), (units.Bandwidth, "fast"), (units.Bytes, "-1 GiB"), (units.Duration, "25 mss"),
    (units.Duration, True), (units.Bytes, 1.5), (units.Bytes, None)])
def test_what_is_no_quantity_is_refused_with_an_example(kind: type[units.Quantity], text: object) -> None:
    with pytest.raises(ValueError, match=kind.example):
        kind.parse(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_formats_are_short_and_never_fail(value: int) -> None:
    for form in (units.format_bytes, units.format_bandwidth, units.format_duration, units.format_flop_rate, units.format_count,
                 units.format_flops):
        assert 0 < len(form(value)) < 24


def test_a_document_comes_back_as_it_went() -> None:
    job = records.load(ROOT / "examples/demo/job.yaml", Job)
    assert records.parse(records.to_yaml(job), Job) == job == records.parse(records.to_json(job), Job)
    assert records.digest(job) == records.digest(records.parse(records.to_yaml(job), Job))


def test_a_wrong_field_is_named_with_its_place_and_the_nearest_right_one() -> None:
    text = (ROOT / "examples/demo/job.yaml").read_text().replace("warmup_steps", "warmup_step")
    with pytest.raises(DocumentError, match=r"optimizer.*warmup_step.*warmup_steps"):
        records.parse(text, Job, source="job.yaml")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    records.write_atomically(target, "old")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "replace", broken)
    with pytest.raises(OSError, match="No space"):
        records.write_atomically(target, "new")
    assert target.read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_planning_a_known_model_needs_no_torch() -> None:
    words = ["atoll", "plan", "--model", "gpt2-small", "--tokens", "1M", "--no-advice", "--seconds", "0.2", "--cluster",
             "examples/clusters/home-and-lab.yaml"]
    code = (f"import sys; sys.argv = {words};"
            "from atoll.cli import main as entry\n"
            "try:\n    entry.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
            "loaded = {'torch', 'transformers', 'grpc', 'matplotlib', 'scipy'} & set(sys.modules); assert not loaded, loaded")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "tokens" in run.stdout
