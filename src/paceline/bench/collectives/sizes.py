"""Sizes and numbers of ranks as they are written on the command line (pure)."""

from __future__ import annotations

import math

from paceline.errors import UsageError
from paceline.units import parse_bytes

__all__ = ["parse_names", "parse_ranks", "parse_sizes"]

_MOST_SIZES = 200


def parse_names(text: str, option: str) -> tuple[str, ...]:
    """Return the names in a list separated by commas, each once.

    Raises:
        UsageError: there is none.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"{option} {text!r} names none", remedy="separate names by commas")
    return names


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return numbers of ranks from ``"2,4,6"``, each once, in order.

    Raises:
        UsageError: one is no number, or there is none.
    """
    found = []
    for name in parse_names(text, "--ranks"):
        try:
            found.append(int(name))
        except ValueError:
            raise UsageError(
                f"--ranks {name!r} is no number of ranks", remedy="write whole numbers such as 2,4,6"
            ) from None
    return tuple(sorted(set(found)))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return sizes in bytes, each once, in ascending order.

    Args:
        text: sizes separated by commas. One may be a sweep ``FIRST:LAST:xFACTOR`` or ``FIRST:LAST:+STEP``.

    Raises:
        UsageError: a size is none or 0, or a sweep makes no progress, or more than 200 sizes.

    Example:
        >>> parse_sizes("1MB,64KiB:256KiB:x2")
        (65536, 131072, 262144, 1000000)
        >>> parse_sizes("1kB:3kB:+1kB")
        (1000, 2000, 3000)
    """
    found: set[int] = set()
    for name in parse_names(text, "--sizes"):
        found.update(_sweep(name) if ":" in name else [_size(name)])
        if len(found) > _MOST_SIZES:
            raise UsageError(f"--sizes {text!r}: more than {_MOST_SIZES} sizes", remedy="take larger steps")
    return tuple(sorted(found))


def _size(text: str) -> int:
    nbytes = parse_bytes(text)
    if nbytes < 1:
        raise UsageError(f"--sizes {text!r}: a message has at least 1 byte", remedy="for example 1MB")
    return nbytes


def _sweep(text: str) -> list[int]:
    parts = text.split(":")
    if len(parts) != 3 or parts[2][:1] not in ("x", "+"):
        raise UsageError(
            f"--sizes {text!r} is no sweep", remedy="write FIRST:LAST:x2 or FIRST:LAST:+1MB, 64KiB:64MiB:x2"
        )
    first, last = _size(parts[0]), _size(parts[1])
    if first > last:
        raise UsageError(f"--sizes {text!r} begins above its end", remedy="write the smaller size first")
    return _by_factor(text, first, last) if parts[2][0] == "x" else _by_step(text, first, last)


def _by_factor(text: str, first: int, last: int) -> list[int]:
    written = text.rsplit(":x", 1)[1]
    try:
        factor = float(written)
    except ValueError:
        factor = math.nan
    if not 1 < factor < math.inf:
        raise UsageError(f"--sizes {text!r}: x{written} makes no sweep", remedy="give a factor above 1: x2")
    steps = math.floor(math.log(last / first) / math.log(factor) + 1e-9)
    if steps > _MOST_SIZES:
        raise UsageError(f"--sizes {text!r}: more than {_MOST_SIZES} sizes", remedy="take a larger factor")
    return [round(first * factor**step) for step in range(steps + 1)]


def _by_step(text: str, first: int, last: int) -> list[int]:
    step = _size(text.rsplit(":+", 1)[1])
    if (last - first) // step > _MOST_SIZES:
        raise UsageError(f"--sizes {text!r}: more than {_MOST_SIZES} sizes", remedy="take larger steps")
    return list(range(first, last + 1, step))
