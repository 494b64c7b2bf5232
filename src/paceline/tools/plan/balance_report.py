"""What a dealing does to batches, told before anything runs: who starves, what each policy costs, what is safe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from paceline.data.sampling.block_dispatch import BlockDispatch
from paceline.data.sampling.rank_shares import RankShares, TurnOrder
from paceline.data.sampling.uneven_policies import RankPortions, UnevenPolicy
from paceline.errors import UnevenData, UsageError

__all__ = ["BatchBalance", "PolicyOutcome", "is_even", "safe_batch_sizes", "safe_blocks"]

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class PolicyOutcome:
    """What an epoch is like under one policy.

    Attributes:
        policy: its name; ``"none"``: every rank just loops over its own batches.
        steps: of the epoch; None where there is no epoch.
        used: different samples that it uses.
        dropped: samples that it never uses.
        repeated: samples that it uses again, counted each time.
        empty: batches, of all ranks, without a sample.
        moved: how much of the gradient's weight is on other ranks' data than it should be, 0 to 1: half the sum
            over ranks of |weight - part of the data|. Where ranks' mean gradients differ by at most d, the
            epoch's mean gradient is off by at most ``moved * d``.
        deadlock: whether ranks wait for others that will not come.
        refused: why there is no epoch; empty where there is one.
    """

    policy: str
    steps: int | None
    used: int = 0
    dropped: int = 0
    repeated: int = 0
    empty: int = 0
    moved: float = 0.0
    deadlock: bool = False
    refused: str = ""

    @property
    def exact(self) -> bool:
        """Whether every sample is used exactly once."""
        return self.steps is not None and not (self.dropped or self.repeated or self.deadlock)


@dataclass(frozen=True)
class BatchBalance:
    """A dealing, cut into batches.

    Attributes:
        dealing: who gets what.
        batch_size: samples of a full batch.
        drop_last: whether a loader without a policy leaves out the short last batch.
    """

    dispatch: BlockDispatch
    batch_size: int
    drop_last: bool = False

    @cached_property
    def full_batches(self) -> tuple[int, ...]:
        """Full batches of each rank: the floor."""
        return tuple(count // self.batch_size for count in self.dispatch.counts)

    @cached_property
    def all_batches(self) -> tuple[int, ...]:
        """Batches of each rank with the last one, which may be short: the ceiling."""
        return tuple(-(-count // self.batch_size) for count in self.dispatch.counts)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batches that a loader without a policy makes for each rank."""
        return self.full_batches if self.drop_last else self.all_batches

    @property
    def starving(self) -> list[tuple[int, int]]:
        """(rank, steps that it can make) of every rank that has fewer batches than another."""
        most = max(self.batches)
        return [(rank, batches) for rank, batches in enumerate(self.batches) if batches < most]

    @property
    def deadlock(self) -> bool:
        """Whether ranks that each loop over their own batches end up waiting for one another."""
        return min(self.batches) < max(self.batches)

    def outcome(self, policy: UnevenPolicy) -> PolicyOutcome:
        """Return what an epoch is like under `policy`; every sample weighs the same."""
        counts = self.dispatch.counts
        try:
            portions = RankPortions(counts, self.batch_size, policy)
        except (UnevenData, UsageError) as error:
            return PolicyOutcome(policy, None, refused=str(error).partition("\n")[0])
        served = [portions.bounds(rank, portions.steps - 1)[1] for rank in range(len(counts))]
        return PolicyOutcome(
            policy,
            portions.steps,
            portions.used,
            portions.dropped,
            portions.repeated,
            portions.empty,
            moved_weight(served, counts),
        )

    @property
    def without_policy(self) -> PolicyOutcome:
        """What becomes of ranks that each loop over their own batches, and weigh every rank the same."""
        counts, steps = self.dispatch.counts, min(self.batches)
        used = sum(min(count, steps * self.batch_size) for count in counts)
        weights = [1 if steps else 0] * len(counts)
        return PolicyOutcome(
            "none",
            steps,
            used,
            sum(counts) - used,
            moved=moved_weight(weights, counts),
            deadlock=self.deadlock,
        )

    @cached_property
    def outcomes(self) -> list[PolicyOutcome]:
        """Every policy's outcome, that of none first."""
        return [self.without_policy, *(self.outcome(policy) for policy in get_args(UnevenPolicy))]


def moved_weight(weights: Sequence[int], counts: Sequence[int]) -> float:
    """Return how far apart two distributions over ranks are, 0 to 1: their distance in total variation."""
    all_weights, samples = sum(weights), sum(counts)
    if not all_weights or not samples:
        return 0.0
    pairs = zip(weights, counts, strict=True)
    apart = sum(abs(weight * samples - count * all_weights) for weight, count in pairs)
    return apart / (2 * all_weights * samples)


def is_even(counts: Iterable[int], batch_size: int, *, drop_last: bool = False) -> bool:
    """Tell whether all ranks have the same number of batches."""
    return bool(safe_batch_sizes(tuple(counts), [batch_size], drop_last=drop_last))


def safe_blocks(
    samples: int, shares: RankShares, batch_size: int, largest: int, *, drop_last: bool = False
) -> list[int]:
    """Return the block sizes, dealt in turns, for which all ranks have the same number of batches.

    Args:
        samples, shares: what is dealt, and to whom.
        batch_size, drop_last: how it is cut.
        largest: the largest block to look at.
    """
    turns = TurnOrder.of(shares)
    found = np.arange(1, largest + 1, dtype=np.int64)
    expected = None
    for rank in _telling(shares):
        batches = _batches(_counts_in_turns(turns, rank, samples, found), batch_size, drop_last)
        if expected is not None:
            same = batches == expected
            found, batches = found[same], batches[same]
        expected = batches
    return found.tolist()


def _telling(shares: RankShares) -> list[int]:
    """Return the ranks to look at, those that differ most first.

    Of equal shares the first and the last tell all: no rank has more than the one before it.
    """
    by_part = sorted(range(shares.ranks), key=lambda rank: shares.parts[rank])
    if shares.parts[by_part[0]] == shares.parts[by_part[-1]]:
        return [0, shares.ranks - 1]
    return [by_part[0], by_part[-1], *by_part[1:-1]]


def _counts_in_turns(turns: TurnOrder, rank: int, samples: int, sizes: Numbers) -> Numbers:
    """Return how many samples `rank` gets for each of the block `sizes`."""
    blocks = -(-samples // sizes)
    short = np.where(turns.owners[(blocks - 1) % turns.period] == rank, blocks * sizes - samples, 0)
    return turns.counts(rank, blocks) * sizes - short


def _batches(counts: Numbers, batch_size: int | Numbers, drop_last: bool) -> Numbers:
    return counts // batch_size if drop_last else -(-counts // batch_size)


def safe_batch_sizes(
    counts: tuple[int, ...], candidates: Iterable[int], *, drop_last: bool = False
) -> list[int]:
    """Return which of the batch sizes `candidates` give all ranks the same number of batches."""
    sizes = np.fromiter(candidates, dtype=np.int64)
    ends = np.array([[min(counts)], [max(counts)]])  # more samples never make fewer batches
    fewest, most = _batches(ends, sizes, drop_last)
    return sizes[fewest == most].tolist()
