"""Profile entries as the plain JSON values of ``profile.json``, and back; ``docs/profile.md`` describes the file.

The file differs from the entries in three places: a source is the number of an item of ``sources``, the fields of a fit
are fields of its collective, and the points of an exchange are columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from msgspec.structs import replace

from paceline._core.json_codec import Meta, Positive, Whole, decode, encode, field_error
from paceline.cost_model.collective_prediction import CollectiveFit
from paceline.cost_model.cost_forms import OPS, forms_by_name
from paceline.cost_model.fit_measurements import MeasuredPoint
from paceline.cost_model.profile_entries import (
    CALLERS,
    RATES,
    CallCost,
    CollectiveCost,
    Contention,
    ExchangeCost,
    ModelStep,
    ProfileEntry,
    Rate,
    Source,
)

__all__ = ["decode_entries", "encode_entries"]

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _ProfileLists:
    sources: tuple[Source, ...]
    collectives: tuple[Record, ...]
    calls: tuple[Record, ...]
    rates: tuple[Record, ...]
    exchanges: tuple[Record, ...] = ()
    models: tuple[Record, ...] = ()
    contentions: tuple[Record, ...] = ()


@dataclass(frozen=True)
class _SourceField:
    source: Whole


@dataclass(frozen=True)
class _CollectiveFields:
    backend: str
    network: str


@dataclass(frozen=True)
class _Columns:
    nbytes: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1)]
    ranks: tuple[Annotated[int, Meta(ge=2)], ...]
    seconds: tuple[Positive, ...]


@dataclass(frozen=True)
class _ExchangeFields:
    queued: bool
    measured: _Columns


def decode_entries(record: object, where: str) -> dict[str, tuple[Any, ...]]:
    """Return the entries of a profile by the name of their list.

    Args:
        record: the JSON of the whole file.
        where: name of the file, for errors.

    Raises:
        UsageError: a field is missing or invalid.
    """
    lists = decode(record, _ProfileLists, where)

    def entry(name: str, number: int, fields: Record) -> ProfileEntry:
        place = f"{where}.{name}[{number}]"
        return _DECODERS[name](fields, _source_of(fields, lists.sources, place), place)

    return {name: tuple(entry(name, *each) for each in enumerate(getattr(lists, name))) for name in _DECODERS}


def encode_entries(entries: Mapping[str, Iterable[Any]]) -> dict[str, list[Record]]:
    """Return the file's lists: ``sources``, each written once, and the entries with the numbers of theirs."""
    sources: list[Source] = []

    def number_of(source: Source) -> int:
        if source not in sources:
            sources.append(source)
        return sources.index(source)

    lists = {
        name: [_ENCODERS.get(name, _encode_entry)(each, number_of(each.source)) for each in entries[name]]
        for name in _DECODERS
    }
    return {"sources": [encode(source) for source in sources], **lists}


def _source_of(fields: Record, sources: Sequence[Source], where: str) -> Source:
    number = decode(fields, _SourceField, where).source
    if number >= len(sources):
        expected = f"expected the number of one of {len(sources)} sources, from 0"
        raise field_error(fields, ".source", expected, where)
    return sources[number]


def _check_choice(fields: Record, name: str, valid: Iterable[str], where: str) -> None:
    if name in fields and fields[name] not in tuple(valid):
        raise field_error(fields, f".{name}", f"expected one of {'; '.join(valid)}", where)


def _decode_entry(kind: type[Any], fields: Record, source: Source, where: str) -> Any:
    return decode({**fields, "source": encode(source)}, kind, where)


def _decode_rate(fields: Record, source: Source, where: str) -> Rate:
    _check_choice(fields, "kind", RATES, where)
    return _decode_entry(Rate, fields, source, where)


def _decode_contention(fields: Record, source: Source, where: str) -> Contention:
    _check_choice(fields, "caller", CALLERS, where)
    return _decode_entry(Contention, fields, source, where)


def _decode_model(fields: Record, source: Source, where: str) -> ModelStep:
    step = None if fields.get("parameters") == [] else _decode_entry(ModelStep, fields, source, where)
    ready = [each.seconds for each in step.parameters] if step is not None else []
    if step is None or ready != sorted(ready) or ready[-1] > step.buffered:
        expected = "expected parameters in the order in which gradients are ready, all within backward"
        raise field_error(fields, ".parameters", expected, where)
    return step


def _decode_collective(fields: Record, source: Source, where: str) -> CollectiveCost:
    _check_choice(fields, "op", OPS, where)
    fit = decode(fields, CollectiveFit, where)
    _check_choice(fields, "algorithm", forms_by_name(fit.op), where)
    own = decode(fields, _CollectiveFields, where)
    return CollectiveCost(own.backend, own.network, replace(fit, ranks=tuple(sorted(fit.ranks))), source)


def _decode_exchange(fields: Record, source: Source, where: str) -> ExchangeCost:
    _check_choice(fields, "caller", CALLERS, where)
    cost, own = _decode_collective(fields, source, where), decode(fields, _ExchangeFields, where)
    columns = list(vars(own.measured).values())
    if len({len(column) for column in columns}) != 1:
        raise field_error(fields, ".measured.seconds", f"expected {len(columns[0])} numbers", where)
    return ExchangeCost(
        fields["caller"],
        cost.backend,
        cost.network,
        own.queued,
        fit=cost.fit,
        points=tuple(MeasuredPoint(*values) for values in zip(*columns, strict=True)),
        source=source,
    )


def _encode_entry(entry: ProfileEntry, source: int) -> Record:
    return {**encode(entry), "source": source}


def _encode_rate(rate: Rate, source: int) -> Record:
    return {**_encode_entry(rate, source), "unit": RATES[rate.kind]}


def _encode_collective(cost: CollectiveCost | ExchangeCost, source: int) -> Record:
    head = {"backend": cost.backend, "op": cost.fit.op, "network": cost.network}
    return {**head, **encode(cost.fit), "source": source}


def _encode_exchange(cost: ExchangeCost, source: int) -> Record:
    columns = {name: [getattr(each, name) for each in cost.points] for name in ("nbytes", "ranks", "seconds")}
    head = {"caller": cost.caller, "queued": cost.queued}
    return {**head, **_encode_collective(cost, source), "measured": columns}


_DECODERS: dict[str, Callable[[Record, Source, str], Any]] = {
    "collectives": _decode_collective,
    "calls": partial(_decode_entry, CallCost),
    "rates": _decode_rate,
    "exchanges": _decode_exchange,
    "models": _decode_model,
    "contentions": _decode_contention,
}
_ENCODERS: dict[str, Callable[[Any, int], Record]] = {
    "collectives": _encode_collective,
    "rates": _encode_rate,
    "exchanges": _encode_exchange,
}
