"""A worker with a disk of its own: it hands its shard over and keeps only the newest that it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atoll.program.instructions import Save
from atoll.runtime import assembly
from atoll.runtime.checkpoint.shards import step_folder


class Head:
    def __init__(self) -> None:
        self.bytes: list[int] = []

    def upload(self, chunks: Iterator[bytes]) -> None:
        self.bytes.append(sum(map(len, chunks)))


@pytest.mark.parametrize("elsewhere", [True, False])
def test_what_a_worker_wrote_is_pruned_where_the_head_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             elsewhere: bool) -> None:
    monkeypatch.setattr(assembly, "worker_tensors", lambda store, optimizer, names: {"parameter/w": torch.ones(3)})
    fetched = step_folder(tmp_path, 1) / "manifest.json"
    fetched.parent.mkdir()
    fetched.write_text("{}")
    head = Head()
    saver = assembly._Saver(tmp_path, "b1", ("w",), head if elsewhere else None, keep=2)  # type: ignore[arg-type]
    saver.world = SimpleNamespace(store=None, optimizer=None)  # type: ignore[assignment]
    for step in (1, 2, 3, 4):
        saver(Save(worker="b1", stages=(0,), size_bytes=12), step)
    left = sorted(path.parent.name for path in tmp_path.glob("step-*/*.safetensors"))
    kept = (3, 4) if elsewhere else (1, 2, 3, 4)  # on the head's own disk the head prunes
    assert left == [step_folder(tmp_path, step).name for step in kept]
    assert fetched.exists(), "what was fetched is not its own"
    assert step_folder(tmp_path, 2).exists() is not elsewhere
    assert len(head.bytes) == (4 if elsewhere else 0)
