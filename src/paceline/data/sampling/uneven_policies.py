"""Which of its samples a rank takes in which step, under each policy for unequal amounts.

Every rank has its own number of samples, and a step is synchronous: all ranks take part in it, or it hangs.
The policies differ in how many steps there are, and in what a rank does that has fewer or more batches:

    join       as many as the longest rank needs; a rank that ran dry takes part with 0 samples: exact
    rebalance  as many as the whole data need; each rank's batches are as large as its amount asks: exact
    truncate   as many as the shortest rank has; what the others have left is dropped
    drop       the same, counting full batches only
    pad        as many as the longest rank needs; a rank that ran dry repeats its own samples from the first
    error      refuses unequal numbers of batches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from paceline.errors import UnevenData, UsageError, unknown

__all__ = ["EXACT", "RankPortions", "UnevenPolicy", "check_batching"]

UnevenPolicy = Literal["join", "rebalance", "truncate", "pad", "drop", "error"]

EXACT: tuple[UnevenPolicy, ...] = ("join", "rebalance", "error")
"""Policies under which every sample is used exactly once."""


@dataclass(frozen=True)
class RankPortions:
    """The batches of all ranks in one epoch.

    Attributes:
        counts: samples of each rank.
        batch_size: samples of a full batch; with ``"rebalance"`` the mean over ranks.
        policy: what happens where the numbers of batches differ.

    Raises:
        UsageError: an unknown policy, a batch size below 1, no samples at all, or a rank that has none to
            repeat (``"pad"``).
        UnevenData: the policy is ``"error"`` and ranks have unequal numbers of batches.

    Example:
        >>> join = RankPortions((10, 4), batch_size=4, policy="join")
        >>> join.steps, [join.size(1, step) for step in range(join.steps)]
        (3, [4, 0, 0])
    """

    counts: tuple[int, ...]
    batch_size: int
    policy: UnevenPolicy = "join"

    def __post_init__(self) -> None:
        check_batching(self.batch_size, self.policy)
        if not any(self.counts):
            raise UsageError("there are no samples", remedy="pass data with at least one sample")
        if self.policy == "pad" and not all(self.counts):
            raise UsageError(
                f"rank {self.counts.index(0)} has no samples, so it has none to repeat",
                rank=self.counts.index(0),
                remedy="use smaller blocks, or uneven='join'",
            )
        if self.policy == "error" and len(set(self.batches)) > 1:
            raise UnevenData(
                f"ranks have unequal numbers of batches: {tell(self.batches)} of up to {self.batch_size}",
                remedy="use uneven='join' or 'rebalance' (every sample once), or 'truncate', 'drop' or 'pad'",
            )
        if not self.steps:
            amounts = self.counts if self.policy == "truncate" else self.full_batches
            raise UsageError(
                f"no step can be made: rank {amounts.index(0)} has {self.counts[amounts.index(0)]} samples, "
                f"batches have {self.batch_size}",
                rank=amounts.index(0),
                remedy="use smaller batches or blocks, or uneven='join'",
            )

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Batches that each rank's samples make, the last of them maybe short."""
        return tuple(-(-count // self.batch_size) for count in self.counts)

    @cached_property
    def full_batches(self) -> tuple[int, ...]:
        """Full batches that each rank's samples make."""
        return tuple(count // self.batch_size for count in self.counts)

    @cached_property
    def steps(self) -> int:
        """Steps of the epoch, the same on all ranks."""
        if self.policy == "rebalance":
            return -(-sum(self.counts) // (self.batch_size * len(self.counts)))
        if self.policy == "truncate":
            return min(self.batches)
        if self.policy == "drop":
            return min(self.full_batches)
        return max(self.batches)

    @cached_property
    def _most(self) -> int:
        return max(self.counts)

    def bounds(self, rank: int, step: int) -> tuple[int, int]:
        """Return (first, end) of the samples that `rank` takes in `step`, numbered within the rank's own.

        With ``"pad"``, numbers from ``counts[rank]`` on mean the rank's samples from the first again.
        """
        first, end = self.edges(rank, step, step + 1)
        return first, end

    def edges(self, rank: int, step: int, last: int) -> list[int]:
        """Return how many samples `rank` has taken before each of the steps from `step` to `last`."""
        count, steps = self.counts[rank], range(step, last + 1)
        if self.policy == "rebalance":
            return [count * each // self.steps for each in steps]
        there, size = self._most if self.policy == "pad" else count, self.batch_size
        return [min(each * size, there) for each in steps]

    def size(self, rank: int, step: int) -> int:
        """Return how many samples `rank` has in `step`; 0 where it ran dry."""
        first, end = self.bounds(rank, step)
        return end - first

    # ------------------------------------------------------------------ what that does to the data

    def taken(self, rank: int, steps: int) -> int:
        """Return how many different samples of its own `rank` has seen after `steps` steps."""
        return min(self.bounds(rank, steps - 1)[1], self.counts[rank]) if steps else 0

    @property
    def used(self) -> int:
        """Different samples that the epoch uses."""
        return sum(self.taken(rank, self.steps) for rank in range(len(self.counts)))

    @property
    def dropped(self) -> int:
        """Samples that the epoch never uses."""
        return sum(self.counts) - self.used

    @property
    def repeated(self) -> int:
        """Samples that the epoch uses a second time or more, counted each time."""
        if self.policy != "pad":
            return 0
        return sum(self._most - count for count in self.counts)

    @property
    def empty(self) -> int:
        """Batches, of all ranks, that have no sample."""
        if self.policy == "rebalance":
            return sum(max(0, self.steps - count) for count in self.counts)
        if self.policy == "pad":
            return 0
        return sum(max(0, self.steps - batches) for batches in self.batches)

    def tell(self) -> str:
        """Return one sentence: what the policy does to these data."""
        return f"{self.steps} step{'s' * (self.steps != 1)} on every rank; " + _SENTENCES[self.policy](self)


def check_batching(batch_size: int, policy: str) -> None:
    """Raise a `UsageError` for an unknown policy, or a batch size below 1."""
    if policy not in get_args(UnevenPolicy):
        raise unknown("policy for uneven data", policy, get_args(UnevenPolicy))
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size={batch_size!r}", remedy="pass a whole number, 1 or more")


def tell(numbers: Sequence[int], most: int = 8) -> str:
    """Return ``3, 4, 4`` for a few numbers, and the range of many."""
    if len(numbers) <= most:
        return ", ".join(map(str, numbers))
    return f"{min(numbers)} to {max(numbers)}"


def _share(part: int, portions: RankPortions) -> str:
    return f"{part} of {sum(portions.counts)} samples ({part / sum(portions.counts):.1%})"


def _of_join(portions: RankPortions) -> str:
    if not portions.empty:
        return "every sample is used once"
    return (
        "every sample is used once; ranks that run dry take part without data "
        f"({portions.empty} of {portions.steps * len(portions.counts)} batches are empty)"
    )


def _of_rebalance(portions: RankPortions) -> str:
    sizes = [-(-count // portions.steps) for count in portions.counts]
    return f"every sample is used once, in batches of up to {tell(sizes)}"


def _of_dropping(portions: RankPortions) -> str:
    dropped = portions.dropped
    return f"{_share(dropped, portions)} are never used" if dropped else "every sample is used once"


def _of_pad(portions: RankPortions) -> str:
    repeated = portions.repeated
    return f"{_share(repeated, portions)} are used again" if repeated else "every sample is used once"


_SENTENCES = {
    "join": _of_join,
    "error": _of_join,
    "rebalance": _of_rebalance,
    "truncate": _of_dropping,
    "drop": _of_dropping,
    "pad": _of_pad,
}
