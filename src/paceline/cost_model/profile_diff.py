"""Differences between two profiles in everything that both measured (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline._core.format import format_size
from paceline.cost_model.collective_prediction import CollectiveFit
from paceline.cost_model.profile_entries import (
    RATES,
    CallCost,
    CollectiveCost,
    ExchangeCost,
    ProfileEntry,
    Rate,
)

__all__ = ["Difference", "entry_differences"]


@dataclass(frozen=True)
class Difference:
    """A quantity in two profiles.

    Attributes:
        what: description.
        unit: ``"s"``, ``"B/s"`` or ``"FLOP/s"``.
        own: value in the first profile.
        other: value in the second profile.
        error: relative error that both profiles together explain: the sum of the 90th percentiles of their held-out
            prediction errors, or of the spreads of their repetitions; 0 if unknown.
    """

    what: str
    unit: str
    own: float
    other: float
    error: float

    @property
    def ratio(self) -> float:
        """Other / own."""
        return self.other / self.own

    @property
    def clear(self) -> bool:
        """Whether the values differ by more than their errors explain."""
        return abs(math.log(self.ratio)) > math.log1p(self.error)


def entry_differences(own: ProfileEntry, other: Any) -> Iterator[Difference]:
    """Yield the differences of two entries of the same kind and key; none for entries without comparable values.

    Fits are compared at the smallest and the largest size that both measured and at their geometric mean, on the
    largest number of ranks that both measured; not at all if they have no sizes or ranks in common.
    """
    if isinstance(own, CollectiveCost):
        yield from _fit_differences(f"{own.fit.op} on {own.backend}, {own.network}", own.fit, other.fit)
    elif isinstance(own, ExchangeCost):
        how = "in a row" if own.queued else "alone"
        what = f"{own.fit.op} of {own.caller} {how} on {own.backend}, {own.network}"
        yield from _fit_differences(what, own.fit, other.fit)
    elif isinstance(own, CallCost):
        what = f"a call of {own.op} on {own.backend}, {own.network}, {own.ranks} ranks"
        yield Difference(what, "s", own.seconds, other.seconds, 0.0)
    elif isinstance(own, Rate):
        threads = f", {own.threads} threads" if own.threads else ""
        error = own.high / own.low - 1 + other.high / other.low - 1
        what = f"{own.kind} {own.dtype} on {own.device}{threads}"
        yield Difference(what, RATES[own.kind], own.value, other.value, error)


def _fit_differences(what: str, own: CollectiveFit, other: CollectiveFit) -> Iterator[Difference]:
    common = set(own.ranks) & set(other.ranks)
    low, high = max(own.low, other.low), min(own.high, other.high)
    if not common or low > high:
        return
    ranks = max(common)
    error = sum(fit.sizes_error.p90 for fit in (own, other) if fit.sizes_error)
    for nbytes in sorted({low, math.sqrt(low * high), high}):
        times = own.seconds(nbytes, ranks), other.seconds(nbytes, ranks)
        yield Difference(f"{what}, {ranks} ranks, {format_size(nbytes)}", "s", *times, error)
