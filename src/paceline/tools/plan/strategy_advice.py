"""Advice on a training step: how to synchronise, its time on 1 … N ranks, what limits it, what would help most (pure).

Everything follows from `paceline.cost_model.step_time`: the best strategy has the shortest predicted step of those that
fit into memory, and a remedy is the same prediction with one thing changed. So all figures derive from the measured
parts in a profile, and have the same range.
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
from paceline.tools.plan.compression_or_local_sgd import LOSS_EFFECTS, advise_network, exchange_nbytes

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
_NOTICEABLE = 1.05  # least factor of samples per second of a remedy
_HARDLY = 1.005  # steps up to this factor longer count as equally good


@dataclass(frozen=True)
class RankBatch:
    """A rank's part of an optimizer step: `accumulation` micro-batches of `micro` samples."""

    micro: int
    accumulation: int = 1

    @property
    def samples(self) -> int:
        """Samples per rank and step."""
        return self.micro * self.accumulation


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """Predicted training on one number of ranks.

    Attributes:
        ranks: that train.
        strategy: with the shortest step; None on one rank, which sends nothing.
        seconds: of a step.
        low: lower end of the range of `seconds`.
        high: upper end of the range of `seconds`.
        samples_per_second: of all ranks.
        efficiency: samples per second and rank relative to a single rank.
        least: efficiency if exchanges take longer by the error of their fits; the spread of computing cancels out.
        most: efficiency if exchanges are shorter by that error.
        beyond: notes on what was not measured; None if all was.
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
    """A single change, the factor by which it raises samples per second, and its cost."""

    what: str
    factor: float
    cost: str = ""


@dataclass(frozen=True, kw_only=True)
class StepAdvice:
    """Result of `advise_step`.

    Attributes:
        best: the shortest step on the largest number of ranks, without accumulation.
        default: torch DDP's default there; None: its calls were not measured.
        points: one per number of ranks, ascending.
        limit: ``"computing"``, ``"communication"`` or ``"the update"``: the largest part of a step.
        shares: of forward and backward, exposed communication and the update in a step.
        remedies: with a noticeable gain, the best first.
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
    """Return these strategies, those with buckets at the usual sizes, and torch DDP's default."""
    whole = costs.step.nbytes / MIB
    sizes = [*(size for size in _SIZES_MIB if size < whole), math.inf]
    found = [each for each in standard_strategies(sizes, torch_ddp=False) if each.name in strategies]
    return [*found, StepStrategy("ddp")] if torch_ddp and costs.torch_ddp is not None else found


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
    """Advise how to synchronise on the largest of these numbers of ranks, and predict a step on each of them.

    Args:
        profile: with measurements of ``paceline bench parts``.
        ranks: numbers of ranks, 1 or more; the largest, which the advice is for, 2 or more.
        batch: of a rank. Computing is scaled with the micro-batch from the nearest measured one.
        strategies: that fit into memory; names of `paceline.cost_model.step_strategy.STRATEGIES`.
        model: as for `paceline.cost_model.step_costs.pick_step_costs`, like all that follow.
        shape: of a sample.
        backend: of Paceline's exchanges.
        network: between the ranks.

    Raises:
        UsageError: it was not measured, or a number is out of range.
    """
    numbers = sorted(set(ranks))
    if not numbers or numbers[0] < 1 or numbers[-1] < 2:
        raise UsageError(f"ranks {list(ranks)}", remedy="give numbers of 1 or more, the largest 2 or more")
    if min(batch.micro, batch.accumulation) < 1:
        raise UsageError(f"{batch}", remedy="give a micro-batch and an accumulation of 1 or more")
    keys = {"model": model, "shape": shape, "backend": backend, "network": network}
    costs_of = {
        number: _scale_computing(pick_nearest_costs(profile, number, batch.micro, **keys), micro=batch.micro)
        for number in numbers
        if number > 1
    }
    best_of = {number: _best(costs, strategies) for number, costs in costs_of.items()}
    target, best = costs_of[numbers[-1]], best_of[numbers[-1]]
    shares = _shares(target, best, batch)
    default = None if target.torch_ddp is None else predict_step(target, StepStrategy("ddp"))
    alone = _alone_point(next(iter(costs_of.values())), batch)
    return StepAdvice(
        best=best,
        default=default,
        points=tuple(
            alone if number == 1 else _point(costs_of[number], best_of[number], batch) for number in numbers
        ),
        limit=max(shares, key=shares.__getitem__),
        shares=shares,
        remedies=tuple(_remedies(target, best, batch, strategies)),
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
    """Select costs as `paceline.cost_model.step_costs.pick_step_costs` does, of the batch nearest to `micro`."""
    keys = ((model, "model"), (shape, "shape"), (backend, "backend"))
    batches = [
        each.batch
        for each in profile.models
        if all(value in (None, getattr(each, name)) for value, name in keys)
    ]
    nearest = min(batches, key=lambda batch: abs(math.log(batch / micro)), default=None)
    return pick_step_costs(
        profile, model, ranks=ranks, backend=backend, network=network, batch=nearest, shape=shape
    )


def _scale_computing(costs: StepCosts, micro: int = 0, factor: float = 1.0) -> StepCosts:
    """Return the costs with forward and backward scaled to another micro-batch (0: the same), and by a factor.

    Adding gradients to buckets depends on their bytes, not on the batch.
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
        note = f"computing was measured with {step.batch} samples, and scaled with their number"
        notes = (*notes, f"{note} (better: paceline bench parts --micro-batch-size {micro})")
    return replace(costs, step=scaled, notes=notes)


def _best(costs: StepCosts, strategies: Sequence[str]) -> StepTime:
    """Return the shortest step; of almost equal ones the default, with buckets of up to 25 MiB."""
    candidates = candidate_strategies(costs, strategies, torch_ddp=False)
    if not candidates:
        raise UsageError(f"strategies {list(strategies)}", remedy="give one or more that have a prediction")
    times = predict_steps(costs, candidates)
    least = min(time.seconds for time in times)
    good = [time for time in times if time.seconds <= _HARDLY * least]
    usual = [
        time for time in good if time.strategy.name == "bucketed" and time.strategy.bucket_mib in (None, 25)
    ]
    return usual[0] if usual else min(good, key=lambda time: time.seconds)


def _extra(costs: StepCosts, batch: RankBatch) -> float:
    """Return the seconds of the micro-batches that are not synchronised."""
    return (batch.accumulation - 1) * (costs.step.forward + costs.step.backward)


def _alone(costs: StepCosts, batch: RankBatch) -> float:
    return batch.accumulation * (costs.step.forward + costs.step.backward) + costs.step.optimizer


def _alone_point(costs: StepCosts, batch: RankBatch) -> ScalingPoint:
    seconds = _alone(costs, batch)
    return ScalingPoint(
        ranks=1,
        strategy=None,
        seconds=seconds,
        low=seconds * (1 - costs.spread),
        high=seconds * (1 + costs.spread),
        samples_per_second=batch.samples / seconds,
        efficiency=1.0,
        least=1.0,
        most=1.0,
    )


def _point(costs: StepCosts, time: StepTime, batch: RankBatch) -> ScalingPoint:
    alone, extra, spread = _alone(costs, batch), _extra(costs, batch), costs.spread
    error = 1.0 + max(price.error for price in costs.engine.values())
    shortest, longest = (
        extra + predict_step(costs, time.strategy, calls=factor).seconds for factor in (1 / error, error)
    )
    seconds = extra + time.seconds
    return ScalingPoint(
        ranks=costs.ranks,
        strategy=time.strategy,
        seconds=seconds,
        low=extra * (1 - spread) + time.low,
        high=extra * (1 + spread) + time.high,
        samples_per_second=costs.ranks * batch.samples / seconds,
        efficiency=alone / seconds,
        least=alone / max(longest, seconds),  # not above `efficiency` by a rounding
        most=alone / min(shortest, seconds),
        beyond=time.beyond,
    )


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
    """Return the changes that noticeably raise samples per second, the best first."""
    extra = _extra(costs, batch)
    now = best.seconds + extra

    def remedy(what: str, seconds: float, work: float = 1.0, cost: str = "") -> StepRemedy:
        return StepRemedy(what, work * now / seconds, cost)

    faster, larger = _scale_computing(costs, factor=0.5), _scale_computing(costs, micro=2 * costs.step.batch)
    found = [
        remedy("a network twice as fast", predict_step(costs, best.strategy, calls=0.5).seconds + extra),
        remedy(
            "processors twice as fast", predict_step(faster, best.strategy).seconds + _extra(faster, batch)
        ),
        remedy(
            "a micro-batch twice as large",
            predict_step(larger, best.strategy).seconds + _extra(larger, batch),
            work=2.0,
            cost="fewer updates for the same data, and more memory",
        ),
        remedy(
            "twice the accumulation",
            now + batch.accumulation * (costs.step.forward + costs.step.backward),
            work=2.0,
            cost="fewer updates for the same data",
        ),
    ]
    if "sharded" not in strategies and best.strategy.name != "sharded":
        sharded = _best(costs, ["sharded"])
        found.append(remedy("sharding the optimizer", sharded.seconds + extra))
    if best.strategy.name in ("bucketed", "sharded"):
        squeezed = predict_step(costs, StepStrategy(best.strategy.name, best.strategy.bucket_mib, "int8"))
        found.append(
            remedy(
                'compression="int8"',
                squeezed.seconds + extra,
                cost=f"the loss: {LOSS_EFFECTS['int8', 1]}; the time of compressing is not counted",
            )
        )
    found += _less_often(costs, now, batch)
    return sorted(
        (each for each in found if each.factor > _NOTICEABLE),
        key=lambda each: -each.factor,
    )


def _less_often(costs: StepCosts, now: float, batch: RankBatch) -> list[StepRemedy]:
    """Return the gain of synchronising every few steps, where a step is bound by the network."""
    parameters = costs.step.nbytes // 4
    price = costs.price("all-reduce")
    rate = exchange_nbytes(parameters, costs.ranks) / price.seconds(costs.step.nbytes)
    advice = advise_network(parameters, costs.ranks, rate, _alone(costs, batch))
    if advice.chosen.every == 1:
        return []
    return [
        StepRemedy(
            f"synchronising every {advice.chosen.every} steps ({advice.chosen.flags})",
            now / advice.chosen.step_seconds,
            f"the loss: {advice.chosen.effect}",
        )
    ]
