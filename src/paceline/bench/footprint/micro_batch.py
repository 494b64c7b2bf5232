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

    Memory grows about in line with the micro-batch, so one and two samples tell about how many fit; that many are
    then predicted, and fewer until they fit.

    Args:
        subject: what is trained. setting: how; its `batch` is what is sought. room: with the memory of a device.
        most: samples that are wanted at most, 1 or more.

    Raises: as `forecast`.
    """
    assert room.capacity_nbytes is not None, "there is something to fit into"

    def of(samples: int) -> Forecast:
        return forecast(subject, replace(setting, batch=samples), room)

    one = of(1)
    if _poor(one) or most == 1:
        return Fitting(0 if _poor(one) else 1, one)
    two = of(2)
    if _poor(two):
        return Fitting(1, one)
    growth = max(1, two.ledger.nbytes - one.ledger.nbytes)
    samples = min(most, 1 + int((MARGIN * room.capacity_nbytes - one.ledger.nbytes) // growth))
    found = two if samples == 2 else of(max(2, samples))
    samples = max(2, samples)
    while _poor(found):
        over = found.ledger.nbytes - MARGIN * room.capacity_nbytes
        samples = max(2, min(samples - 1, samples - int(over // growth)))
        found = two if samples == 2 else of(samples)
    return Fitting(samples, found)


def _poor(found: Forecast) -> bool:
    return found.verdict is None or found.verdict.poor
