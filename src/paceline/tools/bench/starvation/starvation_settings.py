"""Settings of the starvation benchmark: the batches of each rank, and the process group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.map_loader_state import DispatchSettings, LoaderPosition
from paceline.data.resumable_batch_indices import EpochPlan, SampleOrder
from paceline.data.sampling.block_dispatch import dispatch_blocks
from paceline.errors import UsageError, unknown
from paceline.tools.plan.uneven_batch_outcomes import BatchBalance

__all__ = ["EXAMPLE_BALANCE", "MOST_RANKS", "Numbers", "StarvationSettings"]

Numbers = NDArray[np.int64]
"""Indices of samples."""

EXAMPLE_BALANCE = BatchBalance(dispatch_blocks(1100, 2, block=100), batch_size=64)
"""Eleven blocks for two ranks: 10 batches and 8."""

MOST_RANKS, MOST_STEPS, MOST_SAMPLES = 32, 2000, 1_000_000
_BACKENDS = ("gloo", "paceline")


@dataclass(frozen=True)
class StarvationSettings:
    """Settings of all cases.

    Attributes:
        balance: the numbers of batches per rank.
        timeout: of the process group, in seconds.
        backend: of the process group.

    Raises:
        UsageError: no rank starves, there is too much to run, or the time-out makes no sense.
    """

    balance: BatchBalance
    timeout: float = 10.0
    backend: str = "gloo"

    def __post_init__(self) -> None:
        dealing, batches = self.balance.dispatch, self.balance.batches
        if self.backend not in _BACKENDS:
            raise unknown("backend", self.backend, _BACKENDS)
        if not (math.isfinite(self.timeout) and self.timeout >= 1):
            raise UsageError(
                f"a time-out of {self.timeout:g} s", remedy="give at least 1 s, for the rendezvous"
            )
        if not 2 <= dealing.ranks <= MOST_RANKS:
            raise UsageError(
                f"{dealing.ranks} ranks: each is a process here", remedy=f"give 2 to {MOST_RANKS}"
            )
        if self.balance.drop_last:
            raise UsageError(
                "starvation is shown with all batches, including short last ones",
                remedy="don't drop the last",
            )
        if not min(batches):
            raise UsageError(
                f"rank {batches.index(0)} has no batch at all, so it can't run dry",
                remedy="use smaller blocks or more samples",
            )
        if not self.balance.starving:
            example = EXAMPLE_BALANCE.dispatch
            raise UsageError(
                f"all ranks have {batches[0]} batches, so none starves",
                remedy=f"try {example.samples} samples for {example.ranks} ranks "
                f"in blocks of {example.block}, batches of {EXAMPLE_BALANCE.batch_size}",
            )
        if max(batches) > MOST_STEPS or dealing.samples > MOST_SAMPLES:
            raise UsageError(
                f"{dealing.samples} samples in {max(batches)} steps are more than it takes to show starvation",
                remedy=f"give at most {MOST_SAMPLES} samples and {MOST_STEPS} steps",
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.balance.dispatch.ranks

    @property
    def steps(self) -> int:
        """Batches of the rank that has most."""
        return max(self.balance.batches)

    @property
    def dry_ranks(self) -> list[int]:
        """The ranks that run dry first."""
        least = min(self.balance.batches)
        return [rank for rank, batches in enumerate(self.balance.batches) if batches == least]

    def step_kind(self, step: int) -> str:
        """Return ``"dry"`` if a rank has no batch in `step`, ``"unequal"`` if batches differ, else ``"equal"``."""
        sizes = {self.epoch.portions.size(rank, step) for rank in range(self.ranks)}
        return "dry" if 0 in sizes else "unequal" if len(sizes) > 1 else "equal"

    @cached_property
    def epoch(self) -> EpochPlan:
        """The epoch that is trained."""
        return self._position(0).epoch

    def batches(self, rank: int, epoch: int = 0) -> list[Numbers]:
        """Return the samples of each batch of `rank`."""
        plan = self._position(epoch).epoch
        return [plan.batch(rank, step) for step in range(plan.portions.batches[rank])]

    def later_batches(self, rank: int) -> Iterator[Numbers]:
        """Yield the batches of `rank` in its next epoch, the one after that, and so on."""
        for epoch in count(1):
            yield from self.batches(rank, epoch)

    def global_batch(self, step: int) -> Numbers:
        """Return the samples of all ranks in `step`."""
        return np.concatenate([self.epoch.batch(rank, step) for rank in range(self.ranks)])

    def _position(self, epoch: int) -> LoaderPosition:
        dealing = self.balance.dispatch
        row = SampleOrder(dealing.samples, seed=dealing.seed, epoch=epoch)
        recipe = DispatchSettings(
            dealing.shares, dealing.block, dealing.scheme, self.balance.batch_size, "join"
        )
        return LoaderPosition.start(row, recipe)

    def to_json(self) -> dict[str, Any]:
        """Return the settings for the JSON of a job."""
        return {"position": self._position(0).state(), "timeout": self.timeout, "backend": self.backend}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> StarvationSettings:
        """Return the settings that `to_json` wrote."""
        epoch = LoaderPosition.of(record["position"]).epoch
        return cls(
            BatchBalance(epoch.dispatch, epoch.portions.batch_size), record["timeout"], record["backend"]
        )

    def summary(self) -> dict[str, Any]:
        """Return the settings for the JSON of a result: plain values for readers."""
        dealing = self.balance.dispatch
        return {
            "ranks": self.ranks,
            "samples": dealing.samples,
            "scheme": dealing.scheme,
            "block": dealing.block,
            "shares": list(dealing.shares),
            "seed": dealing.seed,
            "batch_size": self.balance.batch_size,
            "samples_of_rank": list(dealing.counts),
            "batches_of_rank": list(self.balance.batches),
            "timeout_s": self.timeout,
            "backend": self.backend,
        }
