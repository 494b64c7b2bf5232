"""What a profile holds about training steps as JSON objects, and back, checked field by field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.plan.entries import CollectiveCost, Source
from paceline.plan.fields import Fields
from paceline.plan.fitting import Point
from paceline.plan.records import collective_from, collective_record, source_of
from paceline.plan.step_entries import CALLERS, Contention, ExchangeCost, ModelStep, Parameter

__all__ = [
    "contention_from",
    "contention_record",
    "exchange_from",
    "exchange_record",
    "model_from",
    "model_record",
]


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
        tuple(Point(*values) for values in zip(*columns, strict=True)),
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
