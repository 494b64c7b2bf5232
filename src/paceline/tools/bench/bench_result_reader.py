"""Reads results of ``paceline bench collectives`` (times to fit) and ``paceline bench step`` (steps to compare)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from paceline._core.json_codec import Meta, NonNegative, Positive, decode, field_error, read_result
from paceline.collectives.closed_form_cost import CLOSED_FORMS
from paceline.cost_model.collective_prediction import CheckedPrediction, PredictionError
from paceline.cost_model.cost_forms import OPS, CostForm
from paceline.cost_model.fit_measurements import MeasuredPoint
from paceline.cost_model.profile_entries import CallCost, Source
from paceline.cost_model.step_strategy import STRATEGIES, StepStrategy
from paceline.cost_model.step_time import StepTime
from paceline.errors import UsageError

__all__ = [
    "CollectiveMeasurement",
    "CollectiveTimes",
    "MeasuredStep",
    "load_measured_collectives",
    "load_measured_steps",
    "measured_by_strategy",
    "pair_with_measured",
    "pool_by_network",
    "step_prediction_error",
]

Count = Annotated[int, Meta(ge=1)]

_SMALL_NBYTES = 1024
_SCHEDULE = "schedule:"
_UNBUCKETED = ("naive", "flat", "overlap", "full-shard")


@dataclass(frozen=True)
class CollectiveTimes:
    """Times of one operation on one backend.

    Attributes:
        backend: such as ``"gloo"``, or ``"schedule:ring"`` for a schedule of Paceline's.
        op: such as ``"all-reduce"``.
        points: sizes, ranks and median times.
        wrong: number of rows left out because their result was wrong.
    """

    backend: str
    op: str
    points: tuple[MeasuredPoint, ...]
    wrong: int = 0

    @property
    def forms(self) -> Sequence[CostForm] | None:
        """Forms to choose from: those of the algorithm for a schedule of Paceline's, otherwise None for all."""
        name = self.backend.removeprefix(_SCHEDULE)
        if name == self.backend or (self.op, name) not in CLOSED_FORMS:
            return None
        return (CostForm(name), CostForm(name, shared=True))


@dataclass(frozen=True)
class CollectiveMeasurement:
    """Result of ``paceline bench collectives``.

    Attributes:
        command: that measured.
        network: between the ranks, such as ``"loopback"``.
        machine: facts that affect times.
        groups: by backend and operation, in the order of the file.
    """

    command: str
    network: str
    machine: dict[str, Any]
    groups: tuple[CollectiveTimes, ...]

    def calls(self, source: Source) -> list[CallCost]:
        """Return the costs of calls: the smallest size per operation and number of ranks, if it is at most 1 KiB."""
        found = []
        for group in self.groups:
            for ranks in sorted({point.ranks for point in group.points}):
                smallest = min((p for p in group.points if p.ranks == ranks), key=lambda point: point.nbytes)
                if smallest.nbytes <= _SMALL_NBYTES:
                    found.append(
                        CallCost(
                            backend=group.backend,
                            network=self.network,
                            op=group.op,
                            ranks=ranks,
                            nbytes=smallest.nbytes,
                            seconds=smallest.seconds,
                            source=source,
                        )
                    )
        return found


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A measured step: seconds of its parts, as ``paceline bench step`` divides them."""

    model: str
    ranks: int
    strategy: StepStrategy
    forward: float
    backward: float
    exposed: float
    optimizer: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _CollectiveRow:
    op: str
    backend: str
    nbytes: Count
    ranks: Count
    median_s: Positive
    dtype: str
    correct: bool


@dataclass(frozen=True)
class _CollectiveSettings:
    network: str


@dataclass(frozen=True)
class _CollectivesFile:
    command: str
    settings: _CollectiveSettings
    machine: dict[str, Any]
    rows: tuple[_CollectiveRow, ...]


@dataclass(frozen=True)
class _StrategyFields:
    strategy: str
    bucket_mib: NonNegative | str | None


@dataclass(frozen=True, kw_only=True)
class _StepFields:
    model: str
    ranks: Count
    forward_ms: NonNegative
    backward_ms: NonNegative
    exposed_ms: NonNegative
    optimizer_ms: NonNegative
    step_ms: Positive


@dataclass(frozen=True)
class _StepsFile:
    rows: tuple[dict[str, Any], ...]


def load_measured_collectives(path: str | Path) -> CollectiveMeasurement:
    """Read a result of ``paceline bench collectives``.

    A row counts if its result was right and two or more ranks took part. Of several types float32 counts, or else the
    first one: a type changes the additions, not the messages.

    Raises:
        UsageError: the file can't be read, is another kind of result, has a newer schema, or a field is missing or
            invalid.
    """
    where = Path(path).name
    record = read_result(
        path,
        "bench-collectives",
        1,
        what="measurement of collectives",
        remedy="name a file that paceline bench collectives wrote with --json",
    )
    file = decode(record, _CollectivesFile, where)
    of_key: dict[tuple[str, str], list[_CollectiveRow]] = {}
    for number, row in enumerate(file.rows):
        if row.op not in OPS:
            raise field_error(record, f".rows[{number}].op", f"expected one of {', '.join(OPS)}", where)
        of_key.setdefault((row.backend, row.op), []).append(row)
    groups = tuple(_group(*key, rows) for key, rows in of_key.items())
    return CollectiveMeasurement(file.command, file.settings.network, file.machine, groups)


def _group(backend: str, op: str, rows: Iterable[_CollectiveRow]) -> CollectiveTimes:
    rows = [row for row in rows if row.ranks > 1]
    dtypes = [row.dtype for row in rows]
    dtype = "float32" if "float32" in dtypes or not dtypes else dtypes[0]
    rows = [row for row in rows if row.dtype == dtype]
    points = tuple(MeasuredPoint(row.nbytes, row.ranks, row.median_s) for row in rows if row.correct)
    return CollectiveTimes(backend, op, points, len(rows) - len(points))


def pool_by_network(measurements: Iterable[CollectiveMeasurement]) -> list[CollectiveMeasurement]:
    """Join measurements of the same network, since one run may cover only one number of ranks.

    Commands are joined by "; "; facts of the machine are those of the first file.
    """
    of_network: dict[str, list[CollectiveMeasurement]] = {}
    for each in measurements:
        of_network.setdefault(each.network, []).append(each)
    return [_joined(network, several) for network, several in of_network.items()]


def _joined(network: str, several: Sequence[CollectiveMeasurement]) -> CollectiveMeasurement:
    of_key: dict[tuple[str, str], CollectiveTimes] = {}
    for group in (group for each in several for group in each.groups):
        before = of_key.get((group.backend, group.op), CollectiveTimes(group.backend, group.op, ()))
        of_key[group.backend, group.op] = replace(
            before, points=before.points + group.points, wrong=before.wrong + group.wrong
        )
    commands = dict.fromkeys(each.command for each in several)
    return CollectiveMeasurement("; ".join(commands), network, several[0].machine, tuple(of_key.values()))


def load_measured_steps(path: str | Path) -> list[MeasuredStep]:
    """Read the steps of a result of ``paceline bench step`` that can be predicted, in its order.

    Raises:
        UsageError: the file can't be read, is another kind of result, has a newer schema, or a field is missing or
            invalid.
    """
    where, steps = Path(path).name, []
    remedy = "name a file that paceline bench step wrote with --json"
    record = read_result(path, "bench-step", 1, what="measurement of steps", remedy=remedy)
    for number, row in enumerate(decode(record, _StepsFile, where).rows):
        place = f"{where}.rows[{number}]"
        strategy = _strategy_of(row, place)
        if strategy is None:
            continue
        own = decode(row, _StepFields, place)
        parts = {
            name: getattr(own, f"{name}_ms") / 1e3 for name in ("forward", "backward", "exposed", "optimizer")
        }
        steps.append(
            MeasuredStep(
                model=own.model, ranks=own.ranks, strategy=strategy, **parts, seconds=own.step_ms / 1e3
            )
        )
    return steps


def _strategy_of(row: dict[str, Any], where: str) -> StepStrategy | None:
    """Return the strategy of a row; None if it can't be predicted."""
    own = decode(row, _StrategyFields, where)
    if isinstance(own.bucket_mib, str) and own.bucket_mib != "inf":
        raise field_error(row, ".bucket_mib", 'expected MiB, "inf" or null', where)
    if own.strategy not in STRATEGIES or own.bucket_mib == 0:
        return None
    size = math.inf if isinstance(own.bucket_mib, str) else own.bucket_mib
    return StepStrategy(own.strategy, None if own.strategy in _UNBUCKETED else size)


def measured_by_strategy(
    measured: Iterable[MeasuredStep], model: str, ranks: int
) -> dict[StepStrategy, MeasuredStep]:
    """Return the measured steps of one model and number of ranks, by strategy.

    Raises:
        UsageError: there is none.
    """
    steps = list(measured)
    found = {each.strategy: each for each in steps if (each.model, each.ranks) == (model, ranks)}
    if not found:
        known = ", ".join(sorted({f"{each.model} with {each.ranks} ranks" for each in steps}))
        raise UsageError(
            f"no step of {model} with {ranks} ranks was measured", remedy=f"the file has: {known or 'none'}"
        )
    return found


def pair_with_measured(
    times: Iterable[StepTime], measured: dict[StepStrategy, MeasuredStep]
) -> list[tuple[StepTime, MeasuredStep]]:
    """Return the predicted steps that were measured too, each with its measurement."""
    return [(time, measured[time.strategy]) for time in times if time.strategy in measured]


def step_prediction_error(
    pairs: Iterable[tuple[StepTime, MeasuredStep]], ranks: int
) -> PredictionError | None:
    """Return the errors of predicted steps; None if there is nothing to compare."""
    return PredictionError.of(
        CheckedPrediction(round(time.nbytes), ranks, measured.seconds, time.seconds)
        for time, measured in pairs
    )
