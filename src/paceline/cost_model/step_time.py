"""What a training step takes, for any way to synchronise gradients, from measured parts (pure).

The program of `paceline.cost_model.step_program` is played on the timeline; phases then add up to the step. Each
prediction comes with a range: the same program with every exchange and all computing as much cheaper, or dearer, as
nine in ten of what was held out (exchanges) and eight in ten steps (computing) were.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.cost_model.bucket_layout import BestBucket, best_bucket
from paceline.cost_model.step_costs import StepCosts
from paceline.cost_model.step_program import step_program
from paceline.cost_model.step_simulator import Compute, Launch, SimulatedStep, Wait, simulate_step
from paceline.cost_model.step_strategy import StepStrategy

__all__ = ["StepTime", "best_step", "predict_step", "predict_steps", "simulated_bucket"]


@dataclass(frozen=True)
class StepTime:
    """A predicted step; its four phases add up to it, as in ``paceline bench step``.

    Attributes:
        way: how gradients are synchronised.
        forward, backward: seconds of computing, as without any synchronisation.
        exposed: seconds that synchronisation adds to them: waiting, launching, adding to buckets, being slowed; and
            waiting for parameters.
        gather: of `exposed`, seconds of waiting for parameters that others updated or hold.
        optimizer: seconds of the update, without waiting.
        low, high: the range of the whole step.
        calls, nbytes: exchanges of a step, and the bytes of their buffers.
        beyond: what of it was not measured, in words; None if all was.
    """

    way: StepStrategy
    forward: float
    backward: float
    exposed: float
    gather: float
    optimizer: float
    low: float
    high: float
    calls: int
    nbytes: float
    beyond: str | None = None

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.forward + self.backward + self.exposed + self.optimizer


def predict_step(costs: StepCosts, way: StepStrategy, *, calls: float = 1.0) -> StepTime:
    """Return what a step takes.

    Args:
        costs: of the model, backend and network; see `paceline.cost_model.step_costs.pick_step_costs`. way:
            how it synchronises.
        calls: what a step would take if exchanges took so many times as long: 0.5 for a network twice as fast.

    Raises:
        UsageError: an exchange of it was not measured.
    """
    made = step_program(costs, way)
    op = "reduce-scatter" if way.shares else "all-reduce"
    price = made.price(op)

    def played(off: float = 1.0, computing: float = 1.0) -> SimulatedStep:
        return simulate_step(
            [_scaled(step, calls * off, computing) for step in made.steps],
            lanes=price.channel.lanes,
            computing_slows=price.contention.computing_slows,
            calls_slow=price.contention.calls_slow,
        )

    timeline, spread, error = played(), costs.spread, 1.0 + price.error
    of_phase: dict[str, float] = defaultdict(float)
    for step, (began, ended) in zip(made.steps, timeline.spans, strict=True):
        of_phase[step.phase] += ended - began
    forward, backward = costs.step.forward, costs.step.backward
    return StepTime(
        way=way,
        forward=forward,
        backward=backward,
        exposed=timeline.end - forward - backward - of_phase["optimizer"],
        gather=of_phase["gather"],
        optimizer=of_phase["optimizer"],
        low=played(1.0 / error, 1.0 - spread).end,
        high=played(error, 1.0 + spread).end,
        calls=len(timeline.calls),
        nbytes=sum(call.nbytes for call in timeline.calls),
        beyond="; ".join([*costs.noted, *made.beyond]) or None,
    )


def predict_steps(costs: StepCosts, ways: Iterable[StepStrategy]) -> list[StepTime]:
    """Return what steps take, in the order of `ways`; see `predict_step`."""
    return [predict_step(costs, way) for way in ways]


def best_step(times: Sequence[StepTime]) -> StepTime:
    """Return the shortest step of those that send gradients whole."""
    return min((each for each in times if each.way.compression == "none"), key=lambda each: each.seconds)


def simulated_bucket(costs: StepCosts, op: str = "all-reduce") -> BestBucket:
    """Return the bucket size with the shortest backward, by simulation with the model's own sizes and ready times.

    Args:
        costs: as for `predict_step`. op: the exchange in backward.
    """
    ready = [each.ready for each in costs.step.parameters]
    return best_bucket(ready, costs.price(op).channel, backward_seconds=costs.step.buffered)


def _scaled(step: Compute | Launch | Wait, calls: float, computing: float) -> Compute | Launch | Wait:
    match step:
        case Compute():
            return replace(step, seconds=step.seconds * computing)
        case Launch():
            return replace(step, seconds=step.seconds * calls, gap=step.gap * calls)
    return step
