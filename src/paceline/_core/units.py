"""Quantities with units, in and out: ``"25MiB"``, ``"1Gbit/s"``, ``"250us"``.

Inside Paceline a size is an ``int`` in bytes (``nbytes``), a time a ``float`` in seconds and a rate a
``float`` in bytes per second. Decimal prefixes count in 1000 (``MB``), binary ones in 1024 (``MiB``).
"""

from __future__ import annotations

import math
import re

from paceline.errors import UsageError

__all__ = [
    "MIB",
    "format_bytes",
    "format_count",
    "format_decimal",
    "format_seconds",
    "format_size",
    "parse_bytes",
    "parse_count",
    "parse_rate",
    "parse_seconds",
    "parse_share",
]

MIB = 1024 * 1024

_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PREFIX |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-zµ/]*)\s*", re.IGNORECASE)


_LARGEST = 1e200  # a float holds it times any unit


def _split(text: str, kind: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    number = float(match[1].replace("_", "")) if match is not None else math.inf
    if match is None or number > _LARGEST:
        raise UsageError(f"{text!r} is no {kind}", remedy=f"write a number and a unit, for example {example}")
    return number, match[2].lower()


def parse_bytes(text: str | int) -> int:
    """Return a size in bytes.

    Args:
        text: a number of bytes, or a number with ``B``, ``kB``, ``MB``, ``GB``, ``KiB``, ``MiB``, ``GiB`` …

    Raises:
        UsageError: `text` is no size.

    Example:
        >>> parse_bytes("25MiB"), parse_bytes("5MB"), parse_bytes(17)
        (26214400, 5000000, 17)
    """
    if isinstance(text, int):
        return text
    number, unit = _split(text, "size", "25MiB or 5MB")
    prefix = unit.removesuffix("b")
    if prefix not in _PREFIX or (unit and unit == prefix):
        raise UsageError(
            f"{text!r} is no size: unknown unit {unit!r}", remedy="valid: B kB MB GB TB KiB MiB GiB TiB"
        )
    return round(number * _PREFIX[prefix])


def parse_rate(text: str | float) -> float:
    """Return a data rate in bytes per second.

    Args:
        text: bytes per second as a number, or a number with ``MB/s``, ``MiB/s``, ``Mbit/s``, ``Gbit/s`` …

    Raises:
        UsageError: `text` is no rate.

    Example:
        >>> parse_rate("1Gbit/s"), parse_rate("40MB/s")
        (125000000.0, 40000000.0)
    """
    if isinstance(text, int | float):
        return float(text)
    number, unit = _split(text, "rate", "1Gbit/s or 40MB/s")
    for suffix, bits in (("bit/s", 1), ("bps", 1), ("b/s", 8)):
        if unit.endswith(suffix) and unit.removesuffix(suffix) in _PREFIX:
            return number * _PREFIX[unit.removesuffix(suffix)] * bits / 8
    raise UsageError(
        f"{text!r} is no rate: unknown unit {unit!r}", remedy="valid: MB/s MiB/s Mbit/s Gbit/s …"
    )


def parse_seconds(text: str | float) -> float:
    """Return a time in seconds.

    Args:
        text: seconds as a number, or a number with ``ns``, ``us``, ``ms``, ``s``, ``min``, ``h``, ``d``.

    Raises:
        UsageError: `text` is no time.

    Example:
        >>> parse_seconds("250us"), parse_seconds("5min")
        (0.00025, 300.0)
    """
    if isinstance(text, int | float):
        return float(text)
    number, unit = _split(text, "time", "250us or 5min")
    if unit not in _SECONDS:
        raise UsageError(f"{text!r} is no time: unknown unit {unit!r}", remedy=f"valid: {' '.join(_SECONDS)}")
    return number * _SECONDS[unit]


def parse_count(text: str | int) -> int:
    """Return a count.

    Args:
        text: a number, alone or with ``k``, ``M``, ``G`` (or ``B``), ``T``: thousands, millions …

    Raises:
        UsageError: `text` is no count.

    Example:
        >>> parse_count("20M"), parse_count("1.5B"), parse_count("4_000")
        (20000000, 1500000000, 4000)
    """
    if isinstance(text, int):
        return text
    number, unit = _split(text, "count", "20M or 1.5B")
    prefix = "g" if unit == "b" else unit
    if prefix not in ("", "k", "m", "g", "t"):
        raise UsageError(f"{text!r} is no count: unknown unit {unit!r}", remedy="valid: k M G B T")
    return round(number * _PREFIX[prefix])


def parse_share(text: str | float) -> float:
    """Return a share, 0 to 1 where it is one of a whole.

    Args:
        text: a number, or one with ``%``.

    Raises:
        UsageError: `text` is no share.

    Example:
        >>> parse_share("10%"), parse_share("0.25")
        (0.1, 0.25)
    """
    if isinstance(text, int | float):
        return float(text)
    plain = text.strip().removesuffix("%")
    number, unit = _split(plain, "share", "10% or 0.1")
    if unit:
        raise UsageError(f"{text!r} is no share: unknown unit {unit!r}", remedy="write 10% or 0.1")
    return number if plain == text.strip() else number / 100


def format_bytes(nbytes: float) -> str:
    """Return a size for people, in binary units with three significant digits.

    Example:
        >>> format_bytes(26214400), format_bytes(1023)
        ('25 MiB', '1023 B')
    """
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(value) >= 1023.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{_digits(value)} {units[0]}" if units[0] != "B" else f"{value:.0f} B"


def format_size(nbytes: float) -> str:
    """Return the size of a message as people give it: in decimal units, unless only binary ones make it round.

    Example:
        >>> format_size(100_000_000), format_size(1_024_000_000), format_size(65536), format_size(17)
        ('100 MB', '1.02 GB', '64 KiB', '17 B')
    """
    if nbytes % 1024 == 0 and nbytes % 1000:
        return format_bytes(nbytes)
    return format_decimal(nbytes)


def format_decimal(nbytes: float) -> str:
    """Return a number of bytes in decimal units, as networks count them.

    Example:
        >>> format_decimal(81_899_520), format_decimal(17)
        ('81.9 MB', '17 B')
    """
    return f"{format_count(nbytes)}{'' if nbytes >= 999.5 else ' '}B"


def format_seconds(seconds: float) -> str:
    """Return a time for people, three significant digits.

    Example:
        >>> format_seconds(0.00025), format_seconds(0.0123), format_seconds(75)
        ('250 µs', '12.3 ms', '1 min 15 s')
    """
    if not seconds:
        return "0 s"
    if seconds >= 59.95:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def format_count(count: float) -> str:
    """Return a count for people: ``12.3 M``.

    Example:
        >>> format_count(12_345_678), format_count(999)
        ('12.3 M', '999')
    """
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * scale:
            return f"{_digits(count / scale)} {unit}"
    return _digits(count)


def _digits(value: float) -> str:
    """Return three significant digits, or all before the point; never an exponent."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
