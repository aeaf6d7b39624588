"""The checkpoint store: two phases, digests, fall-back, other plans, full disks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import CheckpointError, WorkplaceError
from atoll.graph.spec import ModelSpec
from atoll.plan.job import Job
from atoll.policies.optim.spec import OptimizerSpec
from atoll.runtime.checkpoint.shards import Piece, ShardEntry, encode, receive_shard, shard_chunks, write_shard
from atoll.runtime.checkpoint.store import Facts, Manifest, clean, finish, job_facts, open_checkpoint, open_latest, steps

torch.set_num_threads(1)

JOB = Job(name="tiny", model=ModelSpec(preset="gpt2-small"), sequence_length=8, global_batch=4, steps=10)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def _tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    tensors = {f"parameter/layer.{i}.weight": torch.randn(5 + i, 7, generator=source) for i in range(4)}
    tensors |= {f"exp_avg/layer.{i}.weight": torch.randn(5 + i, 7, generator=source).double() for i in range(4)}
    tensors["parameter/head.bias"] = torch.randn(9, generator=source).bfloat16()
    tensors["parameter/empty"] = torch.zeros(0, 3)
    tensors["parameter/scalar"] = torch.tensor(2.5)
    tensors["parameter/cube"] = torch.randn(3, 4, 5, generator=source)
    return tensors


def _facts(step: int, job: Job = JOB) -> Facts:
    return Facts(job=job_facts(job), step=step, updates=step, tokens=32 * step, position=4 * step, extra={"best": 1.5})


def _save(folder: Path, step: int, *, seed: int | None = None, keep: int = 2) -> Manifest:
    """Two workers, each half of the tensors."""
    tensors = _tensors(step if seed is None else seed)
    names = sorted(tensors)
    parts = {"north": names[:5], "south": names[5:]}
    entries = [write_shard(folder, step, worker, {name: tensors[name] for name in part}) for worker, part in parts.items()]
    return finish(folder, step, entries, _facts(step), keep=keep, expected=names)


def _equal(folder: Path, step: int, seed: int | None = None) -> bool:
    checkpoint = open_latest(folder, job_facts(JOB))
    wanted = _tensors(step if seed is None else seed)
    return checkpoint.facts == _facts(step) and set(checkpoint.names) == set(wanted) and all(
        _same(checkpoint.read(name), tensor) for name, tensor in wanted.items())


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(first, second)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    manifest = _save(tmp_path, 100)
    assert steps(tmp_path) == (100,) and (tmp_path / "step-00000100" / "manifest.json").is_file()
    assert _equal(tmp_path, 100)
    assert open_latest(tmp_path).notes == ()
    assert open_checkpoint(tmp_path / "step-00000100").manifest == manifest
    assert {path.suffix for path in (tmp_path / "step-00000100").iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_safetensors_library_reads_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file

    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    entry = write_shard(tmp_path, 1, "w", {"parameter/x": tensor, "parameter/view": tensor.t()})
    read = load_file(tmp_path / "step-00000001" / entry.file)
    assert _same(read["parameter/x"], tensor) and _same(read["parameter/view"], tensor.t().contiguous())
    finish(tmp_path, 1, [entry], _facts(1))
    assert _same(open_latest(tmp_path).read("parameter/view"), tensor.t().contiguous())


def test_unknown_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="parameter/x has dtype complex64"):
        write_shard(tmp_path, 1, "w", {"parameter/x": torch.zeros(2, dtype=torch.complex64)})


# --- other plans ------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple))
def test_any_plan_reads_what_any_plan_wrote(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject,
                                            shape: tuple[int, ...]) -> None:
    folder = tmp_path_factory.mktemp("plans")
    elements = prod(shape)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(elements))
    cuts = sorted({0, elements, *data.draw(st.lists(st.integers(0, elements), max_size=4))})
    entries = [write_shard(folder, 3, f"w{number}", {"moment/x": Piece(tensor.reshape(-1)[low:high], shape, low, high)})
               for number, (low, high) in enumerate(pairwise(cuts))]
    if data.draw(st.booleans()):
        entries.append(write_shard(folder, 3, "again", {"moment/x": Piece(tensor.reshape(-1)[:1], shape, 0, 1)}))
    finish(folder, 3, data.draw(st.permutations(entries)), _facts(3))
    checkpoint = open_latest(folder, job_facts(JOB))
    assert _same(checkpoint.read("moment/x"), tensor)
    low = data.draw(st.integers(0, elements))
    high = data.draw(st.integers(low, elements))
    assert _same(checkpoint.read_range("moment/x", low, high), tensor.reshape(-1)[low:high])


def test_ranges_of_whole_tensors(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    checkpoint = open_latest(tmp_path)
    for name, tensor in _tensors(1).items():
        for low, high in ((0, tensor.numel()), (1, tensor.numel() // 2), (tensor.numel() // 3, tensor.numel())):
            if low <= high:
                assert _same(checkpoint.read_range(name, low, high), tensor.reshape(-1)[low:high])
    with pytest.raises(CheckpointError, match=r"60 elements, asked for \[0:61\]"):
        checkpoint.read_range("parameter/cube", 0, 61)
    with pytest.raises(CheckpointError, match="no tensor 'parameter/none'"):
        checkpoint.read("parameter/none")


def test_only_the_shards_that_hold_a_name_are_read(tmp_path: Path) -> None:
    manifest = _save(tmp_path, 1)
    checkpoint = open_checkpoint(tmp_path / "step-00000001")
    needed = checkpoint.shards_of(["parameter/scalar"])
    assert [shard.worker for shard in needed] == ["south"]
    other = next(shard for shard in manifest.shards if shard.worker == "north")
    (tmp_path / "step-00000001" / other.file).unlink()
    assert checkpoint.read("parameter/scalar") == 2.5
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.read("exp_avg/layer.0.weight")


def test_gaps_and_contradictions_are_refused(tmp_path: Path) -> None:
    tensor = torch.arange(10.0)
    low = write_shard(tmp_path, 1, "a", {"x": Piece(tensor[:4], (10,), 0, 4)})
    high = write_shard(tmp_path, 1, "b", {"x": Piece(tensor[5:], (10,), 5, 10)})
    other = write_shard(tmp_path, 1, "c", {"x": Piece(tensor[4:].double(), (10,), 4, 10)})
    for entries, message in (([low, high], "elements from 4 of x"), ([low, other], "different shapes or dtypes")):
        with pytest.raises(CheckpointError, match=message):
            finish(tmp_path, 1, entries, _facts(1))
    with pytest.raises(CheckpointError, match="no worker saved y"):
        finish(tmp_path, 1, [low, high], _facts(1), expected=["y"])
    assert steps(tmp_path) == ()


# --- what crashes and rot leave ---------------------------------------------------------------------------------


def test_without_a_manifest_there_is_no_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    write_shard(tmp_path, 2, "north", _tensors(2))  # and then the run dies
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "step-00000003" / ".north-shard.safetensors.99.tmp").write_bytes(b"half")
    (tmp_path / "step-00000001" / ".stray.tmp").write_bytes(b"half")
    assert steps(tmp_path) == (1,) and _equal(tmp_path, 1)
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    assert not list((tmp_path / "step-00000001").glob(".*")) and _equal(tmp_path, 1)


def _damage(path: Path, kind: str) -> None:
    raw = bytearray(path.read_bytes())
    if kind == "truncated":
        path.write_bytes(raw[:-5])
    elif kind == "missing":
        path.unlink()
    else:
        raw[-3 if kind == "flipped" else 12] ^= 4
        path.write_bytes(raw)


@pytest.mark.parametrize("kind", ["truncated", "flipped", "flipped header", "missing"])
def test_a_rotten_shard_is_skipped_and_said(tmp_path: Path, kind: str) -> None:
    _save(tmp_path, 1)
    manifest = _save(tmp_path, 2)
    _damage(tmp_path / "step-00000002" / manifest.shards[1].file, kind)
    assert _equal(tmp_path, 1)
    notes = open_latest(tmp_path).notes
    assert len(notes) == 2 and "step 2 is skipped" in notes[0] and manifest.shards[1].file in notes[0]
    assert notes[1] == "the checkpoint of step 1 is used instead"
    with pytest.raises(CheckpointError, match=manifest.shards[1].file):
        open_checkpoint(tmp_path / "step-00000002").read("parameter/scalar")


@pytest.mark.parametrize("change", ["truncate", "flip", "empty", "schema", "escape"])
def test_a_rotten_manifest_is_skipped_and_said(tmp_path: Path, change: str) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    path = tmp_path / "step-00000002" / "manifest.json"
    text = path.read_text()
    changed = {"truncate": text[:-20], "flip": text.replace('"tokens":64', '"tokens":65'), "empty": "",
               "schema": text.replace("atoll-checkpoint/1", "atoll-checkpoint/9"),
               "escape": text.replace('"file":"north', '"file":"../north')}[change]
    assert changed != text
    path.write_text(changed)
    assert _equal(tmp_path, 1)
    assert "step 2 is skipped" in open_latest(tmp_path).notes[0]


def test_nothing_sound_and_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        open_latest(tmp_path / "none")
    for step in (1, 2):
        _damage(tmp_path / f"step-0000000{step}" / _save(tmp_path, step).shards[0].file, "flipped")
    with pytest.raises(CheckpointError, match=r"no sound checkpoint .*step 2 .*step 1 "):
        open_latest(tmp_path)


def test_the_newest_are_kept_and_the_last_good_outlives_a_failed_one(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        _save(tmp_path, step, keep=2)
        assert step in steps(tmp_path)
    assert steps(tmp_path) == (4, 3)
    entry = write_shard(tmp_path, 5, "north", {"x": torch.zeros(3)})
    with pytest.raises(CheckpointError):
        finish(tmp_path, 5, [entry], _facts(5), keep=1, expected=["y"])
    assert steps(tmp_path) == (4, 3) and _equal(tmp_path, 4)
    _save(tmp_path, 6, keep=0)
    assert steps(tmp_path) == (6,) and _equal(tmp_path, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def test_a_step_done_again_replaces_the_old_one_only_when_whole(tmp_path: Path) -> None:
    _save(tmp_path, 7, seed=1)
    write_shard(tmp_path, 7, "north", {name: tensor for name, tensor in _tensors(2).items() if "layer" in name})
    assert _equal(tmp_path, 7, seed=1)
    _save(tmp_path, 7, seed=2)
    assert _equal(tmp_path, 7, seed=2)
    assert len(list((tmp_path / "step-00000007").iterdir())) == 3


def test_after_a_rewind_newer_checkpoints_of_the_old_course_do_not_win(tmp_path: Path) -> None:
    """Step 20 is rotten, the run resumes from 10 and saves 15: 20 is out of the way, 10 still there."""
    for step in (10, 20):
        manifest = _save(tmp_path, step)
    _damage(tmp_path / "step-00000020" / manifest.shards[0].file, "flipped")
    assert _equal(tmp_path, 10)
    _save(tmp_path, 15)
    assert steps(tmp_path) == (15, 10) and _equal(tmp_path, 15)
    assert open_latest(tmp_path).notes == ()


# --- jobs -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_job_says_what_differs(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    other = Job(name="other", model=ModelSpec(preset="gpt2-small", config={"n_layer": 3}), sequence_length=8, global_batch=4,
                steps=10, seed=5, optimizer=OptimizerSpec(learning_rate=1.0))
    with pytest.raises(CheckpointError) as caught:
        open_latest(tmp_path, job_facts(other))
    for word in ("model.config.n_layer (12 in the checkpoint, 3 in the job)", "seed (0 in", "optimizer.learning_rate",
                 "step-00000001"):
        assert word in str(caught.value)
    assert "global_batch" not in str(caught.value) and "name" not in str(caught.value)


def test_what_does_not_change_the_curve_does_not_bind(tmp_path: Path) -> None:
    longer = Job(name="longer", model=ModelSpec(family="gpt2"), sequence_length=8, global_batch=4, steps=99, compile=True)
    assert job_facts(longer) == job_facts(JOB)  # the preset and the family with the same shape are one model
    assert job_facts(JOB, "digest")["data"] == {"digest": "digest"}
    assert job_facts(JOB, "a") != job_facts(JOB, "b")
    module = Job(model=ModelSpec(module="my.file:Net", arguments={"n": 2}), sequence_length=8, global_batch=4, steps=1)
    assert job_facts(module)["model"] == {"module": "my.file:Net", "arguments": {"n": 2}}


# --- shards over a link -----------------------------------------------------------------------------------------


def test_shards_travel_to_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    tensors = _tensors(4)
    entry = write_shard(tmp_path / "theirs", 4, "south", tensors)
    with pytest.raises(CheckpointError, match=r"shard south-.* of worker south is not in .*the folder must be shared"):
        finish(tmp_path / "head", 4, [entry], _facts(4))
    chunks = list(shard_chunks(tmp_path / "theirs", 4, entry))
    with pytest.raises(CheckpointError, match="worker south arrived with"):
        receive_shard(tmp_path / "head", 4, entry, [*chunks, b"x"])
    with pytest.raises(CheckpointError, match="not the name"):
        receive_shard(tmp_path / "head", 4, ShardEntry(worker="south", file="../../x", sha256=entry.sha256,
                                                       size_bytes=entry.size_bytes, tensors=entry.tensors), chunks)
    assert not (tmp_path / "head").exists() or not list((tmp_path / "head").rglob("*.*"))
    receive_shard(tmp_path / "head", 4, entry, chunks)
    finish(tmp_path / "head", 4, [entry], _facts(4))
    assert _equal(tmp_path / "head", 4)


def test_a_shard_can_be_streamed_without_a_disk(tmp_path: Path) -> None:
    import hashlib

    tensors = {"x": torch.randn(3_000_000), "y": torch.randn(5)}
    entries, chunks = encode(tensors)
    raw = [bytes(chunk) for chunk in chunks]
    assert len(raw) >= 4 and max(map(len, raw)) <= 4 << 20
    entry = write_shard(tmp_path, 1, "w", tensors)
    assert b"".join(raw) == (tmp_path / "step-00000001" / entry.file).read_bytes() and entries == entry.tensors
    assert hashlib.sha256(b"".join(raw)).hexdigest() == entry.sha256


def test_worker_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    entry = write_shard(tmp_path / "c", 1, "../../etc/passwd", {"x": torch.zeros(1)})
    assert Path(entry.file).name == entry.file and not entry.file.startswith(".")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# --- full disks -------------------------------------------------------------------------------------------------

_FULL = """
import sys
from pathlib import Path
import torch
from atoll.errors import WorkplaceError
from tests.test_checkpoint import _save, _equal
from atoll.runtime.checkpoint.shards import write_shard
from atoll.runtime.checkpoint.store import steps
folder = Path(sys.argv[1])
_save(folder, 1)
{limit}
try:
    write_shard(folder, 2, "north", {{"x": torch.zeros(1_000_000)}})
except WorkplaceError as error:
    print(error)
else:
    raise SystemExit("it was written")
assert steps(folder) == (1,) and _equal(folder, 1)
assert [path.name for path in folder.iterdir()] == ["step-00000001"], list(folder.iterdir())
"""


def _in_process(limit: str, *command: str, folder: Path) -> str:
    script = _FULL.format(limit=limit)
    result = subprocess.run([*command, sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False,
                            cwd=Path(__file__).parent.parent)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_write_the_system_refuses_leaves_nothing_and_the_previous_intact(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    message = _in_process(limit, folder=tmp_path / "run")
    assert "checkpoint of step 2" in message and "cannot be written" in message and message.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_said_and_the_previous_stays_intact(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec \"$@\""
    if subprocess.run(["unshare", "-m", "sh", "-c", mount, "sh", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this root may not mount")
    message = _in_process("", "unshare", "-m", "sh", "-c", mount, "sh", folder=tmp_path / "run")
    assert "checkpoint of step 2: the disk of" in message and "is full" in message and "checkpoint.keep" in message


def test_a_full_disk_while_finishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("atoll.runtime.checkpoint.store.write_atomically", full)
        with pytest.raises(WorkplaceError, match="is full"):
            _save(tmp_path, 2)
    assert steps(tmp_path) == (1,) and _equal(tmp_path, 1)
    _save(tmp_path, 2)
    assert _equal(tmp_path, 2)


def test_there_is_no_pickle(tmp_path: Path) -> None:
    manifest = _save(tmp_path, 1)
    json.loads((tmp_path / "step-00000001" / "manifest.json").read_bytes())
    for shard in manifest.shards:
        raw = (tmp_path / "step-00000001" / shard.file).read_bytes()
        header = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
        assert set(header) - {"__metadata__"} == {tensor.key for tensor in shard.tensors}


def test_small_numbers_in_documents_read_back() -> None:
    """A job's facts hold 1e-08, which YAML 1.1 takes for text; and a digest that looks like a number stays text."""
    from atoll.records import parse, to_json, to_yaml

    assert parse("epsilon: 1e-8\nlearning_rate: 3e-4\n", OptimizerSpec) == OptimizerSpec(epsilon=1e-8, learning_rate=3e-4)
    job = Job(name="1234567890123e45", model=ModelSpec(preset="gpt2-small"), sequence_length=8, global_batch=4, steps=1)
    for text in (to_json(job), to_yaml(job)):
        assert parse(text, Job) == job
