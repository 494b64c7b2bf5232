"""`RankPlace`: which ranks, real or virtual, this process serves.

Without virtual ranks a process serves one: itself. With V of them, samples are assigned to V ranks whatever the number
of real ones, and a process serves the consecutive virtual ranks that `leaves_of` names, one batch for each in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from paceline._core.format import plural
from paceline._core.summation_tree import check_virtual_ranks, leaves_of
from paceline.errors import UsageError

__all__ = ["RankPlace"]


@dataclass(frozen=True)
class RankPlace:
    """Place of this process among the ranks.

    Attributes:
        rank: of this process.
        ranks: number of processes.
        virtual_ranks: number of virtual ranks; None: there are none.

    Raises:
        UsageError: fewer virtual ranks than ranks.

    Example:
        >>> RankPlace(1, 3, virtual_ranks=8).own, RankPlace(1, 3).own
        (range(3, 6), range(1, 2))
    """

    rank: int
    ranks: int
    virtual_ranks: int | None = None

    def __post_init__(self) -> None:
        if self.virtual_ranks is not None:
            check_virtual_ranks(self.virtual_ranks, self.ranks, rank=self.rank)

    @property
    def served(self) -> int:
        """Number of ranks to which samples are assigned, by all processes."""
        return self.virtual_ranks or self.ranks

    @cached_property
    def own(self) -> range:
        """Those that this process serves."""
        return self.own_of(self.rank)

    def own_of(self, rank: int) -> range:
        """Return those that the process `rank` serves."""
        return leaves_of(rank, self.ranks, self.served)

    @cached_property
    def most_own(self) -> int:
        """Largest number of those that a process serves."""
        return len(self.own_of(0))

    def server(self, served: int) -> int:
        """Return the process that serves `served`."""
        return next(rank for rank in range(self.ranks) if served in self.own_of(rank))

    @contextmanager
    def naming_virtual_ranks(self) -> Iterator[None]:
        """Let errors in the assignment of samples, raised in this block, say that their ranks are virtual ones."""
        try:
            yield
        except UsageError as error:
            if self.virtual_ranks is None:
                raise
            problem = str(error).partition("\n")[0].removeprefix(f"[rank {error.rank}] ")
            raise type(error)(
                f"with virtual_ranks={self.virtual_ranks}, {problem}", remedy=error.remedy
            ) from error

    def __str__(self) -> str:
        """Return such as ``8 virtual ranks on 3 ranks``."""
        ranks = plural(self.ranks, "rank")
        return (
            ranks
            if self.virtual_ranks is None
            else f"{plural(self.virtual_ranks, 'virtual rank')} on {ranks}"
        )
