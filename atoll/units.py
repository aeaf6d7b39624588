"""Human units in, integers in SI base out, and back.

Inside Atoll every quantity is an integer whose name ends in its unit: ``_bytes``, ``_ns``,
``_flops``, ``_bytes_per_s``, ``_flops_per_s``. People write "100 Mbit/s", "20 ms", "16 GiB".
The small ``int`` subclasses below are field types of the documents: they parse what people write.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from msgspec import Meta

__all__ = [
    "Bandwidth",
    "Bytes",
    "Count",
    "Duration",
    "FlopRate",
    "NotNegative",
    "Positive",
    "PositiveRate",
    "Quantity",
    "Rate",
    "Share",
    "format_bandwidth",
    "format_bytes",
    "format_count",
    "format_duration",
    "format_flop_rate",
    "format_flops",
]

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_PREFIXES = {**_DECIMAL, **_BINARY}
_NUMBER = re.compile(r"\s*([0-9][0-9_]{0,60}(?:\.[0-9]{1,60})?(?:[eE][+-]?[0-9]{1,3})?)\s*(.*?)\s*$")

_RARE = re.compile(r"[PE]|K(?!i)|.*bps|.*FLOPS|.*flop/s")
"""Units that are taken but need not be offered: other spellings, and what nobody has."""

Positive = Annotated[int, Meta(ge=1)]
"""Types of the plain numbers in documents; ``records`` refuses what lies outside."""
NotNegative = Annotated[int, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0)]
PositiveRate = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Quantity(int):
    """An integer in SI base units that people may write with a unit.

    ``units`` maps each accepted suffix to the factor that turns it into the base unit.
    """

    noun = "quantity"
    example = ""
    units: dict[str, Fraction] = {}

    @classmethod
    def parse(cls, text: object) -> Quantity:
        """Return the quantity written as ``text`` (a string with a unit, or a whole number in base units).

        Raises ``ValueError`` with what was found and what is allowed.
        """
        if isinstance(text, bool) or not isinstance(text, int | float | str):
            found = "nothing" if text is None else repr(text)
            raise ValueError(f"found {found}, expected a {cls.noun} such as {cls.example!r}")
        if isinstance(text, int | float):
            if not 0 <= text < 2**63 or text != int(text):
                raise ValueError(f"found {text!r}, expected a {cls.noun} such as {cls.example!r}")
            return cls(int(text))
        match = _NUMBER.match(text)
        suffix = match.group(2) if match else ""
        if match is None or suffix not in cls.units:
            known = ", ".join(unit for unit in cls.units if unit and not _RARE.match(unit))
            shown = text if len(text) <= 40 else text[:37] + "..."
            raise ValueError(f"found {shown!r}, expected a {cls.noun} such as {cls.example!r} (units: {known})")
        value = round(Fraction(match.group(1).replace("_", "")) * cls.units[suffix])
        if value >= 2**63:
            raise ValueError(f"found {text!r}, which is more than any {cls.noun} (2^63 in base units)")
        return cls(value)


def _scaled(base: str, prefixes: dict[str, int], factor: Fraction = Fraction(1)) -> dict[str, Fraction]:
    return {prefix + base: scale * factor for prefix, scale in prefixes.items()}


class Bytes(Quantity):
    noun = "size"
    example = "16 GiB"
    units = {**_scaled("B", _PREFIXES), **_scaled("b", {}), "": Fraction(1)}


class Bandwidth(Quantity):
    """Bytes per second."""

    noun = "bandwidth"
    example = "100 Mbit/s"
    units = {
        **_scaled("bit/s", _PREFIXES, Fraction(1, 8)),
        **_scaled("bps", _PREFIXES, Fraction(1, 8)),
        **_scaled("B/s", _PREFIXES),
    }


class Duration(Quantity):
    """Nanoseconds."""

    noun = "duration"
    example = "25 ms"
    units = {
        "ns": Fraction(1),
        "us": Fraction(10**3),
        "µs": Fraction(10**3),
        "ms": Fraction(10**6),
        "s": Fraction(10**9),
        "min": Fraction(60 * 10**9),
        "h": Fraction(3600 * 10**9),
    }


class FlopRate(Quantity):
    """Floating-point operations per second."""

    noun = "compute rate"
    example = "312 TFLOP/s"
    units = {**_scaled("FLOP/s", _DECIMAL), **_scaled("FLOPS", _DECIMAL), **_scaled("flop/s", _DECIMAL)}


class Count(Quantity):
    noun = "count"
    example = "10B"
    units = {"": Fraction(1), "k": Fraction(10**3), "K": Fraction(10**3), "M": Fraction(10**6),
             "B": Fraction(10**9), "G": Fraction(10**9), "T": Fraction(10**12)}


def _format(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for scale, unit in steps:
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}" if abs(value) / scale < 1000 else f"{value / scale:.0f} {unit}"
    scale, unit = steps[-1]
    return f"{value / scale:.3g} {unit}"


def format_bytes(value: float) -> str:
    return _format(value, ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))


def format_bandwidth(bytes_per_s: float) -> str:
    return _format(bytes_per_s * 8, ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1, "bit/s")))


def format_duration(ns: float) -> str:
    """Return "25 ms", "4.81 s", "3 min 20 s", "2 h 5 min" or "3.2 days"."""
    seconds = ns / 1e9
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:.1f} days"
    if seconds >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds >= 100:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return _format(ns, ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1, "ns")))


def format_flop_rate(flops_per_s: float) -> str:
    return _format(flops_per_s, ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")))


def format_flops(flops: float) -> str:
    return _format(flops, ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")))


def format_count(value: float) -> str:
    return _format(value, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"), (1, ""))).replace(" ", "")
