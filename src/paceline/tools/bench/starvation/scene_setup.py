"""Who has how many batches, and which samples are in them (no torch)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.epoch_plan import BatchRow, Epoch
from paceline.data.loader_position import LoaderPosition, LoaderRecipe
from paceline.data.sampling.block_dispatch import dispatch_blocks
from paceline.errors import UsageError, unknown
from paceline.tools.plan.balance_report import BatchBalance

__all__ = ["EXAMPLE", "Setup"]

Numbers = NDArray[np.int64]

EXAMPLE = BatchBalance(dispatch_blocks(1100, 2, block=100), batch_size=64)
"""Eleven blocks for two ranks: 10 batches and 8."""

BACKENDS = ("gloo", "paceline")

MOST_RANKS, MOST_STEPS, MOST_SAMPLES = 32, 2000, 1_000_000


@dataclass(frozen=True)
class Setup:
    """What all scenes have in common.

    Attributes:
        balance: how many batches each rank has.
        timeout: of the process group, in seconds.
        backend: of the process group.

    Raises:
        UsageError: there is nothing to show, too much to run, or a time-out that makes no sense.
    """

    balance: BatchBalance
    timeout: float = 10.0
    backend: str = "gloo"

    def __post_init__(self) -> None:
        dealing, batches = self.balance.dispatch, self.balance.batches
        if self.backend not in BACKENDS:
            raise unknown("backend", self.backend, BACKENDS)
        if not (math.isfinite(self.timeout) and self.timeout >= 1):
            raise UsageError(f"a time-out of {self.timeout:g} s", remedy="give at least 1 s, to meet in")
        if not 2 <= dealing.ranks <= MOST_RANKS:
            raise UsageError(
                f"{dealing.ranks} ranks: each is a process here", remedy=f"ask for 2 to {MOST_RANKS}"
            )
        if self.balance.drop_last:
            raise UsageError(
                "starvation is shown with all batches, the short last ones too", remedy="don't drop the last"
            )
        if not min(batches):
            raise UsageError(
                f"rank {batches.index(0)} has no batch at all, so it can't run dry",
                remedy="use smaller blocks or more samples",
            )
        if not self.balance.starving:
            raise UsageError(
                f"all ranks have {batches[0]} batches, so nobody starves",
                remedy=f"try {EXAMPLE.dispatch.samples} samples for {EXAMPLE.dispatch.ranks} ranks "
                f"in blocks of {EXAMPLE.dispatch.block}, batches of {EXAMPLE.batch_size}",
            )
        if max(batches) > MOST_STEPS or dealing.samples > MOST_SAMPLES:
            raise UsageError(
                f"{dealing.samples} samples in {max(batches)} steps are more than it takes to show starvation",
                remedy=f"give at most {MOST_SAMPLES} samples and {MOST_STEPS} steps",
            )

    # ------------------------------------------------------------------ who runs dry

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.balance.dispatch.ranks

    @property
    def steps(self) -> int:
        """Batches of the rank that has most."""
        return max(self.balance.batches)

    @property
    def dry(self) -> list[int]:
        """The ranks that run dry first."""
        least = min(self.balance.batches)
        return [rank for rank, batches in enumerate(self.balance.batches) if batches == least]

    def kind(self, step: int) -> str:
        """Tell whether in `step` a rank is ``"dry"``, batches are ``"unequal"``, or all are ``"equal"``."""
        sizes = {self.epoch.portions.size(rank, step) for rank in range(self.ranks)}
        return "dry" if 0 in sizes else "unequal" if len(sizes) > 1 else "equal"

    # ------------------------------------------------------------------ batches

    @cached_property
    def epoch(self) -> Epoch:
        """The epoch that is trained."""
        return self._epoch(0)

    def batches(self, rank: int, epoch: int = 0) -> list[Numbers]:
        """Return which samples make each batch of `rank`."""
        found = self._epoch(epoch)
        return [found.batch(rank, step) for step in range(found.portions.batches[rank])]

    def further(self, rank: int) -> Iterator[Numbers]:
        """Yield the batches of `rank` in its next epoch, the one after that, and so on."""
        epoch = 1
        while True:
            yield from self.batches(rank, epoch)
            epoch += 1

    def global_batch(self, step: int) -> Numbers:
        """Return which samples all ranks take in `step`."""
        return np.concatenate([self.epoch.batch(rank, step) for rank in range(self.ranks)])

    def _epoch(self, number: int) -> Epoch:
        return self._start(number).epoch

    def _start(self, epoch: int) -> LoaderPosition:
        dealing = self.balance.dispatch
        row = BatchRow(dealing.samples, seed=dealing.seed, epoch=epoch)
        recipe = LoaderRecipe(dealing.shares, dealing.block, dealing.scheme, self.balance.batch_size, "join")
        return LoaderPosition.start(row, recipe)

    # ------------------------------------------------------------------ as JSON

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {"position": self._start(0).state(), "timeout": self.timeout, "backend": self.backend}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Setup:
        """Return what `to_json` gave."""
        epoch = LoaderPosition.of(stored["position"]).epoch
        return cls(
            BatchBalance(epoch.dealing, epoch.portions.batch_size), stored["timeout"], stored["backend"]
        )

    def told(self) -> dict[str, Any]:
        """Return it for a result: plain values that a reader understands."""
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
