"""What is priced and run: an algorithm, in how many segments (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.collectives.catalogue import algorithms_of, has_root, schedule
from paceline.collectives.cost import Price, cost
from paceline.collectives.schedule import Schedule, pipelined
from paceline.topology import Topology

__all__ = ["ELEMENT_NBYTES", "Case", "best_segments", "contenders"]

ELEMENT_NBYTES = 4
"""Of the float32 that are carried."""

_SEGMENTS = (1, 2, 4, 8, 16, 32, 64)
_WORTH = 0.02  # of the price: more segments must save that much to be taken


@dataclass(frozen=True)
class Case:
    """An algorithm as it is priced and run.

    Attributes:
        op, algorithm: as `catalogue.schedule` knows them.
        ranks: how many take part.
        root: the rank it is about.
        segments: pieces of every chunk, each one round behind the one before.
        per_node: of two-level: ranks of a node.
    """

    op: str
    algorithm: str
    ranks: int
    root: int = 0
    segments: int = 1
    per_node: int | None = None

    @property
    def label(self) -> str:
        """Its name in a table."""
        return self.algorithm if self.segments == 1 else f"{self.algorithm}, {self.segments} segments"

    def schedule(self) -> Schedule:
        """Return its schedule."""
        made = schedule(self.op, self.algorithm, self.ranks, root=self.root, per_node=self.per_node)
        return pipelined(made, self.segments)

    def price(self, topology: Topology, nbytes: float, gamma: float = 0.0) -> Price:
        """Return what it costs."""
        return cost(self.schedule(), topology, nbytes, gamma)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Case:
        """Return what :meth:`to_json` gave."""
        return cls(**stored)


def best_segments(price_of: Callable[[int], float]) -> int:
    """Return the number of segments, of 1, 2, 4 … 64, beyond which more save less than 2 %."""
    best, least = 1, price_of(1)
    for segments in _SEGMENTS[1:]:
        price = price_of(segments)
        if price < (1 - _WORTH) * least:
            best, least = segments, price
    return best


def contenders(
    op: str, topology: Topology, nbytes: float, gamma: float = 0.0, root: int = 0
) -> Iterator[Case]:
    """Yield every algorithm of an operation whole, and in segments where the price says that they pay.

    Raises:
        UsageError: no such operation, or no such root.
    """
    ranks = topology.ranks
    for name in algorithms_of(op):
        rooted = root if has_root(op, name) else 0
        per_node = max(2, topology.per_node) if name == "two-level" else None
        whole = Case(op, name, ranks, rooted, 1, per_node)
        yield whole

        def price_of(
            segments: int, name: str = name, rooted: int = rooted, per_node: int | None = per_node
        ) -> float:
            return Case(op, name, ranks, rooted, segments, per_node).price(topology, nbytes, gamma).seconds

        segments = best_segments(price_of) if ranks > 2 and nbytes else 1
        if segments > 1:
            yield Case(op, name, ranks, rooted, segments, per_node)
