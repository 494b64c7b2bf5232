"""How often to save: the interval at which the least time is lost, what others lose, and what to pass as ``every=``.

Training waits δ for a save and computes τ between two. The checkpoint counts once it is complete, C after its save
began: training goes on meanwhile, but a failure before that leads back to the checkpoint before. So every failure
undoes C − δ more, as if restarts took that much longer (Vaidya, IEEE Transactions on Computers 46(8), 1997), and

    M·e^((R + C − δ)/M)·(e^((τ + δ)/M) − 1)    for each τ of work, with failures every M and restarts of R

is exact, as without saves in the background (`paceline.checkpoint.save_interval`). Neither C nor R moves the minimum.
But a save waits until the previous one is complete, so below τ = C − δ training waits C − τ instead of δ, and loses
more (unless M < C − δ, where nearly all is lost): the best interval is Daly's, or C − δ if that is longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.checkpoint.save_interval import FailureModel, daly_interval, expected_slowdown
from paceline.errors import UsageError

__all__ = [
    "CheckpointPlan",
    "FailureRate",
    "IntervalLosses",
    "SaveCosts",
    "observed_rate",
    "plan_checkpoints",
    "poisson_bounds",
    "round_interval",
]

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Intervals of the table, relative to the best."""
_FLAT = 0.1
"""Part by which saves and undone work may exceed their minimum in the range called flat."""
_UNITS = (("s", 1.0, 95.0), ("min", 60.0, 180.0), ("h", 3600.0, 48.0), ("d", 86400.0, math.inf))
"""Units of ``every=``, their seconds, and how many of them are the next one's turn."""
_TAIL = 0.025
"""Probability beyond each bound of a rate: they hold with 95 % confidence."""


@dataclass(frozen=True, kw_only=True)
class SaveCosts:
    """What saving and restarting cost.

    Attributes:
        stall: δ, seconds that training waits for a save; above 0.
        complete: C, seconds from the begin of a save until the checkpoint is complete; at least `stall`.
        restart: R, seconds from a failure until training goes on from the checkpoint.
        step: seconds of a training step; None: unknown.

    Raises:
        UsageError: a number is out of range.
    """

    stall: float
    complete: float
    restart: float = 0.0
    step: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.stall < math.inf:
            raise UsageError(f"training waits {self.stall!r} seconds for a save", remedy="give more than 0")
        if not self.stall <= self.complete < math.inf:
            raise UsageError(
                f"a save that is complete after {self.complete!r} seconds, for which training waits {self.stall!r}",
                remedy="give at least the time that training waits",
            )
        if not 0 <= self.restart < math.inf:
            raise UsageError(f"restarts of {self.restart!r} seconds", remedy="give 0 or more")
        if self.step is not None and not 0 < self.step < math.inf:
            raise UsageError(f"steps of {self.step!r} seconds", remedy="give more than 0")

    @property
    def shortest(self) -> float:
        """The shortest interval in seconds for which no save waits for the previous one; one step or more."""
        return max(self.complete - self.stall, self.step or 0.0)

    def model(self, mtbf: float, interval: float) -> FailureModel:
        """Return failures and costs with saves every `interval` seconds, in the form without a background."""
        waits = max(self.stall, self.complete - interval)
        return FailureModel(mtbf, waits, self.restart + self.complete - waits)


@dataclass(frozen=True)
class FailureRate:
    """How often the whole job fails.

    Attributes:
        mtbf: M, mean seconds between failures.
        low: lower bound of it, with 95 % confidence; equal to it if it was given.
        high: upper bound of it, likewise.
        failures: number that it was counted from; None: it was given.
        seconds: in which they were counted.
    """

    mtbf: float
    low: float
    high: float
    failures: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class IntervalLosses:
    """Shares of all time that are lost with saves at an interval, each 0 to 1.

    Attributes:
        interval: τ, seconds of training between two saves.
        saves: waiting for saves.
        work: computing that failures undo.
        restarts: restarting.
        low: the sum if failures are as rare as their bounds allow.
        high: the sum if they are as frequent.
    """

    interval: float
    saves: float
    work: float
    restarts: float
    low: float
    high: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.saves + self.work + self.restarts


@dataclass(frozen=True)
class CheckpointPlan:
    """How often to save.

    Attributes:
        costs: of saving and restarting.
        rate: of failures.
        best: seconds of training between two saves at which the least time is lost.
        every: the same, rounded, as ``every=`` of `paceline.Checkpoint` takes it: ``"7min"``.
        seconds: `every` in seconds.
        steps: `every` in steps, rounded; None: the time of a step is unknown.
        recommended: what is lost at `every`.
        present: what is lost at the present interval; None: unknown.
        table: what is lost around the best interval, at the shortest possible one, and at those two; ascending.
        flat: shortest and longest interval at which saves and undone work are at most a tenth above their minimum.
        best_range: best interval if failures are as frequent, and as rare, as their bounds allow.
        regret: largest share by which `every` then loses more than these.
    """

    costs: SaveCosts
    rate: FailureRate
    best: float
    every: str
    seconds: float
    steps: int | None
    recommended: IntervalLosses
    present: IntervalLosses | None
    table: tuple[IntervalLosses, ...]
    flat: tuple[float, float]
    best_range: tuple[float, float]
    regret: float

    @property
    def is_bound(self) -> bool:
        """Whether the time until a save is complete, or a step, is longer than the interval that failures suggest."""
        return daly_interval(FailureModel(self.rate.mtbf, self.costs.stall)) < self.costs.shortest

    def losses(self, interval: float) -> IntervalLosses:
        """Return what is lost at another interval, in seconds."""
        return _losses(self.costs, self.rate, interval)


def plan_checkpoints(costs: SaveCosts, rate: FailureRate, present: float | None = None) -> CheckpointPlan:
    """Return how often to save.

    Args:
        costs: of saving and restarting.
        rate: of failures.
        present: seconds of training between two saves at present; None: unknown.

    Example:
        >>> costs = SaveCosts(stall=5.0, complete=5.0, restart=600.0, step=2.0)
        >>> plan = plan_checkpoints(costs, FailureRate(86400.0, 86400.0, 86400.0))
        >>> round(plan.best), plan.every, plan.steps, round(plan.recommended.total, 4)
        (926, '15min', 500, 0.0176)
    """
    best = _best(costs, rate.mtbf)
    seconds, every = round_interval(best, costs.shortest)
    steps = None if costs.step is None else _round_steps(best / costs.step, costs.shortest / costs.step)
    now = None if present is None else _losses(costs, rate, present)
    intervals = {factor * best for factor in _FACTORS if factor * best > costs.shortest and factor != 1.0}
    intervals |= {seconds, *([] if present is None else [present])}
    if 0 < costs.shortest < 0.95 * seconds:
        intervals.add(costs.shortest)
    best_range = _best(costs, rate.low), _best(costs, rate.high)
    regrets = [
        _lost(costs, mtbf, seconds) - _lost(costs, mtbf, other)
        for mtbf, other in zip((rate.low, rate.high), best_range, strict=True)
    ]
    return CheckpointPlan(
        costs=costs,
        rate=rate,
        best=best,
        every=every,
        seconds=seconds,
        steps=steps,
        recommended=_losses(costs, rate, seconds),
        present=now,
        table=tuple(_losses(costs, rate, interval) for interval in sorted(intervals)),
        flat=_flat_range(costs, rate.mtbf, best),
        best_range=best_range,
        regret=max(0.0, *regrets),
    )


def _best(costs: SaveCosts, mtbf: float) -> float:
    return max(daly_interval(FailureModel(mtbf, costs.stall)), costs.shortest)


def _losses(costs: SaveCosts, rate: FailureRate, interval: float) -> IntervalLosses:
    """Return the shares lost at an interval.

    A job that takes s times its computing waits δ/τ/s of its time for saves. It is restarting at a moment if a failure
    happened within R before it, which has the probability 1 − e^(−R/M). The rest is work that is undone.
    """
    model = costs.model(rate.mtbf, interval)
    slowdown = expected_slowdown(model, interval)
    saves = model.write / interval / slowdown
    restarts = -math.expm1(-costs.restart / rate.mtbf)
    work = max(0.0, 1.0 - 1.0 / slowdown - saves - restarts)
    low, high = (_lost(costs, mtbf, interval) for mtbf in (rate.high, rate.low))
    return IntervalLosses(interval, saves, work, restarts, low, high)


def _lost(costs: SaveCosts, mtbf: float, interval: float) -> float:
    """Return the share of all time that is lost."""
    return 1.0 - 1.0 / expected_slowdown(costs.model(mtbf, interval), interval)


def _flat_range(costs: SaveCosts, mtbf: float, best: float) -> tuple[float, float]:
    """Return shortest and longest interval at which saves and undone work are at most `_FLAT` above their minimum."""
    restarts = -math.expm1(-costs.restart / mtbf)
    least = _lost(costs, mtbf, best) - restarts
    if not least < 1.0 - restarts:
        return best, best

    def is_beyond(factor: float) -> bool:
        return _lost(costs, mtbf, factor * best) - restarts > (1 + _FLAT) * least

    shorter = _crossing(lambda factor: is_beyond(1 / factor))
    return max(best / shorter, costs.shortest), best * _crossing(is_beyond)


def _crossing(is_beyond: Callable[[float], bool]) -> float:
    """Return the factor above 1 from which `is_beyond` is true."""
    low, high = 1.0, 2.0
    while high < 1e6 and not is_beyond(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_beyond(middle) else (middle, high)
    return low


# ---------------------------------------------------------------------- what to pass


def round_interval(seconds: float, shortest: float = 0.0) -> tuple[float, str]:
    """Return a rounded interval, in seconds and as ``every=`` of `paceline.Checkpoint` takes it.

    It has two significant digits, or one of 4 to 9, which changes it by an eighth or less: the optimum is flat.

    Args:
        seconds: the interval.
        shortest: the result is at least this.

    Example:
        >>> round_interval(428.0), round_interval(13.04), round_interval(13.04, shortest=13.04)
        ((420.0, '7min'), (13.0, '13s'), (14.0, '14s'))
    """
    unit, scale = next((unit, scale) for unit, scale, most in _UNITS if seconds < most * scale)
    value = _rounded(seconds / scale, shortest / scale)
    return value * scale, f"{value:g}{unit}"


def _round_steps(steps: float, fewest: float) -> int:
    """Return a rounded number of steps, at least `fewest` and 1."""
    return max(1, math.ceil(_rounded(max(1.0, steps), fewest) - 1e-9))


def _rounded(value: float, least: float) -> float:
    """Return `value` with two significant digits, or one of 4 to 9; rounded up to two where that is below `least`."""
    power = math.floor(math.log10(value))
    rounded = round(value, -power if value >= 4 * 10.0**power else 1 - power)
    if rounded >= least:
        return rounded
    return round(math.ceil(value * 10.0 ** (1 - power) * (1 - 1e-12)) / 10.0 ** (1 - power), 1 - power)


# ---------------------------------------------------------------------- how often a job fails


def observed_rate(failures: int, seconds: float) -> FailureRate:
    """Return the rate of failures that were counted, with what so few of them leave open.

    Args:
        failures: their number, 1 or more.
        seconds: in which they were counted.

    Raises:
        UsageError: there are none.
    """
    if failures < 1 or not seconds > 0:
        raise UsageError(
            f"{failures} failures in {seconds!r} seconds", remedy="a rate needs 1 failure or more"
        )
    low, high = poisson_bounds(failures)
    return FailureRate(seconds / failures, seconds / high, seconds / low, failures, seconds)


def poisson_bounds(count: int) -> tuple[float, float]:
    """Return the bounds of the mean of a Poisson distribution of which `count` was seen, with 95 % confidence.

    They are exact (Garwood, Biometrika 28, 1936): at the lower one, as many or more have a probability of 2.5 %, at the
    upper one as many or fewer.

    Example:
        >>> [round(bound, 2) for bound in poisson_bounds(3)]
        [0.62, 8.77]
    """
    low = _mean_where(lambda mean: 1 - _at_most(count - 1, mean) > _TAIL, count) if count else 0.0
    return low, _mean_where(lambda mean: _at_most(count, mean) < _TAIL, count)


def _mean_where(is_above: Callable[[float], bool], count: int) -> float:
    """Return the mean from which `is_above` is true."""
    low, high = 0.0, 2.0 * count + 10.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high


def _at_most(count: int, mean: float) -> float:
    """Return the probability of `count` or fewer events, of `mean` on average."""
    if not mean:
        return 1.0
    logs = (number * math.log(mean) - mean - math.lgamma(number + 1) for number in range(count + 1))
    return math.fsum(math.exp(each) for each in logs)
