"""What a dealing does to batches, told before anything runs: who starves, what each policy costs, what is safe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from paceline.data.dispatch import Dealing
from paceline.data.portions import Policy, Portions
from paceline.data.shares import Shares
from paceline.errors import UnevenData, UsageError

__all__ = ["Balance", "Outcome", "is_even", "safe_batch_sizes", "safe_blocks"]

MOST_CANDIDATES = 20_000


@dataclass(frozen=True)
class Outcome:
    """What an epoch is like under one policy.

    Attributes:
        policy: its name; ``"none"``: every rank just loops over its own batches.
        steps: of the epoch; None where there is no epoch.
        used: different samples that it uses.
        dropped: samples that it never uses.
        repeated: samples that it uses again, counted each time.
        empty: batches, of all ranks, without a sample.
        deadlock: whether ranks wait for others that will not come.
        refused: why there is no epoch; empty where there is one.
    """

    policy: str
    steps: int | None
    used: int = 0
    dropped: int = 0
    repeated: int = 0
    empty: int = 0
    deadlock: bool = False
    refused: str = ""

    @property
    def exact(self) -> bool:
        """Whether every sample is used exactly once."""
        return self.steps is not None and not (self.dropped or self.repeated or self.deadlock)


@dataclass(frozen=True)
class Balance:
    """A dealing, cut into batches.

    Attributes:
        dealing: who gets what.
        batch_size: samples of a full batch.
        drop_last: whether a loader without a policy leaves out the short last batch.
    """

    dealing: Dealing
    batch_size: int
    drop_last: bool = False

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Batches of each rank: all of them, or the full ones."""
        size = self.batch_size
        return tuple(count // size if self.drop_last else -(-count // size) for count in self.dealing.counts)

    @property
    def starving(self) -> list[tuple[int, int]]:
        """(rank, steps that it can make) of every rank that has fewer batches than another."""
        most = max(self.batches)
        return [(rank, batches) for rank, batches in enumerate(self.batches) if batches < most]

    @property
    def deadlock(self) -> bool:
        """Whether ranks that each loop over their own batches end up waiting for one another."""
        return bool(self.starving)

    def outcome(self, policy: Policy) -> Outcome:
        """Return what an epoch is like under `policy`."""
        try:
            portions = Portions(self.dealing.counts, self.batch_size, policy)
        except (UnevenData, UsageError) as error:
            return Outcome(policy, None, refused=str(error).partition("\n")[0])
        return Outcome(
            policy, portions.steps, portions.used, portions.dropped, portions.repeated, portions.empty
        )

    @property
    def without_policy(self) -> Outcome:
        """What becomes of ranks that each loop over their own batches."""
        steps = min(self.batches)
        counts = self.dealing.counts
        if not self.deadlock:
            used = sum(min(count, steps * self.batch_size) for count in counts)
            return Outcome("none", steps, used, sum(counts) - used)
        used = sum(min(count, steps * self.batch_size) for count in counts)
        return Outcome("none", steps, used, sum(counts) - used, deadlock=True)

    @property
    def outcomes(self) -> list[Outcome]:
        """Every policy's outcome, that of none first."""
        return [self.without_policy, *(self.outcome(policy) for policy in get_args(Policy))]


def is_even(counts: Iterable[int], batch_size: int, *, drop_last: bool = False) -> bool:
    """Tell whether all ranks have the same number of batches."""
    return len({count // batch_size if drop_last else -(-count // batch_size) for count in counts}) == 1


def safe_blocks(
    samples: int, shares: Shares, batch_size: int, *, drop_last: bool = False, largest: int | None = None
) -> list[int]:
    """Return the block sizes, dealt in turns, for which all ranks have the same number of batches.

    Args:
        samples, shares: what is dealt, and to whom.
        batch_size, drop_last: how it is cut.
        largest: the largest block to look at; None: a whole period of turns fills the data. Of more than
            20,000 candidates an even selection is looked at.
    """
    top = largest or max(1, samples // shares.whole)
    stride = -(-top // MOST_CANDIDATES)
    return [
        block
        for block in range(1, top + 1, stride)
        if is_even(Dealing(samples, shares, block).counts, batch_size, drop_last=drop_last)
    ]


def safe_batch_sizes(
    counts: tuple[int, ...], candidates: Iterable[int], *, drop_last: bool = False
) -> list[int]:
    """Return which of the batch sizes `candidates` give all ranks the same number of batches."""
    return [size for size in candidates if is_even(counts, size, drop_last=drop_last)]
