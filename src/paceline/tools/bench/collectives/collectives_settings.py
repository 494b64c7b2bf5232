"""Settings of `paceline bench collectives`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from paceline.errors import UsageError, unknown
from paceline.tools.bench.collectives.benchmarked_backends import find_backend
from paceline.tools.bench.collectives.bus_bandwidth import find_operation

__all__ = ["DTYPES", "RENDEZVOUS", "CollectiveSettings"]

RENDEZVOUS = ("file", "tcp")
"""How ranks find each other."""

DTYPES = {"float32": 4, "float64": 8, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by type."""

_MOST_RANKS = {
    "float16": 28,
    "bfloat16": 11,
}  # with more, sums of the numbers used for checking would be rounded


@dataclass(frozen=True)
class CollectiveSettings:
    """Settings of a measurement of collectives.

    Attributes:
        backends: names as for `benchmarked_backends.find_backend`.
        ops: names of `bus_bandwidth.OPERATIONS`.
        ranks: numbers of processes, each 2 or more.
        sizes: of the message in bytes, S in `bus_bandwidth`.
        dtype: a name in `DTYPES`.
        warmup: calls before the timed ones.
        iterations: timed calls of each backend at each size; None: as many as fit into `seconds`.
        seconds: time for each backend at each size, if `iterations` is None.
        rendezvous: a name in `RENDEZVOUS`.
        network: name of the network between the ranks, kept in the result: ``"loopback"``, ``"1 Gbit/s star"`` …

    Raises:
        UsageError: a value is out of range or unknown.
    """

    backends: tuple[str, ...]
    ops: tuple[str, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    _: KW_ONLY
    dtype: str = "float32"
    warmup: int = 2
    iterations: int | None = None
    seconds: float = 2.0
    rendezvous: str = "file"
    network: str = "loopback"

    def __post_init__(self) -> None:
        for name in self.ops:
            find_operation(name)
        for name in self.backends:
            available = find_backend(name).ops
            if not set(self.ops) & set(available):
                raise UsageError(
                    f"backend {name!r} has none of {', '.join(self.ops)}",
                    remedy=f"it has {', '.join(available)}",
                )
        if self.dtype not in DTYPES:
            raise unknown("dtype", self.dtype, DTYPES)
        if self.rendezvous not in RENDEZVOUS:
            raise unknown("init method", self.rendezvous, RENDEZVOUS)
        given = {"backend": self.backends, "op": self.ops, "nproc-per-node": self.ranks, "bytes": self.sizes}
        for name, values in given.items():
            if not values:
                raise UsageError(f"--{name} is empty", remedy="give one or more")
        if min(self.ranks) < 2:
            raise UsageError(
                f"--nproc-per-node {min(self.ranks)}: one rank has no peer", remedy="give 2 or more"
            )
        if max(self.ranks) > _MOST_RANKS.get(self.dtype, max(self.ranks)):
            raise UsageError(
                f"--dtype {self.dtype}: its sums can't be checked exactly with {max(self.ranks)} ranks",
                remedy=f"give at most {_MOST_RANKS[self.dtype]} ranks, or --dtype float32",
            )
        if min(self.sizes) < 1:
            raise UsageError(f"--bytes {min(self.sizes)}", remedy="give 1 byte or more")
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
