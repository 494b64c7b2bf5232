"""The largest micro-batch that fits on a device, for a strategy: predicted, not tried out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.bench.footprint.forecast import Forecast, Room, forecast
from paceline.bench.footprint.setting import Setting
from paceline.bench.footprint.subject import Subject
from paceline.plan.memory.verdict import MARGIN

__all__ = ["Fitting", "largest_micro_batch"]


@dataclass(frozen=True)
class Fitting:
    """What fits under a strategy.

    Attributes:
        samples: the largest micro-batch that fits; 0: not even one sample does.
        forecast: of a step with it; with one sample where none fits.
    """

    samples: int
    forecast: Forecast


def largest_micro_batch(subject: Subject, setting: Setting, room: Room, most: int) -> Fitting:
    """Return the largest micro-batch that fits into `room`, and what a step takes with it.

    Memory grows with the micro-batch, about in line once forward and backward take more than the optimizer's step.
    So the answer is sought between one that fits and one that doesn't, where the line between them meets the margin,
    until it is known to a thirty-second part.

    Args:
        subject: what is trained. setting: how; its `batch` is what is sought. room: with the memory of a device.
        most: samples that are wanted at most, 1 or more.

    Raises: as `forecast`.
    """
    assert room.capacity_nbytes is not None, "there is something to fit into"
    allowed = MARGIN * room.capacity_nbytes

    def of(samples: int) -> Forecast:
        return forecast(subject, replace(setting, batch=samples), room)

    fits, found = 1, of(1)
    if found.ledger.nbytes > allowed:
        return Fitting(0, found)
    if most == 1:
        return Fitting(1, found)
    over, largest = most, of(most)
    if largest.ledger.nbytes <= allowed:
        return Fitting(most, largest)
    while over - fits > max(1, fits // 32):
        share = (allowed - found.ledger.nbytes) / (largest.ledger.nbytes - found.ledger.nbytes)
        samples = min(max(fits + 1, fits + int(share * (over - fits))), over - 1)
        tried = of(samples)
        if tried.ledger.nbytes <= allowed:
            fits, found = samples, tried
        else:
            over, largest = samples, tried
    return Fitting(fits, found)
