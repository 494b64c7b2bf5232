"""Measured steps beside predicted ones: what ``paceline bench step --json`` wrote, checked field by field."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.cost_model.json_fields import Fields, read_result
from paceline.cost_model.prediction_error import CheckedPrediction, PredictionError
from paceline.cost_model.step_strategy import STRATEGIES, StepStrategy
from paceline.cost_model.step_time import StepTime
from paceline.errors import UsageError

__all__ = ["KIND", "SCHEMA", "MeasuredStep", "accuracy_of", "beside", "load_measured", "ways_measured"]

KIND, SCHEMA = "bench-step", 1
_NO_SIZE = ("naive", "flat", "overlap", "full-shard")
_PARTS = ("forward", "backward", "exposed", "optimizer")
_REMEDY = "name a file that paceline bench step wrote with --json"


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was measured: seconds of its parts, as ``paceline bench step`` splits them."""

    model: str
    ranks: int
    way: StepStrategy
    forward: float
    backward: float
    exposed: float
    optimizer: float
    seconds: float


def load_measured(path: str | Path) -> list[MeasuredStep]:
    """Return the steps in a file that can be predicted, in its order.

    Raises:
        UsageError: the file can't be read, is no result of ``paceline bench step``, is of a newer schema, or a field is
            missing or wrong.
    """
    top, found = read_result(path, KIND, SCHEMA, "measurement of steps", _REMEDY), []
    for row in top.rows("rows"):
        way = _way(row)
        if way is not None:
            seconds = {part: row.number(f"{part}_ms", least=0.0) / 1e3 for part in _PARTS}
            whole = row.positive("step_ms") / 1e3
            model, ranks = row.text("model"), row.whole("ranks", least=1)
            found.append(MeasuredStep(model, ranks, way, **seconds, seconds=whole))
    return found


def ways_measured(
    measured: Iterable[MeasuredStep], model: str, ranks: int
) -> dict[StepStrategy, MeasuredStep]:
    """Return the measured steps of one model and number of ranks, by way.

    Raises:
        UsageError: there is none.
    """
    every = list(measured)
    found = {each.way: each for each in every if (each.model, each.ranks) == (model, ranks)}
    if not found:
        there = ", ".join(sorted({f"{each.model} with {each.ranks} ranks" for each in every}))
        raise UsageError(
            f"no step of {model} with {ranks} ranks was measured", remedy=f"the file has: {there or 'none'}"
        )
    return found


def beside(
    times: Iterable[StepTime], measured: dict[StepStrategy, MeasuredStep]
) -> list[tuple[StepTime, MeasuredStep]]:
    """Return the predicted steps that were measured too, each with its measurement."""
    return [(time, measured[time.way]) for time in times if time.way in measured]


def accuracy_of(pairs: Iterable[tuple[StepTime, MeasuredStep]], ranks: int) -> PredictionError | None:
    """Return how far predictions were from what was measured; None if there is nothing to compare."""
    return PredictionError.of(
        CheckedPrediction(round(time.nbytes), ranks, measured.seconds, time.seconds)
        for time, measured in pairs
    )


def _way(row: Fields) -> StepStrategy | None:
    """Return the way of a row; None if steps of it are not predicted."""
    strategy, size = row.text("strategy"), row.size_or_none("bucket_mib")
    if strategy not in STRATEGIES or size == 0:
        return None
    return StepStrategy(strategy, None if strategy in _NO_SIZE else size)
