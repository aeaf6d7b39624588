"""Typed documents: frozen records, YAML or JSON in, one canonical JSON out, errors that name the place.

Every record of Atoll is a subclass of ``Record``; quantities in it are the ``int`` subclasses of ``atoll.units``.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
import re
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

import msgspec

from atoll.errors import DocumentError
from atoll.units import Quantity

__all__ = ["Record", "digest", "from_plain", "load", "parse", "save", "to_json", "to_plain", "to_yaml", "write_atomically"]

R = TypeVar("R")


class _RecordMeta(msgspec.StructMeta):
    """msgspec applies ``kw_only`` to the fields of one class only; every record wants it."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        return super().__new__(cls, name, bases, namespace, **{"kw_only": True, **options})


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record(msgspec.Struct, metaclass=_RecordMeta, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all documents and nouns: immutable, keyword-only, unknown fields refused."""


def _decode(kind: type, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Quantity):
        return kind.parse(value)
    raise NotImplementedError(f"no rule for {kind}")


def _encode(value: Any) -> Any:
    if isinstance(value, int):
        return int(value)
    raise NotImplementedError(f"no rule for {type(value)}")


def from_plain(value: Any, kind: type[R], *, source: str = "document") -> R:
    """Return ``value`` (plain dictionaries and lists) as a record of type ``kind``.

    Raises ``DocumentError`` naming ``source``, the path inside it, what was found and what is allowed.
    """
    _refuse_impossible_numbers(value, source)
    try:
        return msgspec.convert(value, kind, dec_hook=_decode)
    except msgspec.ValidationError as error:
        raise DocumentError(_explain(str(error), value, kind, source)) from None
    except DocumentError as error:  # by a record that looks at itself
        raise DocumentError(f"{source}: {error}") from None


def _refuse_impossible_numbers(value: Any, source: str) -> None:
    """Infinity, not-a-number and what fits no 64-bit integer is no quantity of anything, wherever it stands."""
    pending: list[tuple[str, Any]] = [("", value)]
    seen: set[int] = set()
    while pending:
        path, part = pending.pop()
        if isinstance(part, dict | list | tuple):
            if id(part) not in seen:  # YAML can say that a list contains itself
                seen.add(id(part))
                named = part.items() if isinstance(part, dict) else enumerate(part)
                pending.extend((_step(path, name), inner) for name, inner in named)
        elif isinstance(part, float) and not math.isfinite(part):
            raise DocumentError(f"{source}: {path or 'top level'}: found {part}, expected a finite number")
        elif isinstance(part, int) and not -(2**63) <= part < 2**63:
            raise DocumentError(f"{source}: {path or 'top level'}: found {_shown(part)}, expected a number below 2^63")


def _step(path: str, name: object) -> str:
    return f"{path}[{name}]" if isinstance(name, int) else f"{path}.{name}".lstrip(".")


def _explain(message: str, value: Any, kind: type, source: str) -> str:
    """msgspec's refusal as a sentence: place, what was found, what is allowed."""
    text, _, path = message.partition(" - at `")
    of_key = path.startswith("key`")
    path = _with_keys(path.rpartition("$")[2].rstrip("`").lstrip("."), message, value, kind)
    dotted = re.sub(r"\[([^\]0-9][^\]]*)\]", r".\1", path)
    where = f"{source}: {dotted or 'top level'}"
    unknown = re.match(r"Object contains unknown field `(.*)`", text, re.DOTALL)
    if unknown:
        allowed = _fields_at(kind, path)
        near = difflib.get_close_matches(unknown.group(1), allowed, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{where}: unknown field {unknown.group(1)!r}; {hint}allowed: {', '.join(allowed)}"
    missing = re.match(r"Object missing required field `(.*)`", text)
    if missing:
        return f"{where}: field {missing.group(1)!r} is required"
    if of_key:
        return f"{where}: the name of every field is text; put it in quotes"
    wanted = re.match(r"Expected (.*?)(?:, got .*)?$", text)
    if wanted is None:
        return f"{where}: {text[0].lower() + text[1:]}"
    found = _at(value, path)
    there = f"{len(found)} of them" if "of length" in text and isinstance(found, list) else _shown(found)
    return f"{where}: found {there}, expected {_plainly(wanted.group(1))}"


_PLAIN = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "null": "nothing",
          "object": "fields (name: value)", "array": "a list"}
_BOUNDS = {">=": "of at least", ">": "above", "<=": "of at most", "<": "below"}


def _plainly(wanted: str) -> str:
    """ "`int | null`" -> "a whole number or nothing"; "`float` >= 0.0" -> "a number of at least 0"."""
    kinds, _, bound = wanted.lstrip("`").partition("`")
    names = " or ".join(_PLAIN.get(kind, kind) for kind in kinds.split(" | "))
    compared = re.fullmatch(r"([<>]=?) (-?[0-9.e+]+)", bound.strip())
    if compared:
        return f"{names} {_BOUNDS[compared.group(1)]} {float(compared.group(2)):g}"
    return f"{names} {bound.strip()}".strip()


def _shown(value: Any) -> str:
    """``value`` as a person would recognise it, at most a line long."""
    if isinstance(value, dict):
        return f"fields ({', '.join(str(name) for name in value)[:40]})"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _at(value: Any, path: str) -> Any:
    """What lies at ``path`` ("machines[2].devices") below ``value``."""
    for part in _parts(path):
        try:
            value = value[int(part[1:-1])] if part.startswith("[") and isinstance(value, list) else value[part.strip("[]")]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return value


def _parts(path: str) -> list[str]:
    return re.findall(r"\[[^\]]*\]|[^.\[\]]+", path)


def _with_keys(path: str, message: str, value: Any, kind: type) -> str:
    """``path`` with the names of dictionary entries, which msgspec leaves out ("islands[...]" -> "islands[reef]"): the
    entry is the one that is also refused when it stands alone."""
    while "[...]" in path:
        before, _, after = path.partition("[...]")
        entries = _at(value, before)
        if not isinstance(entries, dict):
            return path
        for name in entries:
            try:
                msgspec.convert(_replaced(value, _parts(before), {name: entries[name]}), kind, dec_hook=_decode)
            except msgspec.ValidationError as error:
                if str(error) == message:
                    path = f"{before}[{name}]{after}"
                    break
            except DocumentError:
                continue
        else:
            return path
    return path


def _replaced(value: Any, parts: list[str], new: Any) -> Any:
    if not parts:
        return new
    part, *rest = parts
    if isinstance(value, list):
        number = int(part[1:-1])
        return [_replaced(inner, rest, new) if index == number else inner for index, inner in enumerate(value)]
    name = part.strip("[]")
    return {**value, name: _replaced(value[name], rest, new)}


def _fields_at(kind: Any, path: str) -> list[str]:
    """The field names allowed at ``path`` (as msgspec prints it) below ``kind``."""
    for part in re.findall(r"[^.\[\]]+|\[[^\]]*\]", path):
        options = _unwrap(kind)
        if part.startswith("["):
            continue
        for option in options:
            if isinstance(option, type) and issubclass(option, msgspec.Struct) and part in option.__struct_fields__:
                kind = get_type_hints(option)[part]
                break
    names: list[str] = []
    for option in _unwrap(kind):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            names.extend(option.__struct_encode_fields__)
    return names


def _unwrap(kind: Any) -> list[Any]:
    """All concrete types inside unions, tuples, lists and dictionaries."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    inner = [argument for argument in get_args(kind) if argument is not Ellipsis]
    return [kind] if not inner else [leaf for argument in inner for leaf in _unwrap(argument)]


def parse(text: str | bytes, kind: type[R], *, source: str = "document") -> R:
    """Return the YAML or JSON ``text`` as a record of type ``kind``; errors as in ``from_plain``."""
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # safe: no objects
    try:
        value = yaml.load(text, Loader=_strict(_reads_floats(base)))
    except yaml.reader.ReaderError as error:
        raise DocumentError(f"{source}: found bytes that are no text ({error.reason}), expected YAML or JSON") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = ":" if isinstance(error, yaml.constructor.ConstructorError) else " is not YAML:"
        raise DocumentError(f"{source}:{place}{what} {getattr(error, 'problem', error)}") from None
    except (ValueError, RecursionError) as error:  # the 13th month, a number of 5000 digits, brackets without end
        raise DocumentError(f"{source}: holds something that does not exist ({str(error).partition(':')[0]}); put it in quotes "
                            "if it is text") from None
    if value is None:
        raise DocumentError(f"{source}: the file is empty; expected fields: {', '.join(_fields_at(kind, ''))}")
    return from_plain(value, kind, source=source)


def load(path: str | os.PathLike[str], kind: type[R]) -> R:
    """Read the document at ``path``. Raises ``DocumentError`` also when the file cannot be read."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise DocumentError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(text, kind, source=str(path))


def to_plain(record: Any) -> Any:
    return msgspec.to_builtins(record, enc_hook=_encode)


def to_json(record: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces; equal records give equal bytes."""
    return msgspec.json.encode(record, enc_hook=_encode, order="sorted")


def to_yaml(record: Any) -> str:
    import yaml

    return str(yaml.dump(to_plain(record), Dumper=_reads_floats(yaml.SafeDumper), sort_keys=False, allow_unicode=True,
                         width=120))


def _reads_floats(base: Any) -> Any:
    """``base`` (a YAML loader or dumper) that takes 3e-4 for a number, as YAML 1.2 and JSON do; YAML 1.1 wants 3.0e-4."""
    kind: Any = type(base.__name__, (base,), {})
    kind.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
                               list("-+0123456789"))
    return kind


def _strict(base: Any) -> Any:
    """``base`` (a YAML loader) that refuses a field written twice: YAML itself would keep the last one silently."""
    import yaml

    class Strict(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is written twice; keep one of them",
                                                            key.start_mark)
                if isinstance(key, yaml.ScalarNode):
                    seen.add((key.tag, key.value))
            return super().construct_mapping(node, deep)

    return Strict


def digest(record: Any) -> str:
    """A short name for the content of a record (first 16 hex digits of SHA-256 of its canonical JSON)."""
    return hashlib.sha256(to_json(record)).hexdigest()[:16]


def write_atomically(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write via a temporary file, fsync and rename, so that a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def save(path: str | os.PathLike[str], record: Any) -> None:
    """Write a record as YAML (``.yaml``) or canonical JSON (anything else), atomically."""
    write_atomically(path, to_yaml(record) if str(path).endswith((".yaml", ".yml")) else to_json(record))
