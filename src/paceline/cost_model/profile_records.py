"""The entries of a profile as JSON objects, and back, checked field by field.

What a profile holds about training steps as JSON objects, and back, checked field by field.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.cost_model.algorithm_terms import USUAL, forms_by_name
from paceline.cost_model.collective_fit import CollectiveFit
from paceline.cost_model.fit_measurements import MeasuredPoint
from paceline.cost_model.json_fields import Fields
from paceline.cost_model.piecewise_fit import FitSegment, LineFit
from paceline.cost_model.prediction_error import PredictionError
from paceline.cost_model.profile_entries import (
    CALLERS,
    RATES,
    CallCost,
    CollectiveCost,
    Contention,
    ExchangeCost,
    ModelStep,
    Parameter,
    Rate,
    Source,
)

__all__ = [
    "call_from",
    "call_record",
    "collective_from",
    "collective_record",
    "contention_from",
    "contention_record",
    "exchange_from",
    "exchange_record",
    "model_from",
    "model_record",
    "rate_from",
    "rate_record",
    "source_from",
    "source_of",
]


def collective_record(cost: CollectiveCost, source: int) -> dict[str, Any]:
    """Return a collective's cost for JSON; `source` is its number in the file."""
    fit = cost.fit
    return {
        "backend": cost.backend,
        "op": fit.op,
        "network": cost.network,
        "algorithm": str(fit.form),
        "algorithm_told": fit.told,
        "ranks": list(fit.ranks),
        "points": fit.points,
        "segments": [_segment_record(segment) for segment in fit.segments],
        "segments_of_ranks": [
            {"ranks": ranks, "segments": [_segment_record(segment) for segment in segments]}
            for ranks, segments in fit.own.items()
        ],
        "sizes_error": None if fit.sizes_error is None else asdict(fit.sizes_error),
        "ranks_error": None if fit.ranks_error is None else asdict(fit.ranks_error),
        "error_of_algorithm": fit.error_of_form,
        "source": source,
    }


def collective_from(record: Fields, sources: Sequence[Source]) -> CollectiveCost:
    """Return the cost that `collective_record` wrote.

    Raises:
        UsageError: a field is missing or wrong.
    """
    op = record.text("op")
    if op not in USUAL:
        raise record.wrong("op", f"one of {', '.join(USUAL)}")
    forms, name = forms_by_name(op), record.text("algorithm")
    if name not in forms:
        raise record.wrong("algorithm", f"one of {'; '.join(forms)}")
    errors = record.fields("error_of_algorithm")
    fit = CollectiveFit(
        op=op,
        form=forms[name],
        told=record.flag("algorithm_told"),
        segments=_segments_from(record),
        ranks=tuple(sorted(record.whole_numbers("ranks", least=2))),
        points=record.whole("points", least=1),
        error_of_form={name: errors.number(name, least=0.0) for name in record.mapping("error_of_algorithm")},
        own={each.whole("ranks", least=2): _segments_from(each) for each in record.rows("segments_of_ranks")},
        sizes_error=_accuracy_from(record.fields_or_none("sizes_error")),
        ranks_error=_accuracy_from(record.fields_or_none("ranks_error")),
    )
    return CollectiveCost(record.text("backend"), record.text("network"), fit, source_of(record, sources))


def call_record(cost: CallCost, source: int) -> dict[str, Any]:
    """Return what a call costs for JSON."""
    return vars(cost) | {"source": source}


def call_from(record: Fields, sources: Sequence[Source]) -> CallCost:
    """Return the cost that `call_record` wrote.

    Raises:
        UsageError: a field is missing or wrong.
    """
    return CallCost(
        backend=record.text("backend"),
        network=record.text("network"),
        op=record.text("op"),
        ranks=record.whole("ranks", least=2),
        nbytes=record.whole("nbytes", least=1),
        seconds=record.positive("seconds"),
        source=source_of(record, sources),
    )


def rate_record(rate: Rate, source: int) -> dict[str, Any]:
    """Return a rate for JSON, with its unit."""
    return vars(rate) | {"unit": RATES[rate.kind], "source": source}


def rate_from(record: Fields, sources: Sequence[Source]) -> Rate:
    """Return the rate that `rate_record` wrote.

    Raises:
        UsageError: a field is missing or wrong.
    """
    if record.text("kind") not in RATES:
        raise record.wrong("kind", f"one of {', '.join(RATES)}")
    return Rate(
        kind=record.text("kind"),
        device=record.text("device"),
        dtype=record.text("dtype"),
        threads=record.whole("threads"),
        value=record.positive("value"),
        low=record.positive("low"),
        high=record.positive("high"),
        shape=record.text("shape"),
        source=source_of(record, sources),
    )


def source_from(record: Fields) -> Source:
    """Return how an entry was made.

    Raises:
        UsageError: a field is missing or wrong.
    """
    return Source(
        record.text("command"), record.text("date"), record.mapping("machine"), record.mapping("versions")
    )


def _segment_record(segment: FitSegment) -> dict[str, Any]:
    return {"low": segment.low, "high": segment.high, "points": segment.points} | asdict(segment.line)


def _segments_from(record: Fields) -> tuple[FitSegment, ...]:
    segments = tuple(_segment_from(each) for each in record.rows("segments"))
    ordered = all(one.high < other.low for one, other in itertools.pairwise(segments))
    if not segments or not ordered:
        raise record.wrong("segments", "one segment or more, in ascending order of size")
    return segments


def _segment_from(record: Fields) -> FitSegment:
    line = LineFit(
        alpha=record.number("alpha", least=0.0),
        beta=record.number("beta", least=0.0),
        loss=record.number("loss", least=0.0),
        alpha_error=record.number_or_none("alpha_error", least=0.0),
        beta_error=record.number_or_none("beta_error", least=0.0),
    )
    if line.alpha == line.beta == 0.0:
        raise record.wrong("beta", "a number above 0, as alpha is 0,")
    low, high = record.positive("low"), record.positive("high")
    if high < low:
        raise record.wrong("high", f"a size of {low:g} bytes or more")
    return FitSegment(low, high, record.whole("points", least=1), line)


def _accuracy_from(record: Fields | None) -> PredictionError | None:
    if record is None:
        return None
    median, mean, p90, most = (
        record.number(name, least=0.0) for name in ("median", "mean", "p90", "maximum")
    )
    return PredictionError(median, mean, p90, most, record.whole("points", least=1))


def source_of(record: Fields, sources: Sequence[Source]) -> Source:
    """Return the source that an entry names by its number.

    Raises:
        UsageError: there is none of that number.
    """
    at = record.whole("source")
    if at >= len(sources):
        raise record.wrong("source", f"the number of one of {len(sources)} sources, from 0,")
    return sources[at]


def exchange_record(cost: ExchangeCost, source: int) -> dict[str, Any]:
    """Return an exchange's cost for JSON: as a collective's, and its points; `source` is its number in the file."""
    plain = CollectiveCost(cost.backend, cost.network, cost.fit, cost.source)
    points = [[point.nbytes, point.ranks, point.seconds] for point in cost.points]
    return {
        "caller": cost.caller,
        "queued": cost.queued,
        **collective_record(plain, source),
        "measured": {
            "nbytes": [nbytes for nbytes, _, _ in points],
            "ranks": [ranks for _, ranks, _ in points],
            "seconds": [seconds for _, _, seconds in points],
        },
    }


def exchange_from(record: Fields, sources: Sequence[Source]) -> ExchangeCost:
    """Return the cost that `exchange_record` wrote.

    Raises:
        UsageError: a field is missing or wrong.
    """
    plain, measured = collective_from(record, sources), record.fields("measured")
    columns = (
        measured.whole_numbers("nbytes", least=1),
        measured.whole_numbers("ranks", least=2),
        measured.positives("seconds"),
    )
    if len({len(column) for column in columns}) != 1:
        raise measured.wrong("seconds", f"{len(columns[0])} numbers")
    return ExchangeCost(
        _caller(record),
        plain.backend,
        plain.network,
        record.flag("queued"),
        plain.fit,
        tuple(MeasuredPoint(*values) for values in zip(*columns, strict=True)),
        plain.source,
    )


def model_record(step: ModelStep, source: int) -> dict[str, Any]:
    """Return a model's step for JSON."""
    return vars(step) | {"parameters": [asdict(each) for each in step.parameters], "source": source}


def model_from(record: Fields, sources: Sequence[Source]) -> ModelStep:
    """Return the step that `model_record` wrote.

    Raises:
        UsageError: a field is missing or wrong.
    """
    parameters = tuple(_parameter_from(each) for each in record.rows("parameters"))
    ready = [each.seconds for each in parameters]
    buffered = record.positive("buffered")
    if not ready or ready != sorted(ready) or ready[-1] > buffered:
        raise record.wrong("parameters", "parameters in the order of their gradients, all within backward,")
    return ModelStep(
        model=record.text("model"),
        fingerprint=record.text("fingerprint"),
        batch=record.whole("batch", least=1),
        shape=record.text("shape"),
        device=record.text("device"),
        backend=record.text("backend"),
        ranks=record.whole("ranks", least=1),
        threads=record.whole("threads"),
        forward=record.positive("forward"),
        backward=record.positive("backward"),
        buffered=buffered,
        optimizer=record.positive("optimizer"),
        update_call=record.number("update_call", least=0.0),
        update_byte=record.number("update_byte", least=0.0),
        spread=record.number("spread", least=0.0),
        parameters=parameters,
        source=source_of(record, sources),
    )


def contention_record(cost: Contention, source: int) -> dict[str, Any]:
    """Return what computing and exchanges do to each other for JSON."""
    return vars(cost) | {"source": source}


def contention_from(record: Fields, sources: Sequence[Source]) -> Contention:
    """Return what `contention_record` wrote.

    Raises:
        UsageError: a field is missing or wrong.
    """
    return Contention(
        caller=_caller(record),
        backend=record.text("backend"),
        network=record.text("network"),
        op=record.text("op"),
        device=record.text("device"),
        ranks=record.whole("ranks", least=1),
        threads=record.whole("threads"),
        nbytes=record.whole("nbytes", least=1),
        launch_seconds=record.number("launch_seconds", least=0.0),
        computing_slows=record.number("computing_slows", least=1.0),
        calls_slow=record.number("calls_slow", least=1.0),
        source=source_of(record, sources),
    )


def _parameter_from(record: Fields) -> Parameter:
    return Parameter(
        record.text("name"),
        record.whole("nbytes"),
        record.number("seconds", least=0.0),
        record.text("kind"),
        record.whole("unit"),
    )


def _caller(record: Fields) -> str:
    if record.text("caller") not in CALLERS:
        raise record.wrong("caller", f"one of {', '.join(CALLERS)}")
    return record.text("caller")
