"""What a job says about its data."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from atoll.records import Record

__all__ = ["KINDS", "SMALLEST_VOCABULARY", "DataSpec", "TokenizerSpec"]

KINDS = ("byte", "bpe", "path")
SMALLEST_VOCABULARY = 257


class TokenizerSpec(Record):
    """``kind``: "byte" (256 + end of document), "bpe" (trained on the corpus, ``vocabulary`` tokens) or "path" (a
    ``tokenizer.json`` or Hugging Face folder at ``path``)."""

    kind: str = "byte"
    vocabulary: int = 4096
    path: str | None = None


class DataSpec(Record):
    """``source``: "stdlib" (the Python standard library's own source files) or a path to text files, ``.jsonl``,
    ``.parquet`` or a Hugging Face data set saved on disk. ``field``: the text column where there are columns.
    ``validation``: fraction of the documents held out, chosen by name, not by position."""

    source: str = "stdlib"
    field: str = "text"
    validation: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    tokenizer: TokenizerSpec = TokenizerSpec()
