"""Split of a global batch: micro-batch × accumulation × ranks (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import UsageError

__all__ = [
    "BatchSplit",
    "split_batch",
]


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """A global batch as micro-batch × accumulation × ranks.

    Attributes:
        samples: the global batch.
        micro: samples of a rank's largest micro-batch.
        accumulation: micro-batches per rank and optimizer step.
        ranks: that take part.
        idle: devices without samples.
        missing: samples short of micro × accumulation × ranks; 0: it divides.
        below: the next smaller global batch that divides by ranks × accumulation; 0: there is none.
        above: the next larger one.
        exact: the split with the most ranks that divides; None: this one does.
    """

    samples: int
    micro: int
    accumulation: int
    ranks: int
    idle: int
    missing: int
    below: int
    above: int
    exact: BatchSplit | None = None

    @property
    def rank_samples(self) -> tuple[int, int]:
        """The least and the most samples of a rank per optimizer step; equal where the batch divides."""
        return self.samples // self.ranks, -(-self.samples // self.ranks)

    @property
    def label(self) -> str:
        """Micro-batch × accumulation × ranks."""
        return f"{self.micro} × {self.accumulation} × {self.ranks}"

    def facts(self) -> dict[str, Any]:
        """Return the split for JSON."""
        numbers = {name: value for name, value in vars(self).items() if name not in ("samples", "exact")}
        return {
            "asked": self.samples,
            **numbers,
            "exact": None if self.exact is None else self.exact.facts(),
        }


def split_batch(samples: int, devices: int, most: int) -> BatchSplit:
    """Split a global batch over as many ranks as possible, then over micro-batches.

    Ranks come before accumulation, because they run in parallel and micro-batches one after another. Accumulation is
    the least that memory allows. Where the batch does not divide, ranks differ by one sample, which Paceline weights
    exactly (`paceline.tools.plan.uneven_batch_outcomes`); `below`, `above` and `exact` are the even alternatives.

    Args:
        samples: the global batch.
        devices: available.
        most: samples of a micro-batch that fit on a device.

    Raises:
        UsageError: one is below 1.

    Example:
        >>> split = split_batch(100, devices=8, most=5)
        >>> split.micro, split.accumulation, split.ranks, split.missing, split.below, split.above
        (5, 3, 8, 20, 96, 120)
        >>> split.rank_samples
        (12, 13)
        >>> split.exact.ranks, split.exact.accumulation, split.exact.micro
        (5, 4, 5)
    """
    for name, value in (("samples", samples), ("devices", devices), ("most", most)):
        if type(value) is not int or value < 1:
            raise UsageError(f"{name}={value!r}", remedy="give a whole number of 1 or more")
    ranks = min(devices, samples)
    split = _split(samples, ranks, devices, -(-samples // (ranks * most)))
    if not split.missing:
        return split
    # The even split with the most ranks and, of these, the least accumulation.
    ranks = next(count for count in range(ranks, 0, -1) if samples % count == 0)
    own = samples // ranks
    accumulation = next(parts for parts in range(-(-own // most), own + 1) if own % parts == 0)
    return replace(split, exact=_split(samples, ranks, devices, accumulation))


def _split(samples: int, ranks: int, devices: int, accumulation: int) -> BatchSplit:
    unit = ranks * accumulation
    micro = -(-samples // unit)
    return BatchSplit(
        samples=samples,
        micro=micro,
        accumulation=accumulation,
        ranks=ranks,
        idle=devices - ranks,
        missing=micro * unit - samples,
        below=samples // unit * unit,
        above=micro * unit,
    )
