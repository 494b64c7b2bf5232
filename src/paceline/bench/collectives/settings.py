"""What `paceline bench collectives` is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.bench.collectives.backends import backend_of
from paceline.bench.collectives.operations import operation_of
from paceline.errors import UsageError, unknown

__all__ = ["DTYPES", "RENDEZVOUS", "CollectiveSettings"]

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
