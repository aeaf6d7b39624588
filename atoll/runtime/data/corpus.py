"""Documents: named texts from the standard library, text files, ``.jsonl``, ``.parquet`` or a saved Hugging Face set.

Names are relative to the source, so machines that keep the corpus in different places still agree on them. Which
documents are held out is decided by a hash of the name: it does not depend on their order or on who asks.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from atoll.errors import DataError
from atoll.policies.data.spec import DataSpec
from atoll.records import to_json

__all__ = ["Corpus", "Document", "Source", "open_corpus"]

STDLIB_CAP_BYTES = 16 << 20
TEXT_PART_BYTES = 32 << 20
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_FEW = 200
"""Below this many documents an exact share of them is held out instead of each by its own chance."""
_PIECED = 20
"""Below this many documents each is cut into pieces, so that something can be held out at all."""
_PIECES = 64


class Document(NamedTuple):
    name: str
    text: str


class Source(NamedTuple):
    """One file: ``kind`` is "text", "jsonl", "parquet" or "arrow"."""

    name: str
    path: Path
    kind: str


class Corpus:
    """The documents of a job. Iterating reads the files again each time; nothing is held in memory."""

    def __init__(self, spec: DataSpec, sources: tuple[Source, ...]) -> None:
        self.spec = spec
        self.sources = sources
        self._parts = 1
        self._held_out: frozenset[str] | None = None
        if spec.validation > 0:
            self._decide_split()

    def _decide_split(self) -> None:
        names = [document.name for document in islice(self.documents(), _PIECED)]
        if 0 < len(names) < _PIECED:
            self._parts = -(-_PIECES // len(names))
        names = [document.name for document in islice(self.documents(), _FEW)]
        if len(names) < _FEW:
            count = min(len(names) - 1, max(1, round(len(names) * self.spec.validation)))
            self._held_out = frozenset(sorted(names, key=_chance)[:max(0, count)])

    def held_out(self, name: str) -> bool:
        """Whether the document called ``name`` belongs to the validation split."""
        if self.spec.validation <= 0:
            return False
        return name in self._held_out if self._held_out is not None else _chance(name) < self.spec.validation

    def documents(self) -> Iterator[Document]:
        """All non-empty documents in a fixed order. Raises ``DataError`` for what cannot be read."""
        for source in self.sources:
            for document in _read(source, self.spec.field):
                if not document.text:
                    continue
                if self._parts == 1:
                    yield document
                else:
                    for part, text in enumerate(_cut(document.text, self._parts)):
                        yield Document(f"{document.name}#{part}", text)

    def training(self) -> Iterator[Document]:
        return (document for document in self.documents() if not self.held_out(document.name))

    @property
    def fingerprint(self) -> str:
        """Changes when a file, its size, its time of change or the spec changes; not a digest of the content."""
        state = hashlib.sha256(to_json(self.spec))
        for source in self.sources:
            status = source.path.stat()
            state.update(f"\0{source.name}\0{source.path}\0{status.st_size}\0{status.st_mtime_ns}".encode())
        return state.hexdigest()


def _chance(name: str) -> float:
    """A number in [0, 1) that belongs to ``name``."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:7], "big") / 2**56


def _cut(text: str, parts: int) -> Iterator[str]:
    """``text`` in about ``parts`` pieces of like size, cut at line ends where there are any near."""
    size = -(-len(text) // parts)
    start = 0
    while start < len(text):
        stop = start + size
        line_end = text.find("\n", stop - 1, stop - 1 + size)
        stop = stop if line_end < 0 else line_end + 1
        yield text[start:stop]
        start = stop


def open_corpus(spec: DataSpec, base: str | os.PathLike[str] = ".") -> Corpus:
    """Find the files of ``spec.source`` (relative paths count from ``base``) and decide what is held out.

    Raises ``DataError`` when there is nothing to read or the split is impossible.
    """
    if not 0 <= spec.validation < 1:
        raise DataError(f"data.validation: found {spec.validation}, expected a fraction from 0 up to but not including "
                        "1")
    sources = _stdlib() if spec.source == "stdlib" else _find(spec.source, Path(base))
    corpus = Corpus(spec, sources)
    if next(corpus.documents(), None) is None:
        raise DataError(f"data.source {spec.source!r}: the corpus is empty: {len(sources)} file(s) found, no text in "
                        f"them; point data.source at files with text")
    return corpus


def _stdlib() -> tuple[Source, ...]:
    """The ``.py`` files of this Python's standard library by relative path, at most ``STDLIB_CAP_BYTES`` of them."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not _SKIPPED_FOLDERS.intersection(name.parts) and path.is_file():
            found.append((name.as_posix(), path, path.stat().st_size))
    if not found:
        raise DataError(f"data.source 'stdlib': no .py files under {root} (a Python without sources); "
                        "point data.source at text files instead")
    kept, total = [], 0
    for relative, path, size in sorted(found, key=lambda item: _chance(item[0])):
        if total + size <= STDLIB_CAP_BYTES:
            kept.append(Source(relative, path, "text"))
            total += size
    return tuple(sorted(kept))


def _find(pattern: str, base: Path) -> tuple[Source, ...]:
    given = Path(pattern).expanduser()
    path = given if given.is_absolute() else base / given
    if path.is_dir():
        found = _data_set(path) or _folder(path)
        if not found:
            raise DataError(f"data.source {pattern!r}: the corpus is empty: no readable text, .jsonl or .parquet file "
                            f"in the folder; point data.source at files with text")
        return found
    if path.is_file():
        return (Source(path.name, path, _kind(path)),)
    matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
    if not matches:
        raise DataError(f"data.source {pattern!r}: no such file or folder, and as a pattern it matches no file; "
                        f"allowed: 'stdlib', text files, .jsonl, .parquet, a saved Hugging Face data set, or a glob")
    root = Path(os.path.commonpath([match.parent for match in matches]))
    return tuple(Source(match.relative_to(root).as_posix(), match, _kind(match)) for match in matches)


def _kind(path: Path) -> str:
    kinds = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
    return kinds.get(path.suffix.lower(), "text")


def _folder(root: Path) -> tuple[Source, ...]:
    """Every file below ``root`` that is not hidden and does not look binary."""
    found = []
    for path in root.rglob("*"):
        name = path.relative_to(root)
        if path.is_file() and not any(part.startswith(".") for part in name.parts):
            kind = _kind(path)
            if kind != "text" or not _looks_binary(path):
                found.append(Source(name.as_posix(), path, kind))
    return tuple(sorted(found))


def _looks_binary(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return b"\0" in file.read(8192)
    except OSError as error:
        raise DataError(f"data.source: {path} cannot be read: {error.strerror}") from None


def _data_set(root: Path) -> tuple[Source, ...]:
    """The arrow files of a Hugging Face data set written by ``save_to_disk``, or nothing when ``root`` is not one."""
    several = root / "dataset_dict.json"
    if several.is_file():
        splits = _json(several).get("splits", [])
        if "train" not in splits and len(splits) != 1:
            raise DataError(f"data.source {root}: a data set with the splits {', '.join(splits) or 'none'} and no "
                            "'train'; "
                            f"point data.source at one of its folders")
        return _data_set(root / ("train" if "train" in splits else splits[0]))
    if not (root / "state.json").is_file() or not (root / "dataset_info.json").is_file():
        return ()
    state = _json(root / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(f"data.source {root}: the data set was saved with an index; call flatten_indices() before "
                        "save_to_disk")
    files = [root / entry["filename"] for entry in state.get("_data_files", ())]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(f"data.source {root}: state.json names {missing[0]!r}, which is not there; copy the whole "
                        "folder")
    return tuple(Source(file.name, file, "arrow") for file in files)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"data.source: {path} cannot be read as JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _read(source: Source, field: str) -> Iterator[Document]:
    try:
        if source.kind == "text":
            yield from _text(source)
        elif source.kind == "jsonl":
            yield from _lines(source, field)
        else:
            yield from _table(source, field)
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise DataError(f"data.source: {source.path} cannot be read: {reason}") from None


def _text(source: Source) -> Iterator[Document]:
    """The file as text, a very large one in parts that end with a line.

    Bytes that are not UTF-8 become U+FFFD; a binary file is refused.
    """
    with open(source.path, "rb") as file:
        part = 0
        while raw := file.read(TEXT_PART_BYTES):
            if len(raw) == TEXT_PART_BYTES:
                raw += file.readline(TEXT_PART_BYTES)
            if b"\0" in raw[:8192]:
                raise DataError(f"data.source: {source.path} is not text (it holds zero bytes); "
                                "allowed: UTF-8 text, .jsonl, .parquet, .arrow")
            name = source.name if part == 0 else f"{source.name}@{part}"
            yield Document(name, raw.decode("utf-8-sig" if part == 0 else "utf-8", errors="replace"))
            part += 1


def _lines(source: Source, field: str) -> Iterator[Document]:
    with open(source.path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig", errors="replace"))
            except ValueError as error:
                raise DataError(f"{source.path} line {number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{source.path} line {number}: found {type(row).__name__}, expected an object with a "
                                f"field {field!r}")
            if field not in row:
                raise DataError(f"{source.path} line {number}: no field {field!r}; there are: "
                                f"{', '.join(row) or 'none'}; "
                                f"set data.field")
            if row[field] is None:
                continue
            if not isinstance(row[field], str):
                raise DataError(f"{source.path} line {number}: field {field!r} holds {type(row[field]).__name__}, "
                                "expected text")
            yield Document(f"{source.name}:{number}", row[field].encode("utf-8", "replace").decode())


def _table(source: Source, field: str) -> Iterator[Document]:
    """Rows of a ``.parquet`` or ``.arrow`` file (arrow: stream or file format)."""
    import pyarrow as arrow

    try:
        schema, batches = _open_table(source, field)
        _check_column(source, schema, field)
        row = 0
        for batch in batches:
            for text in batch.column(batch.schema.get_field_index(field)).to_pylist():
                if text is not None:
                    yield Document(f"{source.name}:{row}", text)
                row += 1
    except arrow.ArrowException as error:
        raise DataError(f"data.source: {source.path} cannot be read as {source.kind}: "
                        f"{str(error).splitlines()[0]}") from None


def _open_table(source: Source, field: str) -> tuple[Any, Iterator[Any]]:
    import pyarrow as arrow

    if source.kind == "parquet":
        from pyarrow import parquet

        table = parquet.ParquetFile(source.path)
        return table.schema_arrow, table.iter_batches(batch_size=1024, columns=[field])
    mapped = arrow.memory_map(str(source.path))
    try:
        reader = arrow.ipc.open_stream(mapped)
        return reader.schema, iter(reader)
    except arrow.ArrowInvalid:
        file = arrow.ipc.open_file(mapped)
        return file.schema, (file.get_batch(i) for i in range(file.num_record_batches))


def _check_column(source: Source, schema: Any, field: str) -> None:
    import pyarrow as arrow

    if field not in schema.names:
        raise DataError(f"{source.path}: no column {field!r}; there are: {', '.join(schema.names)}; set data.field")
    kind = schema.field(field).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)):
        texts = [name for name in schema.names if arrow.types.is_string(schema.field(name).type)]
        raise DataError(f"{source.path}: column {field!r} holds {kind}, expected text; "
                        f"text columns: {', '.join(texts) or 'none'}; set data.field")
