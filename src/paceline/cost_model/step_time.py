"""Predicted time of a training step, for any strategy, from measured parts.

The program of `strategy_step_programs` is simulated; the phases add up to the step. Each prediction has a range: the
same program with every exchange cheaper or dearer by the error of 90 % of the held-out exchanges, and all computing by
the spread of 80 % of the steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from paceline.cost_model.backward_simulation import BestBucket, best_bucket
from paceline.cost_model.step_costs import StepCosts
from paceline.cost_model.step_simulator import Compute, Launch, SimulatedStep, Wait, simulate_step
from paceline.cost_model.step_strategy import StepStrategy
from paceline.cost_model.strategy_step_programs import step_program

__all__ = ["StepTime", "best_simulated_bucket", "fastest_step", "predict_step", "predict_steps"]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A predicted step; its four phases add up to it, as in ``paceline bench step``.

    Attributes:
        strategy: of synchronisation.
        forward: seconds of computing, as without synchronisation.
        backward: seconds of computing, as without synchronisation.
        exposed: seconds that synchronisation adds to them: waiting, launching, filling buckets, slowdown; and waiting
            for parameters.
        gather: the part of `exposed` that waits for parameters that other ranks updated or hold.
        optimizer: seconds of the update, without waiting.
        low: lower end of the range of the whole step.
        high: upper end of the range of the whole step.
        calls: number of exchanges.
        nbytes: of the buffers of all exchanges.
        beyond: notes on what lies beyond the measurements; None if nothing does.
    """

    strategy: StepStrategy
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
        """Seconds of the whole step."""
        return self.forward + self.backward + self.exposed + self.optimizer


def predict_step(costs: StepCosts, strategy: StepStrategy, *, calls: float = 1.0) -> StepTime:
    """Predict a step.

    Args:
        costs: of the model, backend and network, from `paceline.cost_model.step_costs.pick_step_costs`.
        strategy: of synchronisation.
        calls: factor on the time of every exchange: 0.5 for a network twice as fast.

    Raises:
        UsageError: one of its exchanges was not measured.
    """
    program = step_program(costs, strategy)
    price = program.price("reduce-scatter" if strategy.shards_update else "all-reduce")

    def simulated(error: float = 1.0, computing: float = 1.0) -> SimulatedStep:
        return simulate_step(
            [_scaled(step, calls * error, computing) for step in program.steps],
            lanes=price.channel.lanes,
            computing_slows=price.contention.computing_slows,
            calls_slow=price.contention.calls_slow,
        )

    def duration(timeline: SimulatedStep) -> float:
        return timeline.end - timeline.spans[program.earlier][0]

    timeline, spread, error = simulated(), costs.spread, 1.0 + price.error
    of_phase: dict[str, float] = defaultdict(float)
    spans = zip(program.steps, timeline.spans, strict=True)
    for step, (began, ended) in islice(spans, program.earlier, None):
        of_phase[step.phase] += ended - began
    sent = timeline.calls[program.earlier_calls :]
    forward, backward = costs.step.forward, costs.step.backward
    return StepTime(
        strategy=strategy,
        forward=forward,
        backward=backward,
        exposed=duration(timeline) - forward - backward - of_phase["optimizer"],
        gather=of_phase["gather"],
        optimizer=of_phase["optimizer"],
        low=duration(simulated(1.0 / error, 1.0 - spread)),
        high=duration(simulated(error, 1.0 + spread)),
        calls=len(sent),
        nbytes=sum(call.nbytes for call in sent),
        beyond="; ".join([*costs.notes, *program.beyond]) or None,
    )


def predict_steps(costs: StepCosts, strategies: Iterable[StepStrategy]) -> list[StepTime]:
    """Predict a step per strategy, in the same order; see `predict_step`."""
    return [predict_step(costs, strategy) for strategy in strategies]


def fastest_step(times: Sequence[StepTime]) -> StepTime:
    """Return the shortest step of those that send gradients uncompressed."""
    return min((each for each in times if each.strategy.compression == "none"), key=lambda each: each.seconds)


def best_simulated_bucket(costs: StepCosts, op: str = "all-reduce") -> BestBucket:
    """Return the bucket size with the shortest backward, simulated with the model's own sizes and ready times.

    Args:
        costs: as for `predict_step`.
        op: the exchange in backward.
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
