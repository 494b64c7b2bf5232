"""The measured profile: what planner, tuner and simulator know about machines and networks, in one file.

``docs/profile.md`` describes the file. A profile holds entries of several runs side by side, such as loopback, the
lab and NCCL; an entry that is measured again takes the place of the old one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline._core.files import write_json
from paceline.cost_model.algorithm_terms import OPS
from paceline.cost_model.json_fields import Fields, checked_result, read_result
from paceline.cost_model.profile_diff import (
    Difference,
    collective_differences,
    exchange_differences,
    other_differences,
)
from paceline.cost_model.profile_entries import (
    CallCost,
    CollectiveCost,
    Contention,
    ExchangeCost,
    ModelStep,
    Rate,
    Source,
)
from paceline.cost_model.profile_records import (
    call_from,
    call_record,
    collective_from,
    collective_record,
    contention_from,
    contention_record,
    exchange_from,
    exchange_record,
    model_from,
    model_record,
    rate_from,
    rate_record,
    source_from,
)
from paceline.errors import UsageError, unknown

__all__ = ["KIND", "SCHEMA", "Profile"]

KIND, SCHEMA = "paceline-profile", 1
_REMEDY = "name a file that paceline bench machine, bench fit or bench parts wrote with --profile"


class _Entry(Protocol):
    @property
    def key(self) -> tuple[Any, ...]: ...


E = TypeVar("E", bound=_Entry)


@dataclass(frozen=True)
class Profile:
    """Everything that was measured.

    Attributes:
        collectives: costs, at most one for each backend, operation and network.
        calls: what calls cost that move next to nothing.
        rates: memory bandwidth and matrix rate of one machine.
        exchanges: costs of exchanges as a training makes them.
        models: what the computing of a model's step takes.
        contentions: what computing and exchanges do to each other.

    Example:
        >>> Profile().collectives
        ()
    """

    collectives: tuple[CollectiveCost, ...] = ()
    calls: tuple[CallCost, ...] = ()
    rates: tuple[Rate, ...] = ()
    exchanges: tuple[ExchangeCost, ...] = ()
    models: tuple[ModelStep, ...] = ()
    contentions: tuple[Contention, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Return the profile in a file.

        Raises:
            UsageError: the file can't be read, is no profile, is of a newer schema, or a field is missing or wrong.
        """
        return cls._read(read_result(path, KIND, SCHEMA, "profile", _REMEDY))

    @classmethod
    def from_json(cls, record: object) -> Profile:
        """Return the profile that `to_json` wrote.

        Raises:
            UsageError: as for `load`.
        """
        return cls._read(checked_result(record, "profile", KIND, SCHEMA, "profile", _REMEDY))

    @classmethod
    def _read(cls, top: Fields) -> Profile:
        sources = [source_from(each) for each in top.rows("sources")]
        return cls(
            tuple(collective_from(each, sources) for each in top.rows("collectives")),
            tuple(call_from(each, sources) for each in top.rows("calls")),
            tuple(rate_from(each, sources) for each in top.rows("rates")),
            tuple(exchange_from(each, sources) for each in top.rows("exchanges", optional=True)),
            tuple(model_from(each, sources) for each in top.rows("models", optional=True)),
            tuple(contention_from(each, sources) for each in top.rows("contentions", optional=True)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the profile for JSON; sources are numbered, each written once."""
        sources: list[Source] = []

        def number(source: Source) -> int:
            if source not in sources:
                sources.append(source)
            return sources.index(source)

        lists = {
            "collectives": [collective_record(each, number(each.source)) for each in self.collectives],
            "calls": [call_record(each, number(each.source)) for each in self.calls],
            "rates": [rate_record(each, number(each.source)) for each in self.rates],
            "exchanges": [exchange_record(each, number(each.source)) for each in self.exchanges],
            "models": [model_record(each, number(each.source)) for each in self.models],
            "contentions": [contention_record(each, number(each.source)) for each in self.contentions],
        }
        told = [dict(vars(source)) for source in sources]
        return {"kind": KIND, "schema": SCHEMA, "sources": told, **lists}

    def save(self, path: str | Path) -> None:
        """Write the profile; the file is whole at every instant, old or new.

        Raises:
            UsageError: it can't be written.
        """
        try:
            write_json(Path(path), self.to_json())
        except OSError as error:
            raise UsageError(
                f"can't write the profile {str(path)!r}: {error.strerror}", remedy="name another file"
            ) from error

    def with_entries(
        self,
        collectives: Iterable[CollectiveCost] = (),
        calls: Iterable[CallCost] = (),
        rates: Iterable[Rate] = (),
        exchanges: Iterable[ExchangeCost] = (),
        models: Iterable[ModelStep] = (),
        contentions: Iterable[Contention] = (),
    ) -> Profile:
        """Return the profile with these entries too; one of the same key takes the place of the old one."""
        return Profile(
            _merged(self.collectives, collectives),
            _merged(self.calls, calls),
            _merged(self.rates, rates),
            _merged(self.exchanges, exchanges),
            _merged(self.models, models),
            _merged(self.contentions, contentions),
        )

    def merged(self, other: Profile) -> Profile:
        """Return the profile with the entries of `other`, which win where both have one."""
        return self.with_entries(**vars(other))

    def compare(self, other: Profile) -> list[Difference]:
        """Return what both profiles measured, side by side; see `paceline.cost_model.profile_diff`."""
        return [
            *collective_differences(self.collectives, other.collectives),
            *other_differences(self.calls, other.calls),
            *other_differences(self.rates, other.rates),
            *exchange_differences(self.exchanges, other.exchanges),
        ]

    def collective(self, op: str, backend: str, network: str | None = None) -> CollectiveCost:
        """Return the cost of an operation.

        Args:
            op: such as ``"all-reduce"``.
            backend: such as ``"gloo"``.
            network: such as ``"loopback"``; may be left out where only one was measured.

        Raises:
            UsageError: it was not measured, or on several networks and none is named.
        """
        if op not in OPS:
            raise unknown("operation", op, OPS)
        of = [each for each in self.collectives if (each.fit.op, each.backend) == (op, backend)]
        return _only(of, f"{op} on {backend}", network, self._collectives_there())

    def exchange(self, op: str, backend: str, network: str | None = None) -> ExchangeCost:
        """Return the cost of an exchange of Paceline's that is alone; arguments and errors as for `collective`."""
        ours = [each for each in self.exchanges if each.caller == "paceline" and not each.queued]
        of = [each for each in ours if (each.fit.op, each.backend) == (op, backend)]
        there = "; ".join(f"{each.fit.op} on {each.backend}, {each.network}" for each in ours)
        return _only(of, f"{op} on {backend}", network, there)

    def call(self, op: str, backend: str, ranks: int, network: str | None = None) -> CallCost:
        """Return what a call costs; arguments and errors as for `collective`."""
        of = [each for each in self.calls if (each.op, each.backend, each.ranks) == (op, backend, ranks)]
        there = "; ".join(f"{each.op} on {each.backend}, {each.ranks} ranks" for each in self.calls)
        return _only(of, f"a call of {op} on {backend} by {ranks} ranks", network, there)

    def rate(
        self, kind: str, *, dtype: str = "float32", device: str = "cpu", threads: int | None = None
    ) -> Rate:
        """Return a rate of the machine.

        Args:
            kind: ``"copy"``, ``"add"`` or ``"matmul"``.
            dtype: such as ``"bfloat16"``.
            device: ``"cpu"``, or a GPU's name.
            threads: of the CPU; by default the fastest number that was measured.

        Raises:
            UsageError: it was not measured.
        """
        of = [
            each
            for each in self.rates
            if (each.kind, each.dtype, each.device) == (kind, dtype, device)
            and threads in (None, each.threads)
        ]
        if not of:
            there = "; ".join(f"{r.kind} {r.dtype} on {r.device}, {r.threads} threads" for r in self.rates)
            raise UsageError(
                f"the profile has no {kind} {dtype} on {device}"
                + (f", {threads} threads" if threads else ""),
                remedy=f"it has: {there}"
                if there
                else "measure it with paceline bench machine --profile FILE",
            )
        return max(of, key=lambda rate: rate.value)

    def _collectives_there(self) -> str:
        return "; ".join(f"{each.fit.op} on {each.backend}, {each.network}" for each in self.collectives)


N = TypeVar("N", CollectiveCost, CallCost, ExchangeCost)


def _only(of: list[N], what: str, network: str | None, there: str) -> N:
    """Return the one entry that is meant."""
    found = [each for each in of if network in (None, each.network)]
    if len(found) == 1:
        return found[0]
    if found:
        networks = ", ".join(repr(each.network) for each in found)
        raise UsageError(f"{what} was measured on several networks: {networks}", remedy="name one of them")
    raise UsageError(
        f"the profile has no {what}" + (f", network {network!r}" if network else ""),
        remedy=f"it has: {there}" if there else "measure with paceline bench collectives, then bench fit",
    )


def _merged(own: tuple[E, ...], more: Iterable[E]) -> tuple[E, ...]:
    of_key = {each.key: each for each in own}
    of_key.update((each.key, each) for each in more)
    return tuple(of_key.values())
