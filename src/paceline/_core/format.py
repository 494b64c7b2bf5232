"""Formats numbers for people: sizes, times, counts, shares and ratios, in one style everywhere."""

from __future__ import annotations

import math

__all__ = [
    "format_bytes",
    "format_count",
    "format_decimal",
    "format_duration",
    "format_number",
    "format_percent",
    "format_ratio",
    "format_seconds",
    "format_size",
    "plural",
]


def format_bytes(nbytes: float) -> str:
    """Return a size in binary units, with three significant digits.

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
    """Return the size of a message: in decimal units, unless only binary ones make it round.

    Example:
        >>> format_size(100_000_000), format_size(1_024_000_000), format_size(65536), format_size(17)
        ('100 MB', '1.02 GB', '64 KiB', '17 B')
    """
    if nbytes % 1024 == 0 and nbytes % 1000:
        return format_bytes(nbytes)
    return format_decimal(nbytes)


def format_decimal(nbytes: float) -> str:
    """Return a size in decimal units, as networks count.

    Example:
        >>> format_decimal(81_899_520), format_decimal(17)
        ('81.9 MB', '17 B')
    """
    return f"{format_count(nbytes)}{'' if nbytes >= 999.5 else ' '}B"


def format_seconds(seconds: float) -> str:
    """Return a time with three significant digits.

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
    """Return a count with three significant digits and a decimal prefix.

    Example:
        >>> format_count(12_345_678), format_count(999)
        ('12.3 M', '999')
    """
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 0.9995 * scale:
            return f"{_digits(count / scale)} {unit}"
    return _digits(count)


def format_duration(seconds: float) -> str:
    """Return a long time: as `format_seconds`, or in days from two days on.

    Example:
        >>> format_duration(5400.0), format_duration(200_000.0), format_duration(1e8)
        ('1 h 30 min', '2.3 d', '1,157 d')
    """
    days = seconds / 86400.0
    if days < 2:
        return format_seconds(seconds)
    return f"{days:,.0f} d" if days >= 99.5 else f"{days:.2g} d"


def format_percent(share: float) -> str:
    """Return a share in per cent: two significant digits below 10 %, and enough of them near 100 %.

    Example:
        >>> format_percent(0.0123), format_percent(0.5), format_percent(0.0), format_percent(0.99991)
        ('1.2 %', '50 %', '0 %', '99.99 %')
    """
    percent = 100 * share
    if 99 < percent < 100:
        return f"{percent:.4g} %"
    return f"{percent:.2g} %" if abs(percent) < 9.95 else f"{percent:,.0f} %"


def format_ratio(ratio: float) -> str:
    """Return a ratio with two significant digits.

    Example:
        >>> format_ratio(2.947), format_ratio(0.1536), format_ratio(61198.2)
        ('2.9×', '0.15×', '61,198×')
    """
    return f"{ratio:,.0f}×" if ratio >= 9.95 else f"{ratio:.2g}×"


def format_number(value: float) -> str:
    """Return a score or a loss with four significant digits.

    Example:
        >>> format_number(0.73274588), format_number(math.nan)
        ('0.7327', 'not a number')
    """
    return f"{value:.4g}" if math.isfinite(value) else "not a number"


def plural(count: float, noun: str) -> str:
    """Return a count with its noun.

    Example:
        >>> plural(1, "worker"), plural(12345, "update")
        ('1 worker', '12,345 updates')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _digits(value: float) -> str:
    """Return three significant digits, or all before the point; never an exponent."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
