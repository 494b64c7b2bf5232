"""Forecast of an epoch over dispatched data, for several block and batch sizes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.data.sampling.block_dispatch import BlockDispatch, DispatchScheme, dispatch_blocks
from paceline.data.sampling.rank_shares import RankShares
from paceline.data.sampling.uneven_policies import check_batching
from paceline.errors import UsageError
from paceline.tools.plan.imbalance_statistics import (
    DRAWS,
    ImbalanceSpread,
    excess_bound_in_turns,
    imbalance_spread,
    largest_excess,
)
from paceline.tools.plan.uneven_batch_outcomes import BatchBalance, is_even, safe_batch_sizes, safe_blocks

__all__ = ["SCHEMA", "DispatchForecast", "DispatchRequest", "Imbalance", "forecast_dispatch"]

SCHEMA = 1

LARGEST_BLOCK, LARGEST_BATCH = 10_000, 4096
"""All sizes up to these are checked for safety."""

MOST_DRAWN = 200_000
"""Limit of draws × ranks per block size, unless a number of draws is given."""


@dataclass(frozen=True, kw_only=True)
class DispatchRequest:
    """Data to dispatch, and the sizes to forecast for.

    Attributes:
        samples: to dispatch, 1 or more.
        shares: of the ranks.
        scheme: as in `BlockDispatch`.
        seed: of scheme ``"random"``.
        blocks: block sizes.
        batch_sizes: each is combined with each block size.
        drop_last: whether a loader without a policy drops the short last batch.
        draws: random draws to check the closed forms; None: 400, fewer for more than 500 ranks.

    Raises:
        UsageError: a value is out of range, or a block is larger than the data.
    """

    samples: int
    shares: RankShares
    scheme: DispatchScheme = "round_robin"
    seed: int = 0
    blocks: tuple[int, ...] = (1,)
    batch_sizes: tuple[int, ...] = (64,)
    drop_last: bool = False
    draws: int | None = None

    def __post_init__(self) -> None:
        if not self.samples:
            raise UsageError("0 samples: there is nothing to dispatch", remedy="pass 1 or more")
        for batch_size in self.batch_sizes:
            check_batching(batch_size, "join")
        if self.draws is not None and self.draws < 0:
            raise UsageError(f"draws={self.draws}", remedy="pass 0 or more")
        for block in self.blocks:
            self.dispatch(block)

    def dispatch(self, block: int) -> BlockDispatch:
        """Return the dispatch in blocks of `block`."""
        shares = self.shares
        return dispatch_blocks(
            self.samples, shares.ranks, block=block, scheme=self.scheme, shares=shares, seed=self.seed
        )

    @property
    def draws_per_block(self) -> int:
        """Number of draws for each block size."""
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
    """Excess of the rank that is furthest above its share, as a fraction of the share.

    Attributes:
        dealt: of the requested scheme.
        in_turns: of the same blocks dispatched in turns.
        bound_in_turns: upper bound of it, for any number of samples.
        random: of the same blocks dispatched at random, over all draws.
    """

    dealt: float
    in_turns: float
    bound_in_turns: float
    random: ImbalanceSpread

    @classmethod
    def of(cls, dispatch: BlockDispatch, draws: int) -> Imbalance:
        """Return the imbalance of a dispatch, and of its blocks under the other schemes."""
        return cls(
            largest_excess(dispatch.counts, dispatch.shares),
            largest_excess(replace(dispatch, scheme="shares").counts, dispatch.shares),
            excess_bound_in_turns(dispatch.shares, dispatch.samples, dispatch.block),
            imbalance_spread(replace(dispatch, scheme="random"), draws),
        )


@dataclass(frozen=True, kw_only=True)
class DispatchForecast:
    """Forecast for one block size and one batch size.

    Attributes:
        balance: the dispatch, cut into batches.
        imbalance: of the ranks.
        safe_blocks: block sizes, dispatched in turns, for which all ranks have the same number of batches.
        blocks_tried: all sizes up to it were checked, and the requested ones.
        safe_batch_sizes: batch sizes for which all ranks have the same number of batches.
        batch_sizes_tried: all sizes up to it were checked, and the requested ones.
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
        """Return the forecast for JSON; see ``benchmarks/dispatch/README.md``."""
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


def forecast_dispatch(request: DispatchRequest) -> list[DispatchForecast]:
    """Return the forecast for every block size with every batch size."""
    samples, shares, drop_last = request.samples, request.shares, request.drop_last
    blocks_tried = max(1, min(LARGEST_BLOCK, samples // shares.ranks))
    safe_blocks_of = {size: _safe_blocks(request, size, blocks_tried) for size in request.batch_sizes}
    found = []
    for block in request.blocks:
        dispatch = request.dispatch(block)
        imbalance = Imbalance.of(dispatch, request.draws_per_block)
        tried = min(LARGEST_BATCH, max(dispatch.counts))
        larger = sorted(size for size in request.batch_sizes if size > tried)
        safe = safe_batch_sizes(dispatch.counts, [*range(1, tried + 1), *larger], drop_last=drop_last)
        for size, blocks in safe_blocks_of.items():
            balance = BatchBalance(dispatch, size, drop_last)
            found.append(
                DispatchForecast(
                    balance=balance,
                    imbalance=imbalance,
                    safe_blocks=blocks,
                    blocks_tried=blocks_tried,
                    safe_batch_sizes=safe,
                    batch_sizes_tried=tried,
                )
            )
    return found


def _safe_blocks(request: DispatchRequest, batch_size: int, tried: int) -> list[int]:
    """Return the block sizes that are safe in turns, of those up to `tried` and the requested ones."""
    found = safe_blocks(request.samples, request.shares, batch_size, tried, drop_last=request.drop_last)
    for block in sorted(request.blocks):
        dispatch = replace(request.dispatch(block), scheme="shares")
        if block > tried and is_even(dispatch.counts, batch_size, drop_last=request.drop_last):
            found.append(block)
    return found
