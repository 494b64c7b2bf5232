"""Inputs of a step prediction, selected from a profile: a model's compute times and the costs of its exchanges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from paceline.cost_model.backward_simulation import CommChannel
from paceline.cost_model.bucket_closed_form import EqualBuckets
from paceline.cost_model.collective_prediction import PredictionError
from paceline.cost_model.fit_measurements import held_out_ranks, held_out_sizes
from paceline.cost_model.piecewise_fit import fit_line
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import Contention, ExchangeCost, ModelStep
from paceline.errors import UsageError

__all__ = ["ExchangePrice", "StepCosts", "pick_step_costs"]

_SIZE_TOLERANCE = 1.1  # sizes up to this factor beyond the largest measured one are not noted
_LARGE_NBYTES = 64 << 10
_MEASURE = "measure with paceline bench parts --profile FILE"
_MAX_SPREAD = 0.9  # keeps the lower end of a range above 0


@dataclass(frozen=True)
class ExchangePrice:
    """Price of one kind of exchange.

    Attributes:
        alone: fitted cost of an isolated exchange.
        queued: fitted cost of one exchange after another; see `ExchangeCost`.
        contention: how it and computing slow each other down.
        ranks: that take part.
    """

    alone: ExchangeCost
    queued: ExchangeCost
    contention: Contention
    ranks: int

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of an isolated exchange."""
        return self.alone.fit.seconds(max(nbytes, 1.0), self.ranks)

    def gap(self, nbytes: float) -> float:
        """Return the seconds until the next exchange can follow; at most those of an isolated one."""
        return min(self.queued.fit.seconds(max(nbytes, 1.0), self.ranks), self.seconds(nbytes))

    @cached_property
    def error(self) -> float:
        """Relative error of 90 % of the held-out measurements at most.

        Only of large messages, if there are any: the error of small calls hardly matters in a step.
        """
        points, op = self.alone.points, self.alone.fit.op
        checked = [] if self.ranks in self.alone.fit.ranks else held_out_ranks(points, op)
        checked = checked or held_out_sizes(points, op)
        error = PredictionError.of(checked, least_nbytes=_LARGE_NBYTES) or PredictionError.of(checked)
        return error.p90 if error else 0.0

    @property
    def channel(self) -> CommChannel:
        """The price as `paceline.cost_model.backward_simulation` takes it."""
        return CommChannel(
            self.seconds,
            self.gap,
            lanes=math.inf,
            launch_seconds=self.contention.launch_seconds,
            computing_slows=self.contention.computing_slows,
            calls_slow=self.contention.calls_slow,
        )

    def beyond(self, nbytes: float) -> str | None:
        """Describe the measurements that an exchange of `nbytes` lies beyond; None within them."""
        fit = self.alone.fit
        if self.ranks not in fit.ranks:
            return f"{fit.op} was measured with {', '.join(map(str, fit.ranks))} ranks"
        if nbytes > _SIZE_TOLERANCE * fit.high:
            return f"{fit.op} was measured up to {fit.high / 2**20:.3g} MiB"
        return None


@dataclass(frozen=True)
class StepCosts:
    """Costs of the steps of one model, on one backend and network.

    Attributes:
        step: compute times.
        ranks: that train.
        engine: prices of Paceline's exchanges, by operation.
        torch_ddp: price of the all-reduce as torch's DDP makes it; None: not measured.
        notes: what was measured under other conditions than it is predicted for; empty if nothing.
    """

    step: ModelStep
    ranks: int
    engine: dict[str, ExchangePrice]
    torch_ddp: ExchangePrice | None
    notes: tuple[str, ...] = ()

    @property
    def backend(self) -> str:
        """Backend of Paceline's exchanges."""
        return next(iter(self.engine.values())).alone.backend

    @property
    def network(self) -> str:
        """Network between the ranks."""
        return next(iter(self.engine.values())).alone.network

    @property
    def bare_seconds(self) -> float:
        """Seconds of a step without synchronisation."""
        return self.step.forward + self.step.backward + self.step.optimizer

    @property
    def spread(self) -> float:
        """Relative deviation of single steps' computing from the median; at most 0.9."""
        return min(self.step.spread, _MAX_SPREAD)

    def price(self, op: str, *, torch_ddp: bool = False) -> ExchangePrice:
        """Return the price of an exchange of Paceline's, or of torch's DDP.

        Raises:
            UsageError: it was not measured.
        """
        price = self.torch_ddp if torch_ddp else self.engine.get(op)
        if price is None:
            owner, option = (" of torch's", "--torch ") if torch_ddp else ("", "")
            raise UsageError(
                f"the profile has no {op}{owner}",
                remedy=f"measure it with paceline bench parts {option}--profile FILE",
            )
        return price

    def equal_buckets(self, op: str = "all-reduce") -> EqualBuckets | None:
        """Return the inputs of the closed form: o and w of the line through the times of queued exchanges.

        None where times don't grow with the size, so that there is no w.

        Args:
            op: the exchange in backward; ``"reduce-scatter"`` where the optimizer is sharded.
        """
        points = self.price(op).queued.points
        ranks = self.ranks if any(point.ranks == self.ranks for point in points) else points[0].ranks
        points = [point for point in points if point.ranks == ranks]
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
    """Select the costs of a model's steps from a profile.

    All but `ranks` may be left out where only one value was measured.

    Args:
        profile: with measurements of ``paceline bench parts``.
        model: its name.
        ranks: that train; by default the number that was measured.
        backend: of Paceline's exchanges.
        network: between the ranks.
        batch: samples per rank.
        shape: of a sample.
        threads: of each rank.

    Raises:
        UsageError: it was not measured, or several were measured and none is given.
    """
    if not profile.models or not profile.exchanges:
        raise UsageError("the profile has no training step", remedy=_MEASURE)
    costs = [each for each in profile.exchanges if each.caller == "paceline"]
    costs = _select(_select(costs, "backend", backend), "network", network)
    if not costs:
        raise UsageError("the profile has no exchanges of Paceline's", remedy=_MEASURE)
    measured, network = costs[0].backend, costs[0].network
    steps = list(profile.models)
    for name, value in (
        ("backend", measured),  # first: it separates CPUs from GPUs
        ("model", model),
        ("batch", batch),
        ("shape", shape),
        ("threads", threads),
        ("device", None),
    ):
        steps = _select(steps, name, value)
    contentions = [each for each in profile.contentions if each.network == network]
    common = {each.ranks for each in steps} & {each.ranks for each in contentions}
    count: int = max(common, default=steps[0].ranks) if ranks is None else ranks
    if count < 2:
        raise UsageError(f"{count} ranks exchange nothing", remedy="give 2 or more")
    step = min(steps, key=lambda each: abs(each.ranks - count))

    def entries_of(caller: str, backend: str) -> tuple[list[ExchangeCost], list[Contention]]:
        return (
            [e for e in profile.exchanges if (e.caller, e.backend, e.network) == (caller, backend, network)],
            [e for e in contentions if (e.caller, e.backend) == (caller, backend)],
        )

    engine_entries = entries_of("paceline", measured)
    engine = {op: _price(*engine_entries, op, count) for op in sorted({each.fit.op for each in costs})}
    # `paceline bench parts` measures torch DDP on gloo where Paceline's own backend runs
    torch_entries = entries_of("torch", "gloo" if measured == "paceline" else measured)
    torch_ddp = _price(*torch_entries, "all-reduce", count) if torch_entries[0] else None
    note = f"computing was measured with {step.ranks} ranks at the same time"
    return StepCosts(step, count, engine, torch_ddp, () if step.ranks == count else (note,))


def _price(
    costs: Sequence[ExchangeCost], contentions: Sequence[Contention], op: str, ranks: int
) -> ExchangePrice:
    of_mode = {each.queued: each for each in costs if each.fit.op == op}
    measured = [each for each in contentions if each.op == op]
    if set(of_mode) != {False, True} or not measured:
        raise UsageError(f"the profile lacks {op}: isolated, queued, or alongside computing", remedy=_MEASURE)
    nearest = min(measured, key=lambda each: abs(each.ranks - ranks))
    return ExchangePrice(of_mode[False], of_mode[True], nearest, ranks)


def _select(entries: Sequence[Any], name: str, value: object) -> list[Any]:
    """Return the entries whose attribute has the value; all if it is None and they agree."""
    known = list(dict.fromkeys(getattr(each, name) for each in entries))
    if value is None and len(known) > 1:
        raise UsageError(
            f"the profile has steps that differ in {name}: {', '.join(map(str, known))}",
            remedy=f"name one {name}",
        )
    if value is not None and value not in known:
        raise UsageError(
            f"the profile has no step with {name} {value!r}",
            remedy=f"it has: {', '.join(map(str, known))}" if known else _MEASURE,
        )
    return [each for each in entries if value in (None, getattr(each, name))]
