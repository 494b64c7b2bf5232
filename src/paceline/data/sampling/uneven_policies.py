"""Batches of each rank in each step, under the policies for uneven data.

Every rank has its own number of samples, and all ranks take part in every step. The policies differ in the number of
steps, and in what ranks with fewer or more batches do:

    join       until the last rank runs out; ranks that ran out take part with 0 samples: exact
    rebalance  the fewest steps for all data; batch sizes in proportion to each rank's samples: exact
    truncate   until the first rank runs out; remaining samples of the others are dropped
    drop       the same, counting full batches only
    pad        until the last rank runs out; ranks that ran out repeat their own samples from the first
    error      raises if the numbers of batches differ
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from paceline._core.format import plural
from paceline.errors import UnevenData, UsageError, unknown

__all__ = ["EXACT", "RankPortions", "UnevenPolicy", "check_batching", "list_or_range"]

UnevenPolicy = Literal["join", "rebalance", "truncate", "pad", "drop", "error"]

EXACT: tuple[UnevenPolicy, ...] = ("join", "rebalance", "error")
"""Policies that use every sample exactly once."""


@dataclass(frozen=True)
class RankPortions:
    """The batches of all ranks in an epoch.

    Attributes:
        counts: samples of each rank.
        batch_size: samples per full batch; with ``"rebalance"`` the mean over ranks.
        policy: for uneven data.

    Raises:
        UsageError: the policy is unknown, the batch size is below 1, there are no samples, or a rank has none to
            repeat (``"pad"``).
        UnevenData: the policy is ``"error"`` and ranks have different numbers of batches.

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
                f"ranks have unequal numbers of batches: {list_or_range(self.batches)} of up to {self.batch_size}",
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
        """Batches of each rank, including a short last one."""
        return tuple(-(-count // self.batch_size) for count in self.counts)

    @cached_property
    def full_batches(self) -> tuple[int, ...]:
        """Full batches of each rank."""
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
    def _largest(self) -> int:
        return max(self.counts)

    def bounds(self, rank: int, step: int) -> tuple[int, int]:
        """Return (first, end) of the samples of `rank` in `step`, as indices of its own samples.

        With ``"pad"``, indices from ``counts[rank]`` on repeat the rank's samples from the first.
        """
        first, end = self.edges(rank, step, step + 1)
        return first, end

    def edges(self, rank: int, step: int, last: int) -> list[int]:
        """Return the number of samples of `rank` before each of the steps from `step` to `last`."""
        count, steps = self.counts[rank], range(step, last + 1)
        if self.policy == "rebalance":
            return [count * each // self.steps for each in steps]
        available, size = self._largest if self.policy == "pad" else count, self.batch_size
        return [min(each * size, available) for each in steps]

    def size(self, rank: int, step: int) -> int:
        """Return the number of samples of `rank` in `step`; 0 after it ran out."""
        first, end = self.bounds(rank, step)
        return end - first

    # ------------------------------------------------------------------ effect on the data

    def taken(self, rank: int, steps: int) -> int:
        """Return how many different samples of its own `rank` has used after `steps` steps."""
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
        """Number of repeated samples, counted each time."""
        if self.policy != "pad":
            return 0
        return sum(self._largest - count for count in self.counts)

    @property
    def empty(self) -> int:
        """Batches without samples, of all ranks."""
        if self.policy == "rebalance":
            return sum(max(0, self.steps - count) for count in self.counts)
        if self.policy == "pad":
            return 0
        return sum(max(0, self.steps - batches) for batches in self.batches)

    def describe(self) -> str:
        """Return one sentence on the effect of the policy on this data."""
        return f"{plural(self.steps, 'step')} on every rank; {self._effect()}"

    def _effect(self) -> str:
        once, total = "every sample is used once", sum(self.counts)
        if self.policy == "rebalance":
            sizes = [-(-count // self.steps) for count in self.counts]
            return f"{once}, in batches of up to {list_or_range(sizes)}"
        if lost := self.dropped or self.repeated:
            verb = "never used" if self.dropped else "used again"
            return f"{lost} of {total} samples ({lost / total:.1%}) are {verb}"
        if self.policy in EXACT and self.empty:
            empty = f"{self.empty} of {self.steps * len(self.counts)} batches are empty"
            return f"{once}; ranks that run out of data take part without ({empty})"
        return once


def check_batching(batch_size: int, policy: str) -> None:
    """Raise a `UsageError` if the policy is unknown or the batch size below 1."""
    if policy not in get_args(UnevenPolicy):
        raise unknown("policy for uneven data", policy, get_args(UnevenPolicy))
    if not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size={batch_size!r}", remedy="pass a whole number, 1 or more")


def list_or_range(numbers: Sequence[int], most: int = 8) -> str:
    """Return up to `most` numbers as a list, such as ``3, 4, 4``; the range of more."""
    if len(numbers) <= most:
        return ", ".join(map(str, numbers))
    return f"{min(numbers)} to {max(numbers)}"
