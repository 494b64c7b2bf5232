"""All that can be told of an epoch before it runs, for several block and batch sizes; as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.data.sampling.block_dispatch import BlockDispatch, Scheme, dispatch_blocks
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.sampling.uneven_policies import check_cut
from paceline.errors import UsageError
from paceline.tools.plan.balance_report import BatchBalance, is_even, safe_batch_sizes, safe_blocks
from paceline.tools.plan.imbalance_statistics import (
    DRAWS,
    ImbalanceSpread,
    excess_bound_in_turns,
    imbalance_spread,
    largest_excess,
)

__all__ = ["SCHEMA", "DispatchForecast", "DispatchRequest", "Imbalance", "forecast_dispatch"]

SCHEMA = 1

LARGEST_BLOCK, LARGEST_BATCH = 10_000, 4096
"""Up to these all sizes are looked at, whether they are safe."""

MOST_DRAWN = 200_000
"""Numbers of ranks that are drawn for one block size, unless other draws are asked for."""


@dataclass(frozen=True)
class DispatchRequest:
    """What is to be forecast.

    Attributes:
        samples: to be dealt, 1 or more.
        shares, scheme, seed: as in `BlockDispatch`.
        blocks, batch_sizes: every one of the first with every one of the second.
        drop_last: whether a loader without a policy leaves out the short last batch.
        draws: at random, beside the closed forms; None: 400, fewer for more than 500 ranks.

    Raises:
        UsageError: a value that makes no sense, or a block larger than the data.
    """

    samples: int
    shares: RankShares
    scheme: Scheme = "round_robin"
    seed: int = 0
    blocks: tuple[int, ...] = (1,)
    batch_sizes: tuple[int, ...] = (64,)
    drop_last: bool = False
    draws: int | None = None

    def __post_init__(self) -> None:
        if not self.samples:
            raise UsageError("0 samples: there is nothing to dispatch", remedy="pass 1 or more")
        for batch_size in self.batch_sizes:
            check_cut(batch_size, "join")
        if self.draws is not None and self.draws < 0:
            raise UsageError(f"draws={self.draws}", remedy="pass 0 or more")
        for block in self.blocks:
            self.dispatch(block)

    def dispatch(self, block: int) -> BlockDispatch:
        """Return who gets what in blocks of `block`."""
        shares = self.shares
        return dispatch_blocks(
            self.samples, shares.ranks, block=block, scheme=self.scheme, shares=shares, seed=self.seed
        )

    @property
    def draws_per_block(self) -> int:
        """How many draws are made for each block size."""
        return min(DRAWS, max(1, MOST_DRAWN // self.shares.ranks)) if self.draws is None else self.draws

    def to_json(self) -> dict[str, Any]:
        """Return the settings for JSON."""
        return {
            "samples": self.samples,
            "ranks": self.shares.ranks,
            "shares": list(self.shares),
            "scheme": self.scheme,
            "seed": self.seed,
            "blocks": list(self.blocks),
            "batch_sizes": list(self.batch_sizes),
            "drop_last": self.drop_last,
            "draws": self.draws_per_block,
        }


@dataclass(frozen=True)
class Imbalance:
    """By how much the rank with most samples for its share is above it, as a fraction of the share.

    Attributes:
        dealt: as it is dealt here.
        in_turns: as it would be, dealt in turns.
        bound_in_turns: what that stays below, whatever the number of samples.
        random: as it would be at random, over all draws.
    """

    dealt: float
    in_turns: float
    bound_in_turns: float
    random: ImbalanceSpread

    @classmethod
    def of(cls, dealing: BlockDispatch, draws: int) -> Imbalance:
        """Return the imbalance of `dispatch`, and of its blocks dealt otherwise."""
        return cls(
            largest_excess(dealing.counts, dealing.shares),
            largest_excess(replace(dealing, scheme="shares").counts, dealing.shares),
            excess_bound_in_turns(dealing.shares, dealing.samples, dealing.block),
            imbalance_spread(replace(dealing, scheme="random"), draws),
        )


@dataclass(frozen=True)
class DispatchForecast:
    """One block size and one batch size.

    Attributes:
        balance: the dealing, cut into batches.
        imbalance: how far apart the ranks are.
        safe_blocks: sizes, dealt in turns, for which all ranks have as many batches.
        blocks_tried: all sizes up to it were looked at, and those that were asked for.
        safe_batch_sizes: batch sizes for which all ranks have as many of them.
        batch_sizes_tried: the same of batch sizes.
    """

    balance: BatchBalance
    imbalance: Imbalance
    safe_blocks: list[int]
    blocks_tried: int
    safe_batch_sizes: list[int]
    batch_sizes_tried: int

    @property
    def block(self) -> int:
        """Samples that go to one rank together."""
        return self.balance.dispatch.block

    @property
    def batch_size(self) -> int:
        """Samples of a full batch."""
        return self.balance.batch_size

    def to_json(self) -> dict[str, Any]:
        """Return all of it for JSON; see ``docs/dispatch.md``."""
        balance = self.balance
        return {
            "block": self.block,
            "batch_size": self.batch_size,
            "counts": list(balance.dispatch.counts),
            "batches_floor": list(balance.full_batches),
            "batches_ceil": list(balance.all_batches),
            "starving": [{"rank": rank, "after_step": steps} for rank, steps in balance.starving],
            "deadlock": balance.deadlock,
            "policies": {
                each.policy: {name: value for name, value in asdict(each).items() if name != "policy"}
                | {"exact": each.exact}
                for each in balance.outcomes
            },
            "imbalance": asdict(self.imbalance),
            "safe_blocks": self.safe_blocks,
            "safe_blocks_tried": self.blocks_tried,
            "safe_batch_sizes": self.safe_batch_sizes,
            "safe_batch_sizes_tried": self.batch_sizes_tried,
        }


def forecast_dispatch(asked: DispatchRequest) -> list[DispatchForecast]:
    """Return the forecast of every block size with every batch size."""
    samples, shares, drop_last = asked.samples, asked.shares, asked.drop_last
    blocks_tried = max(1, min(LARGEST_BLOCK, samples // shares.ranks))
    safe_blocks_of = {size: _safe_blocks(asked, size, blocks_tried) for size in asked.batch_sizes}
    found = []
    for block in asked.blocks:
        dealing = asked.dispatch(block)
        imbalance = Imbalance.of(dealing, asked.draws_per_block)
        tried = min(LARGEST_BATCH, max(dealing.counts))
        larger = sorted(size for size in asked.batch_sizes if size > tried)
        safe = safe_batch_sizes(dealing.counts, [*range(1, tried + 1), *larger], drop_last=drop_last)
        for size, blocks in safe_blocks_of.items():
            balance = BatchBalance(dealing, size, drop_last)
            found.append(DispatchForecast(balance, imbalance, blocks, blocks_tried, safe, tried))
    return found


def _safe_blocks(asked: DispatchRequest, batch_size: int, tried: int) -> list[int]:
    """Return which of the block sizes up to `tried`, and of those asked for, are safe if dealt in turns."""
    found = safe_blocks(asked.samples, asked.shares, batch_size, tried, drop_last=asked.drop_last)
    for block in sorted(asked.blocks):
        dealing = replace(asked.dispatch(block), scheme="shares")
        if block > tried and is_even(dealing.counts, batch_size, drop_last=asked.drop_last):
            found.append(block)
    return found
