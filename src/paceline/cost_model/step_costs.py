"""What a prediction of steps needs from a profile: the model's computing and the prices of its exchanges (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from paceline.cost_model.bucket_closed_form import EqualBuckets
from paceline.cost_model.bucket_layout import CommChannel
from paceline.cost_model.fit_measurements import held_out_ranks, held_out_sizes
from paceline.cost_model.piecewise_fit import fit_line
from paceline.cost_model.prediction_error import PredictionError
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import Contention, ExchangeCost, ModelStep
from paceline.errors import UsageError

__all__ = ["ExchangePrice", "StepCosts", "pick_step_costs"]

_WITHIN = 1.1  # a size at most so many times the largest measured one is not called beyond it
_LARGE_NBYTES = 64 << 10
_MEASURE = "measure with paceline bench parts --profile FILE"
_MOST_SPREAD = 0.9  # so that the lower end of a range stays above 0


@dataclass(frozen=True)
class ExchangePrice:
    """The price of one kind of exchange.

    Attributes:
        alone, queued: fitted costs; see `ExchangeCost`.
        contention: what it and computing do to each other.
        ranks: that take part.
    """

    alone: ExchangeCost
    queued: ExchangeCost
    contention: Contention
    ranks: int

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of an exchange that is alone."""
        return self.alone.fit.seconds(max(nbytes, 1.0), self.ranks)

    def gap(self, nbytes: float) -> float:
        """Return the seconds until the next exchange can follow; at most those of one that is alone."""
        return min(self.queued.fit.seconds(max(nbytes, 1.0), self.ranks), self.seconds(nbytes))

    @cached_property
    def error(self) -> float:
        """What nine in ten measurements that were held out were off by at most, relatively.

        Of large ones, if there are any: what calls of a few bytes are off by hardly counts in a step.
        """
        points, op = self.alone.points, self.alone.fit.op
        found = [] if self.ranks in self.alone.fit.ranks else held_out_ranks(points, op)
        found = found or held_out_sizes(points, op)
        accuracy = PredictionError.of(found, least_nbytes=_LARGE_NBYTES) or PredictionError.of(found)
        return accuracy.p90 if accuracy else 0.0

    @property
    def channel(self) -> CommChannel:
        """The price as `paceline.cost_model.bucket_layout` takes it."""
        return CommChannel(
            self.seconds,
            self.gap,
            lanes=math.inf,
            launch_seconds=self.contention.launch_seconds,
            computing_slows=self.contention.computing_slows,
            calls_slow=self.contention.calls_slow,
        )

    def beyond(self, nbytes: float) -> str | None:
        """Return in words what of an exchange of so many bytes was not measured; None if all was."""
        fit = self.alone.fit
        if self.ranks not in fit.ranks:
            return f"{fit.op} was measured with {', '.join(map(str, fit.ranks))} ranks"
        if nbytes > _WITHIN * fit.high:
            return f"{fit.op} was measured up to {fit.high / 2**20:.3g} MiB"
        return None


@dataclass(frozen=True)
class StepCosts:
    """What steps of one model are made of, on one backend and network.

    Attributes:
        step: its computing.
        ranks: that train.
        engine: prices of Paceline's exchanges, by operation.
        torchs: price of the all-reduce as torch's DDP makes it; None: not measured.
        noted: what of this was measured elsewhere than it is predicted for; empty if all was measured here.
    """

    step: ModelStep
    ranks: int
    engine: dict[str, ExchangePrice]
    torchs: ExchangePrice | None
    noted: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """What Paceline's exchanges run on."""
        return next(iter(self.engine.values())).alone.backend

    @property
    def network(self) -> str:
        """What is between the ranks."""
        return next(iter(self.engine.values())).alone.network

    @property
    def bare_seconds(self) -> float:
        """Of a step without synchronisation."""
        return self.step.forward + self.step.backward + self.step.optimizer

    @property
    def spread(self) -> float:
        """How far computing of single steps is from the median, relatively; at most 0.9."""
        return min(self.step.spread, _MOST_SPREAD)

    def price(self, op: str, *, torchs: bool = False) -> ExchangePrice:
        """Return the price of an exchange of Paceline's, or of torch's DDP.

        Raises:
            UsageError: it was not measured.
        """
        found = self.torchs if torchs else self.engine.get(op)
        if found is None:
            whose, option = (" of torch's", "--torch ") if torchs else ("", "")
            raise UsageError(
                f"the profile has no {op}{whose}",
                remedy=f"measure it with paceline bench parts {option}--profile FILE",
            )
        return found

    def equal_buckets(self, op: str = "all-reduce") -> EqualBuckets | None:
        """Return the closed form's values: o and w of the line through the times of exchanges in a row.

        None where times don't grow with the size: there is no w then.

        Args:
            op: the exchange in backward; ``"reduce-scatter"`` where the optimizer is sharded.
        """
        price = self.price(op)
        of_ranks = [point for point in price.queued.points if point.ranks == self.ranks]
        points = of_ranks or [
            point for point in price.queued.points if point.ranks == price.queued.points[0].ranks
        ]
        line = fit_line(
            np.ones(len(points)),
            np.array([float(point.nbytes) for point in points]),
            np.array([point.seconds for point in points]),
        )
        if line.beta == 0.0:
            return None
        return EqualBuckets(self.step.nbytes, 1 / line.beta, line.alpha, self.step.buffered)


def pick_step_costs(
    profile: Profile,
    model: str | None = None,
    *,
    ranks: int | None = None,
    backend: str | None = None,
    network: str | None = None,
    batch: int | None = None,
    shape: str | None = None,
    threads: int | None = None,
) -> StepCosts:
    """Return what a profile knows about the steps of a model.

    Args:
        profile: with what ``paceline bench parts`` measured.
        model: its name; may be left out where only one was measured.
        ranks: that shall train; by default as many as were measured.
        backend: of Paceline's exchanges; may be left out where only one was measured.
        network: may be left out where only one was measured.
        batch, shape, threads: as the model was measured; each may be left out where there was one only.

    Raises:
        UsageError: it was not measured, or several were and none is named.
    """
    if not profile.models or not profile.exchanges:
        raise UsageError("the profile knows no training step", remedy=_MEASURE)
    costs = [each for each in profile.exchanges if each.caller == "paceline"]
    costs = _only(_only(costs, "backend", backend), "network", network)
    if not costs:
        raise UsageError("the profile has no exchanges of Paceline's", remedy=_MEASURE)
    backend, network = costs[0].backend, costs[0].network
    asked = {
        "backend": backend,  # first: it tells processors and GPUs apart
        "model": model,
        "batch": batch,
        "shape": shape,
        "threads": threads,
        "device": None,
    }
    steps = list(profile.models)
    for what, value in asked.items():
        steps = _only(steps, what, value)
    contentions = [each for each in profile.contentions if each.network == network]
    usual = max({each.ranks for each in steps} & {each.ranks for each in contentions}, default=steps[0].ranks)
    wanted = usual if ranks is None else ranks
    if wanted < 2:
        raise UsageError(f"{wanted} ranks exchange nothing", remedy="give 2 or more")
    step = min(steps, key=lambda each: abs(each.ranks - wanted))
    ours = [each for each in contentions if each.caller == "paceline" and each.backend == backend]
    engine = {op: _price(costs, ours, op, wanted) for op in sorted({each.fit.op for each in costs})}
    theirs = ("torch", "gloo" if backend == "paceline" else backend)  # as `paceline bench parts` measures it
    others = [
        each for each in profile.exchanges if (each.caller, each.backend, each.network) == (*theirs, network)
    ]
    disturbed = [each for each in contentions if (each.caller, each.backend) == theirs]
    torchs = _price(others, disturbed, "all-reduce", wanted) if others else None
    noted = (
        [] if step.ranks == wanted else [f"computing was measured with {step.ranks} ranks at the same time"]
    )
    return StepCosts(step, wanted, engine, torchs, tuple(noted))


def _price(
    costs: Sequence[ExchangeCost], contentions: Sequence[Contention], op: str, ranks: int
) -> ExchangePrice:
    of_mode = {each.queued: each for each in costs if each.fit.op == op}
    beside = [each for each in contentions if each.op == op]
    if set(of_mode) != {False, True} or not beside:
        raise UsageError(
            f"the profile lacks {op}: alone, in a row, or beside computing",
            remedy=_MEASURE,
        )
    nearest = min(beside, key=lambda each: abs(each.ranks - ranks))
    return ExchangePrice(of_mode[False], of_mode[True], nearest, ranks)


def _only(entries: Sequence[Any], what: str, wanted: object) -> list[Any]:
    """Return the entries whose `what` is wanted; all where it is not said and they have it in common."""
    there = list(dict.fromkeys(getattr(each, what) for each in entries))
    if wanted is None and len(there) > 1:
        raise UsageError(
            f"the profile has steps that differ in {what}: {', '.join(map(str, there))}",
            remedy=f"name one {what}",
        )
    if wanted is not None and wanted not in there:
        raise UsageError(
            f"the profile has no step with {what} {wanted!r}",
            remedy=f"it has: {', '.join(map(str, there))}" if there else _MEASURE,
        )
    return [each for each in entries if wanted in (None, getattr(each, what))]
