"""What a job says about its model; turned into a graph without torch (``graph.build``) or by ``runtime.capture``."""

from __future__ import annotations

from typing import Any

from atoll.errors import DocumentError
from atoll.records import Record

__all__ = ["ModelSpec"]


class ModelSpec(Record):
    """Exactly one of ``preset``, ``family``, ``folder``, ``module``.

    ``preset``: a known shape ("gpt2-small", "llama-3-8b").  ``family`` + ``config``: a Hugging Face model type with
    its configuration fields.  ``folder``: a Hugging Face folder (config.json; its weights when ``weights`` is
    "folder").  ``module``: "package.file:Class" of the user's own ``nn.Module``, called with ``arguments``; it is
    called as ``module(**inputs)`` with tensors named by ``inputs`` and returns the loss summed over the samples.
    ``config`` may also override fields of a preset.
    """

    preset: str | None = None
    family: str | None = None
    folder: str | None = None
    module: str | None = None
    config: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    weights: str = "seed"

    def __post_init__(self) -> None:
        given = [name for name in ("preset", "family", "folder", "module") if getattr(self, name) is not None]
        if len(given) != 1:
            raise DocumentError("model: name exactly one of preset, family, folder, module; "
                                f"found {', '.join(given) or 'none'}")
        if self.weights not in ("seed", "folder"):
            raise DocumentError(f"model.weights: found {self.weights!r}, allowed: seed, folder")
        if self.weights == "folder" and self.folder is None:
            raise DocumentError("model.weights: 'folder' needs model.folder")
