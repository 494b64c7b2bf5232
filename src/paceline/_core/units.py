"""Parses quantities with units, ``"25MiB"``, ``"1Gbit/s"``, ``"250us"``, and lists and sweeps of them.

Inside Paceline a size is an ``int`` in bytes (``nbytes``), a time a ``float`` in seconds and a rate a ``float`` in
bytes per second. Decimal prefixes count in 1000 (``MB``), binary ones in 1024 (``MiB``). Every parser returns a number
as it is, and raises a `UsageError` for a text that it can't parse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TypeVar

from paceline.errors import UsageError

__all__ = [
    "MIB",
    "parse_bytes",
    "parse_count",
    "parse_list",
    "parse_rate",
    "parse_seconds",
    "parse_share",
    "parse_sweep",
]

T = TypeVar("T")

MIB = 1024 * 1024

_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PREFIX |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-zµ/]*)\s*", re.IGNORECASE)
_LARGEST = 1e200  # a float holds it times any unit


def _split(text: str, kind: str, example: str) -> tuple[float, str]:
    """Return number and unit, in lower case."""
    match = _NUMBER.fullmatch(text)
    number = float(match[1].replace("_", "")) if match is not None else math.inf
    if match is None or number > _LARGEST:
        raise UsageError(f"{text!r} is no {kind}", remedy=f"write a number and a unit, for example {example}")
    return number, match[2].lower()


def _unknown_unit(text: str, kind: str, unit: str, remedy: str) -> UsageError:
    return UsageError(f"{text!r} is no {kind}: unknown unit {unit!r}", remedy=remedy)


def parse_bytes(text: str | int) -> int:
    """Return a size in bytes: a number with ``B``, ``kB``, ``MB``, ``GB``, ``KiB``, ``MiB``, ``GiB`` …, or without.

    Example:
        >>> parse_bytes("25MiB"), parse_bytes("5MB"), parse_bytes(17)
        (26214400, 5000000, 17)
    """
    if isinstance(text, int):
        return text
    number, unit = _split(text, "size", "25MiB or 5MB")
    prefix = unit.removesuffix("b")
    if prefix not in _PREFIX or (unit and unit == prefix):
        raise _unknown_unit(text, "size", unit, "valid: B kB MB GB TB KiB MiB GiB TiB")
    return round(number * _PREFIX[prefix])


def parse_rate(text: str | float) -> float:
    """Return a data rate in bytes per second: a number with ``MB/s``, ``MiB/s``, ``Mbit/s``, ``Gbit/s`` ….

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
    raise _unknown_unit(text, "rate", unit, "valid: MB/s MiB/s Mbit/s Gbit/s …")


def parse_seconds(text: str | float) -> float:
    """Return a time in seconds: a number with ``ns``, ``us``, ``ms``, ``s``, ``min``, ``h`` or ``d``.

    Example:
        >>> parse_seconds("250us"), parse_seconds("5min")
        (0.00025, 300.0)
    """
    if isinstance(text, int | float):
        return float(text)
    number, unit = _split(text, "time", "250us or 5min")
    if unit not in _SECONDS:
        raise _unknown_unit(text, "time", unit, f"valid: {' '.join(_SECONDS)}")
    return number * _SECONDS[unit]


def parse_count(text: str | int) -> int:
    """Return a count: a number with ``k``, ``M``, ``G`` (or ``B``) or ``T``, or without.

    Example:
        >>> parse_count("20M"), parse_count("1.5B"), parse_count("4_000")
        (20000000, 1500000000, 4000)
    """
    if isinstance(text, int):
        return text
    number, unit = _split(text, "count", "20M or 1.5B")
    prefix = "g" if unit == "b" else unit
    if prefix not in ("", "k", "m", "g", "t"):
        raise _unknown_unit(text, "count", unit, "valid: k M G B T")
    return round(number * _PREFIX[prefix])


def parse_share(text: str | float) -> float:
    """Return a share, such as 0 to 1 of a whole: a number, or one with ``%``.

    Example:
        >>> parse_share("10%"), parse_share("0.25")
        (0.1, 0.25)
    """
    if isinstance(text, int | float):
        return float(text)
    plain = text.strip().removesuffix("%")
    number, unit = _split(plain, "share", "10% or 0.1")
    if unit:
        raise _unknown_unit(text, "share", unit, "write 10% or 0.1")
    return number if plain == text.strip() else number / 100


def parse_list(
    option: str,
    text: str,
    kind: Callable[[str], T],
    *,
    example: str,
    separator: str = ",",
    unique: bool = False,
) -> tuple[T, ...]:
    """Return the values that an option's text lists, in its order.

    Args:
        option: its name, for errors: ``"--block"``.
        text: the values, separated.
        kind: parses one value: ``int``, ``float``, ``str``, or a parser such as `parse_bytes`.
        example: a valid text, for errors.
        separator: between two values.
        unique: drop repetitions.

    Raises:
        UsageError: there is no value, or one is not valid.

    Example:
        >>> parse_list("--block", "2,10", int, example="2,10,100")
        (2, 10)
    """
    remedy, values = f"for example: {option} {example}", list[T]()
    for part in filter(None, (part.strip() for part in text.split(separator))):
        try:
            values.append(_value(kind, part))
        except ValueError as error:
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"{option} {text!r}: {reason}", remedy=getattr(error, "remedy", "") or remedy
            ) from error
    if not values:
        raise UsageError(f"{option} {text!r} is empty", remedy=remedy)
    return tuple(dict.fromkeys(values)) if unique else tuple(values)


def parse_sweep(
    option: str,
    text: str,
    kind: Callable[[str], float],
    *,
    example: str,
    least: float = 1,
    most: int = 200,
    strict: bool = False,
) -> tuple[float, ...]:
    """Return the numbers that an option's text lists or sweeps, each once, in ascending order.

    Args:
        option: its name, for errors: ``"--bytes"``.
        text: numbers separated by commas; one may be a sweep ``FIRST:LAST`` (doubling), ``FIRST:LAST:xFACTOR`` or
            ``FIRST:LAST:+STEP``, which ends with ``LAST``.
        kind: parses a number: ``int``, ``float``, or a parser such as `parse_bytes`.
        example: a valid text, for errors.
        least: the smallest valid number.
        most: the largest valid count of numbers.
        strict: a sweep must name its step, and excludes ``LAST`` if its steps miss it.

    Raises:
        UsageError: a number is not valid or below `least`, a sweep makes no progress, or there are too many numbers.

    Example:
        >>> parse_sweep("--bytes", "1MB,64KiB:256KiB:x2", parse_bytes, example="1MB")
        (65536, 131072, 262144, 1000000)
        >>> parse_sweep("--nnodes", "1:10", int, example="1:10000")
        (1, 2, 4, 8, 10)
    """
    too_many = UsageError(f"more than {most} numbers", remedy="take larger steps")

    def number(part: str) -> float:
        value = _value(kind, part)
        if not value >= least:
            raise ValueError(f"{part} is below {least:g}")
        return value

    def sweep(part: str) -> tuple[float, ...]:
        first, *bounds = part.split(":")
        if not bounds:
            return (number(first),)
        step = bounds[1] if len(bounds) == 2 else "" if strict else "x2"
        if len(bounds) > 2 or step[:1] not in ("x", "+"):
            raise ValueError(f"{part} is no sweep: write FIRST:LAST:x2 or FIRST:LAST:+STEP")
        low, last = number(first), number(bounds[0])
        by = _value(float if step[0] == "x" else kind, step[1:])
        if last < low or not (1 < by < math.inf if step[0] == "x" else by > 0):
            raise ValueError(f"{part} makes no progress")
        values = [low]
        while values[-1] < last:
            following = low * by ** len(values) if step[0] == "x" else low + by * len(values)
            if following > last * (1 + 1e-9):
                values += [] if strict else [last]
                break
            values.append(round(following) if isinstance(low, int) else following)
            if len(values) > most:
                raise too_many
        return tuple(values)

    found = sorted({value for part in parse_list(option, text, sweep, example=example) for value in part})
    if len(found) > most:
        raise UsageError(f"{option} {text!r}: {too_many}")
    return tuple(found)


def _value(kind: Callable[[str], T], part: str) -> T:
    """Return `kind` of `part`, with an error that needs no Python to be understood."""
    noun = "whole number" if kind is int else "number" if kind is float else ""
    try:
        return kind(part)
    except ValueError as error:
        if not noun:
            raise
        raise ValueError(f"{part!r} is no {noun}") from error
