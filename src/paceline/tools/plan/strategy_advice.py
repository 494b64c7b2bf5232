"""How to synchronise, what a step takes at 1 … N ranks, what limits it and what would help most (pure).

Everything follows from `paceline.cost_model.step_time`: the best way is the shortest predicted step of those that
memory allows, and a remedy is a prediction of the same step with one thing changed. So every figure has the same
origin, the measured parts in a profile, and the same range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline._core.units import MIB
from paceline.cost_model.profile import Profile
from paceline.cost_model.step_costs import StepCosts, pick_step_costs
from paceline.cost_model.step_strategy import StepStrategy, standard_strategies
from paceline.cost_model.step_time import StepTime, predict_step, predict_steps
from paceline.errors import UsageError
from paceline.tools.plan.slow_network import LOSS_EFFECTS, advise_network, exchange_nbytes

__all__ = [
    "RankBatch",
    "ScalingPoint",
    "StepAdvice",
    "StepRemedy",
    "advise_step",
    "candidate_strategies",
    "pick_nearest_costs",
]

_SIZES_MIB = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0)
_NOTICEABLE = 1.05  # times as many samples per second
_HARDLY = 1.005  # times as long


@dataclass(frozen=True)
class RankBatch:
    """What a rank computes in an optimizer step: `accumulation` micro-batches of `micro` samples."""

    micro: int
    accumulation: int = 1

    @property
    def samples(self) -> int:
        """Of a rank, in a step."""
        return self.micro * self.accumulation


@dataclass(frozen=True)
class ScalingPoint:
    """A training on some ranks.

    Attributes:
        ranks: that train. way: with the shortest step; None on one rank, which sends nothing.
        seconds, low, high: of a step, and the range to expect.
        samples_per_second: of all ranks.
        efficiency, least, most: samples per second a rank beside those of one alone, and its range: how far off
            exchanges may be; what computing varies by meets both.
        beyond: what of it was not measured; None if all was.
    """

    ranks: int
    strategy: StepStrategy | None
    seconds: float
    low: float
    high: float
    samples_per_second: float
    efficiency: float
    least: float
    most: float
    beyond: str | None = None


@dataclass(frozen=True)
class StepRemedy:
    """One thing changed: samples per second are `factor` times as many; `cost` tells what it takes or does."""

    what: str
    factor: float
    cost: str = ""


@dataclass(frozen=True)
class StepAdvice:
    """How to synchronise, and what that takes.

    Attributes:
        best: the shortest step at the number of ranks that was asked for, its times those of `accumulation` 1.
        default: torch DDP's default there; None: its calls were not measured.
        points: at every number of ranks, in ascending order, 1 first.
        limit: ``"computing"``, ``"communication"`` or ``"the update"``: the largest part of a step.
        shares: of forward and backward, exposed communication and the update in a step.
        remedies: that make a difference, the best first.
    """

    best: StepTime
    default: StepTime | None
    points: tuple[ScalingPoint, ...]
    limit: str
    shares: dict[str, float]
    remedies: tuple[StepRemedy, ...]


def candidate_strategies(
    costs: StepCosts, strategies: Sequence[str], *, torch_ddp: bool = True
) -> list[StepStrategy]:
    """Return the ways to try: these strategies, those with buckets at usual sizes, and torch DDP's default."""
    whole = costs.step.nbytes / MIB
    sizes = [*(size for size in _SIZES_MIB if size < whole), math.inf]
    ways = [way for way in standard_strategies(sizes, torch_ddp=False) if way.name in strategies]
    return [*ways, StepStrategy("ddp")] if torch_ddp and costs.torch_ddp is not None else ways


def advise_step(
    profile: Profile,
    ranks: Sequence[int],
    batch: RankBatch,
    strategies: Sequence[str] = ("flat", "overlap", "bucketed", "sharded"),
    *,
    model: str | None = None,
    shape: str | None = None,
    backend: str | None = None,
    network: str | None = None,
) -> StepAdvice:
    """Return how to synchronise on the largest of these numbers of ranks, and what a step takes on each of them.

    Args:
        profile: with what ``paceline bench parts`` measured.
        ranks: numbers of ranks, 1 or more; the largest is what the advice is for, 2 or more.
        batch: of a rank. Computing is taken to grow with the micro-batch, from the nearest that was measured.
        strategies: that memory allows; names of `paceline.cost_model.step_strategy.STRATEGIES`.
        model, shape, backend, network: as for `paceline.cost_model.step_costs.pick_step_costs`.

    Raises:
        UsageError: nothing of it was measured, or a number makes no sense.
    """
    numbers = sorted(set(ranks))
    if not numbers or numbers[0] < 1 or numbers[-1] < 2:
        raise UsageError(f"ranks {list(ranks)}", remedy="give numbers of 1 or more, the largest 2 or more")
    if min(batch.micro, batch.accumulation) < 1:
        raise UsageError(f"{batch}", remedy="give a micro-batch and an accumulation of 1 or more")
    sizes = [number for number in numbers if number > 1]
    place = {"model": model, "shape": shape, "backend": backend, "network": network}
    costs_of = {
        number: _computing(pick_nearest_costs(profile, number, batch.micro, **place), micro=batch.micro)
        for number in sizes
    }
    target = costs_of[sizes[-1]]
    best_of = {number: _best(costs, strategies) for number, costs in costs_of.items()}
    best = best_of[sizes[-1]]
    shares = _shares(target, best, batch)
    ways = candidate_strategies(target, strategies)
    return StepAdvice(
        best,
        next((predict_step(target, way) for way in ways if way.is_default_ddp), None),
        tuple(_points(numbers, costs_of, best_of, batch)),
        max(shares, key=shares.__getitem__),
        shares,
        tuple(_remedies(target, best, batch, strategies)),
    )


def pick_nearest_costs(
    profile: Profile,
    ranks: int,
    micro: int,
    *,
    model: str | None = None,
    shape: str | None = None,
    backend: str | None = None,
    network: str | None = None,
) -> StepCosts:
    """Return what a profile knows of the batch nearest to a micro-batch; else as
    `paceline.cost_model.step_costs.pick_step_costs`."""
    asked = ((model, "model"), (shape, "shape"), (backend, "backend"))
    batches = [
        each.batch
        for each in profile.models
        if all(value in (None, getattr(each, name)) for value, name in asked)
    ]
    nearest = min(batches, key=lambda batch: abs(math.log(batch / micro)), default=None)
    return pick_step_costs(
        profile, model, ranks=ranks, backend=backend, network=network, batch=nearest, shape=shape
    )


def _computing(costs: StepCosts, micro: int = 0, factor: float = 1.0) -> StepCosts:
    """Return costs with forward and backward of another micro-batch (0: the same), or so many times as long.

    What adding gradients to buckets takes depends on their bytes, not on the batch.
    """
    step = costs.step
    times = factor * (micro / step.batch if micro else 1.0)
    backward = step.backward * times
    buffered = max(0.0, backward + factor * (step.buffered - step.backward))
    stretch = buffered / step.buffered
    scaled = replace(
        step,
        batch=micro or step.batch,
        forward=step.forward * times,
        backward=backward,
        buffered=buffered,
        parameters=tuple(replace(each, seconds=each.seconds * stretch) for each in step.parameters),
    )
    notes = costs.notes
    if micro and micro != step.batch:
        told = f"computing was measured with {step.batch} samples, and taken to grow with them"
        notes = (*notes, f"{told} (better: paceline bench parts --batch-size {micro})")
    return replace(costs, step=scaled, notes=notes)


def _best(costs: StepCosts, strategies: Sequence[str]) -> StepTime:
    """Return the shortest step; of those that are hardly longer the usual one, with buckets of 25 MiB."""
    ways = candidate_strategies(costs, strategies, torch_ddp=False)
    if not ways:
        raise UsageError(f"strategies {list(strategies)}", remedy="give one or more that have a prediction")
    times = predict_steps(costs, ways)
    least = min(time.seconds for time in times)
    good = [time for time in times if time.seconds <= _HARDLY * least]
    usual = [time for time in good if time.strategy.name == "bucketed" and time.strategy.caps == 25 * MIB]
    return usual[0] if usual else min(good, key=lambda time: time.seconds)


def _extra(costs: StepCosts, batch: RankBatch) -> float:
    """Return the seconds of the micro-batches that are not synchronised."""
    return (batch.accumulation - 1) * (costs.step.forward + costs.step.backward)


def _alone(costs: StepCosts, batch: RankBatch) -> float:
    return batch.accumulation * (costs.step.forward + costs.step.backward) + costs.step.optimizer


def _points(
    numbers: Sequence[int], costs_of: dict[int, StepCosts], best_of: dict[int, StepTime], batch: RankBatch
) -> list[ScalingPoint]:
    points = []
    for number in numbers:
        costs = costs_of.get(number, next(iter(costs_of.values())))
        alone, extra = _alone(costs, batch), _extra(costs, batch)
        spread = costs.spread
        if number == 1:
            bounds = (alone * (1 - spread), alone * (1 + spread))
            points.append(ScalingPoint(1, None, alone, *bounds, batch.samples / alone, 1.0, 1.0, 1.0))
            continue
        error = 1.0 + max(price.error for price in costs.engine.values())
        time = best_of[number]
        seconds = extra + time.seconds
        low, high = extra * (1 - spread) + time.low, extra * (1 + spread) + time.high
        rate = number * batch.samples / seconds
        cheap, dear = (
            extra + predict_step(costs, time.strategy, calls=by).seconds for by in (1 / error, error)
        )
        points.append(
            ScalingPoint(
                *(number, time.strategy, seconds, low, high, rate),
                *(alone / seconds, alone / dear, alone / cheap, time.beyond),
            )
        )
    return points


def _shares(costs: StepCosts, best: StepTime, batch: RankBatch) -> dict[str, float]:
    extra = _extra(costs, batch)
    whole = best.seconds + extra
    return {
        "computing": (best.forward + best.backward + extra) / whole,
        "communication": best.exposed / whole,
        "the update": best.optimizer / whole,
    }


def _remedies(
    costs: StepCosts, best: StepTime, batch: RankBatch, strategies: Sequence[str]
) -> list[StepRemedy]:
    """Return what makes samples per second noticeably more, the best first."""
    extra = _extra(costs, batch)
    now = best.seconds + extra

    def times(what: str, seconds: float, work: float = 1.0, cost: str = "") -> StepRemedy:
        return StepRemedy(what, work * now / seconds, cost)

    faster, larger = _computing(costs, factor=0.5), _computing(costs, micro=2 * costs.step.batch)
    found = [
        times("a network twice as fast", predict_step(costs, best.strategy, calls=0.5).seconds + extra),
        times(
            "processors twice as fast", predict_step(faster, best.strategy).seconds + _extra(faster, batch)
        ),
        times(
            "a micro-batch twice as large",
            predict_step(larger, best.strategy).seconds + _extra(larger, batch),
            work=2.0,
            cost="fewer updates for the same data, and more memory",
        ),
        times(
            "twice the accumulation",
            now + batch.accumulation * (costs.step.forward + costs.step.backward),
            work=2.0,
            cost="fewer updates for the same data",
        ),
    ]
    if "sharded" not in strategies and best.strategy.name != "sharded":
        sharded = _best(costs, ["sharded"])
        found.append(times("sharding the optimizer", sharded.seconds + extra))
    if best.strategy.name in ("bucketed", "sharded"):
        squeezed = predict_step(costs, StepStrategy(best.strategy.name, best.strategy.bucket_mib, "int8"))
        found.append(
            times(
                'compression="int8"',
                squeezed.seconds + extra,
                cost=f"the loss: {LOSS_EFFECTS['int8', 1]}; making packets is not counted",
            )
        )
    found += _apart(costs, now, batch)
    return sorted(
        (each for each in found if each.factor > _NOTICEABLE),
        key=lambda each: -each.factor,
    )


def _apart(costs: StepCosts, now: float, batch: RankBatch) -> list[StepRemedy]:
    """Return what agreeing every few steps gains, where a step is bound by the network."""
    parameters = costs.step.nbytes // 4
    price = costs.price("all-reduce")
    rate = exchange_nbytes(parameters, costs.ranks) / price.seconds(costs.step.nbytes)
    advice = advise_network(parameters, costs.ranks, rate, _alone(costs, batch))
    if advice.chosen.every == 1:
        return []
    return [
        StepRemedy(
            f"agreeing every {advice.chosen.every} steps ({advice.chosen.flags})",
            now / advice.chosen.step_seconds,
            f"the loss: {advice.chosen.effect}",
        )
    ]
