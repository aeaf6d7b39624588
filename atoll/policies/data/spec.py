"""What a job says about its data."""

from __future__ import annotations

from atoll.records import Record

__all__ = ["DataSpec", "TokenizerSpec"]


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
    validation: float = 0.05
    tokenizer: TokenizerSpec = TokenizerSpec()
