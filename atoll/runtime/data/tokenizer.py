"""Text to token ids and back: byte-level, BPE trained on the training split, or one from a path.

All three are a ``tokenizers.Tokenizer`` with one token that ends a document, saved as a folder of ``tokenizer.json``
and ``tokenizer_config.json``: the very form that ``transformers`` reads, so export has nothing to convert.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atoll.errors import DataError
from atoll.policies.data.spec import TokenizerSpec
from atoll.records import write_atomically

__all__ = ["END", "Tokenizer", "byte_level", "load_tokenizer", "make_tokenizer", "train_bpe"]

END = "<|endoftext|>"
BYTE_VOCABULARY = 257
TRAINING_CAP_CHARACTERS = 64 << 20
"""BPE sees at most this much text; its merges settle long before."""

_KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[EOS]", "[SEP]")


class Tokenizer:
    """``size``: number of ids (all are below it). ``end``: id that ends a document."""

    def __init__(self, backend: Any, end_token: str) -> None:
        self.backend = backend
        self.end_token = end_token
        end = backend.token_to_id(end_token)
        if end is None:
            raise DataError(f"tokenizer: it has no token {end_token!r} to end a document with")
        self.end: int = end
        self.size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self._bytes = _is_byte_level(backend)
        backend.encode_special_tokens = True  # "<|endoftext|>" written in a document is text like any other
        backend.no_truncation()
        backend.no_padding()

    @property
    def digest(self) -> str:
        """Equal for tokenizers that give equal ids for every text."""
        plain = json.dumps(json.loads(self.backend.to_str()), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(f"{plain}\0{self.end_token}".encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """One integer vector per text, without any begin or end token."""
        if self._bytes:
            return [np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8) for text in texts]
        return [np.asarray(encoding.ids, dtype=np.uint32)
                for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``; ends of documents are left out, broken UTF-8 becomes U+FFFD."""
        wanted = [int(token) for token in ids if token != self.end]
        if self._bytes:
            return bytes(wanted).decode("utf-8", errors="replace")
        return str(self.backend.decode(wanted, skip_special_tokens=True))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
        plain = json.loads(self.backend.to_str())
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.end_token,
                  "bos_token": self.end_token, "clean_up_tokenization_spaces": False}
        write_atomically(Path(folder) / "tokenizer.json", json.dumps(plain, ensure_ascii=False))
        write_atomically(Path(folder) / "tokenizer_config.json", json.dumps(config, indent=2))

    def check_vocabulary(self, vocabulary: int) -> None:
        """Raise ``DataError`` when a model with ``vocabulary`` embeddings cannot take every id."""
        if self.size > vocabulary:
            raise DataError(f"tokenizer: its ids go up to {self.size - 1}, but the model has {vocabulary} embeddings; "
                            f"set the model's vocab_size to at least {self.size} or use a smaller vocabulary")


def _is_byte_level(backend: Any) -> bool:
    """Whether id b simply is byte b (as ``byte_level`` makes it)."""
    if backend.get_vocab_size() != BYTE_VOCABULARY or type(backend.model).__name__ != "BPE":
        return False
    return all(backend.token_to_id(character) == byte for byte, character in enumerate(_byte_characters()))


def _byte_characters() -> list[str]:
    """The character that byte-level BPE (Radford et al., 2019) writes for each byte: itself where it can be printed,
    otherwise the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _byte_backend(model: Any) -> Any:
    import tokenizers

    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def byte_level() -> Tokenizer:
    """256 bytes (id = byte) and the end of a document (256)."""
    import tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = _byte_backend(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.add_special_tokens([tokenizers.AddedToken(END, special=True)])
    return Tokenizer(backend, END)


def train_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE of ``vocabulary`` tokens; the same texts give the same tokenizer on every machine.

    Source: Sennrich, Haddow and Birch (2016); bytes as in Radford et al. (2019).
    """
    import tokenizers

    if vocabulary < BYTE_VOCABULARY:
        raise DataError(f"data.tokenizer.vocabulary: found {vocabulary}, expected at least {BYTE_VOCABULARY} (256 "
                        "bytes and the end)")
    backend = _byte_backend(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], show_progress=False,
                                             initial_alphabet=sorted(_byte_characters()))
    backend.train_from_iterator(_capped(texts, TRAINING_CAP_CHARACTERS), trainer)
    return Tokenizer(backend, END)


def _capped(texts: Iterable[str], characters: int) -> Iterable[str]:
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """A tokenizer from ``tokenizer.json`` or from a folder (Hugging Face, or one that ``save`` wrote).

    Raises ``DataError`` when it cannot be read or does not say how a document ends.
    """
    import tokenizers

    given = Path(path).expanduser()
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        if given.is_dir():
            return _convert(given)
        raise DataError(f"data.tokenizer.path: {given} does not exist; name a tokenizer.json or a Hugging Face folder")
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"data.tokenizer.path: {file} is not a tokenizer.json: {error}") from None
    return Tokenizer(backend, _end_token(backend, file.parent))


def _convert(folder: Path) -> Tokenizer:
    """A folder with an older form (vocab.json and merges.txt, sentencepiece): ``transformers`` makes the fast form."""
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        backend, end = tokenizer.backend_tokenizer, tokenizer.eos_token
    except Exception as error:  # its loaders raise a dozen kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"data.tokenizer.path: {folder} holds no tokenizer that can be read: {reason}") from None
    return Tokenizer(backend, end or _end_token(backend, folder))


def _end_token(backend: Any, folder: Path) -> str:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            entry = json.loads((folder / name).read_bytes()).get("eos_token")
        except (OSError, ValueError, AttributeError):
            continue
        token = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(token, str) and backend.token_to_id(token) is not None:
            return token
    for token in _KNOWN_ENDS:
        if backend.token_to_id(token) is not None:
            return token
    raise DataError(f"data.tokenizer.path: the tokenizer in {folder} names no eos_token and has none of "
                    f"{', '.join(_KNOWN_ENDS)}; add eos_token to its tokenizer_config.json")


def make_tokenizer(spec: TokenizerSpec, training: Iterable[str], base: str | os.PathLike[str] = ".") -> Tokenizer:
    """The tokenizer that ``spec`` asks for. ``training``: texts of the training split (read for "bpe" only)."""
    if spec.kind == "byte":
        return byte_level()
    if spec.kind == "bpe":
        return train_bpe(training, spec.vocabulary)
    if spec.kind != "path":
        raise DataError(f"data.tokenizer.kind: found {spec.kind!r}, allowed: byte, bpe, path")
    if spec.path is None:
        raise DataError("data.tokenizer: kind 'path' needs data.tokenizer.path (a tokenizer.json or a Hugging Face "
                        "folder)")
    given = Path(spec.path).expanduser()
    return load_tokenizer(given if given.is_absolute() else Path(base) / given)
