"""What `paceline bench collectives` is asked to do.

Sizes and numbers of ranks as they are written on the command line (pure).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline._core.units import parse_bytes
from paceline.errors import UsageError, unknown
from paceline.tools.bench.collectives.benchmarked_backends import backend_of
from paceline.tools.bench.collectives.bus_bandwidth import operation_of

__all__ = ["DTYPES", "RENDEZVOUS", "CollectiveSettings", "parse_names", "parse_ranks", "parse_sizes"]

RENDEZVOUS = ("file", "tcp")


DTYPES = {"float32": 4, "float64": 8, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by type."""


_MOST_RANKS = {"float16": 28, "bfloat16": 11}
"""Beyond, a sum over ranks of the numbers that results are checked with would have to be rounded."""


@dataclass(frozen=True)
class CollectiveSettings:
    """Settings of a measurement of collectives.

    Attributes:
        backends: names of `backends.BACKENDS`.
        ops: names of `operations.OPERATIONS`.
        ranks: numbers of processes, each 2 or more.
        sizes: of the message in bytes; `operations` says of what.
        dtype: a name in `DTYPES`.
        warmup: calls before the timed ones.
        iterations: timed calls of each backend at each size; None: as many as `seconds` hold.
        seconds: time for each backend at each size, where `iterations` is None.
        rendezvous: where the ranks meet: in a ``"file"`` or over ``"tcp"``.
        network: what is between the ranks, for whoever reads the result: ``"loopback"``, ``"1 Gbit/s star"`` …

    Raises:
        UsageError: a value is out of range or unknown.
    """

    backends: tuple[str, ...]
    ops: tuple[str, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    warmup: int = 2
    iterations: int | None = None
    seconds: float = 2.0
    rendezvous: str = "file"
    network: str = "loopback"

    def __post_init__(self) -> None:
        for name in self.ops:
            operation_of(name)
        for name in self.backends:
            there = backend_of(name).ops
            if not set(self.ops) & set(there):
                raise UsageError(
                    f"backend {name!r} has none of {', '.join(self.ops)}", remedy=f"it has {', '.join(there)}"
                )
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.rendezvous not in RENDEZVOUS:
            raise unknown("rendezvous", self.rendezvous, RENDEZVOUS)
        for name in ("backends", "ops", "ranks", "sizes"):
            if not getattr(self, name):
                raise UsageError(f"--{name} names none", remedy="give one or more")
        if min(self.ranks) < 2:
            raise UsageError(
                f"--ranks {min(self.ranks)}: one rank has nobody to talk to", remedy="give 2 or more"
            )
        if max(self.ranks) > _MOST_RANKS.get(self.dtype, max(self.ranks)):
            raise UsageError(
                f"--dtype {self.dtype}: its sums can't be checked exactly with {max(self.ranks)} ranks",
                remedy=f"give at most {_MOST_RANKS[self.dtype]} ranks, or --dtype float32",
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        if min(self.sizes) < 1:
            raise UsageError(f"--sizes {min(self.sizes)}", remedy="give 1 byte or more")
        if self.warmup < 1:
            raise UsageError(f"--warmup {self.warmup}: the first call connects", remedy="give 1 or more")
        if self.iterations is not None and self.iterations < 1:
            raise UsageError(f"--iterations {self.iterations}", remedy="give 1 or more")
        if not 0 < self.seconds < 86_400:
            raise UsageError(
                f"--seconds {self.seconds:g}", remedy="give more than 0 and less than a day, such as 2"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        """Return the settings for JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> CollectiveSettings:
        """Return the settings that `to_json` wrote; what else a record holds is left out."""
        known: dict[str, Any] = {each.name: record[each.name] for each in fields(cls) if each.name in record}
        lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**{**known, **lists})


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
