"""How two profiles differ: what both measured, side by side (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from paceline._core.format import format_size
from paceline.cost_model.collective_fit import CollectiveFit
from paceline.cost_model.profile_entries import RATES, CallCost, CollectiveCost, ExchangeCost, Rate

__all__ = ["Difference", "collective_differences", "exchange_differences", "other_differences"]


@dataclass(frozen=True)
class Difference:
    """One quantity in two profiles.

    Attributes:
        what: in words.
        unit: ``"s"``, ``"B/s"`` or ``"FLOP/s"``.
        own, other: its value in each.
        error: relative error that both together explain: of predictions, the 90th percentiles of both profiles'
            held-out errors, added; of rates, the spread of both's repetitions, added; 0 where nothing is known.
    """

    what: str
    unit: str
    own: float
    other: float
    error: float

    @property
    def ratio(self) -> float:
        """other / own."""
        return self.other / self.own

    @property
    def clear(self) -> bool:
        """Whether the two differ by more than their errors explain."""
        return abs(math.log(self.ratio)) > math.log1p(self.error)


def collective_differences(
    own: Iterable[CollectiveCost], other: Iterable[CollectiveCost]
) -> list[Difference]:
    """Return the predicted times of operations that both have.

    At the smallest and the largest size that both measured and at their geometric mean, by the most ranks that both
    measured; nothing where sizes or ranks have none in common.
    """
    theirs, found = {each.key: each for each in other}, []
    for mine in own:
        if mine.key in theirs:
            what = f"{mine.fit.op} on {mine.backend}, {mine.network}"
            found += _fit_differences(what, mine.fit, theirs[mine.key].fit)
    return found


def exchange_differences(own: Iterable[ExchangeCost], other: Iterable[ExchangeCost]) -> list[Difference]:
    """Return the predicted times of exchanges that both have, as `collective_differences` does."""
    theirs, found = {each.key: each for each in other}, []
    for mine in own:
        if mine.key in theirs:
            how = "in a row" if mine.queued else "alone"
            what = f"{mine.fit.op} of {mine.caller} {how} on {mine.backend}, {mine.network}"
            found += _fit_differences(what, mine.fit, theirs[mine.key].fit)
    return found


def _fit_differences(what: str, one: CollectiveFit, two: CollectiveFit) -> list[Difference]:
    """Return the differences of two fits at three sizes; none where sizes or ranks have none in common."""
    common = set(one.ranks) & set(two.ranks)
    low, high = max(one.low, two.low), min(one.high, two.high)
    if not common or low > high:
        return []
    ranks, error = max(common), _p90(one) + _p90(two)
    return [
        Difference(
            f"{what}, {ranks} ranks, {format_size(nbytes)}",
            "s",
            one.seconds(nbytes, ranks),
            two.seconds(nbytes, ranks),
            error,
        )
        for nbytes in sorted({low, math.sqrt(low * high), high})
    ]


def other_differences(own: Iterable[CallCost | Rate], other: Iterable[CallCost | Rate]) -> list[Difference]:
    """Return the calls and rates that both have."""
    theirs, found = {each.key: each for each in other}, []
    for mine in own:
        match = theirs.get(mine.key)
        if isinstance(mine, CallCost) and isinstance(match, CallCost):
            what = f"a call of {mine.op} on {mine.backend}, {mine.network}, {mine.ranks} ranks"
            found.append(Difference(what, "s", mine.seconds, match.seconds, 0.0))
        elif isinstance(mine, Rate) and isinstance(match, Rate):
            threads = f", {mine.threads} threads" if mine.threads else ""
            what = f"{mine.kind} {mine.dtype} on {mine.device}{threads}"
            error = mine.high / mine.low - 1 + match.high / match.low - 1
            found.append(Difference(what, RATES[mine.kind], mine.value, match.value, error))
    return found


def _p90(fit: CollectiveFit) -> float:
    return fit.sizes_error.p90 if fit.sizes_error else 0.0
