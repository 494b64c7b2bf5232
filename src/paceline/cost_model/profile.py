"""The measured profile: everything that planner, tuner and simulator know about machines and networks, in one file.

``docs/profile.md`` describes the file. A profile holds the entries of several runs, such as loopback, emulated networks
and NCCL; an entry that is measured again replaces the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from paceline._core.files import write_json
from paceline._core.json_codec import check_result, read_result
from paceline.cost_model.cost_forms import OPS
from paceline.cost_model.profile_diff import Difference, entry_differences
from paceline.cost_model.profile_entries import (
    CallCost,
    CollectiveCost,
    Contention,
    ExchangeCost,
    ModelStep,
    ProfileEntry,
    Rate,
)
from paceline.cost_model.profile_json import decode_entries, encode_entries
from paceline.errors import UsageError, unknown

__all__ = ["KIND", "SCHEMA", "Profile"]

KIND, SCHEMA = "paceline-profile", 1
_REMEDY = "name a file that paceline bench machine, bench fit or bench parts wrote with --profile"

C = TypeVar("C", CollectiveCost, ExchangeCost)
E = TypeVar("E", bound=ProfileEntry)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs and rates.

    Attributes:
        collectives: costs, at most one per backend, operation and network.
        calls: costs of calls that move next to nothing.
        rates: memory bandwidth and matrix rate of one machine.
        exchanges: costs of exchanges as training makes them.
        models: compute times of a model's step.
        contentions: how computing and exchanges slow each other down.

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
        """Read a profile from a file.

        Raises:
            UsageError: the file can't be read, is not a profile, has a newer schema, or a field is missing or invalid.
        """
        record = read_result(path, KIND, SCHEMA, what="profile", remedy=_REMEDY)
        return cls(**decode_entries(record, Path(path).name))

    @classmethod
    def from_json(cls, record: object) -> Profile:
        """Return the profile that `to_json` wrote.

        Raises:
            UsageError: as for `load`.
        """
        record = check_result(record, "profile", KIND, SCHEMA, what="profile", remedy=_REMEDY)
        return cls(**decode_entries(record, "profile"))

    def to_json(self) -> dict[str, Any]:
        """Return the profile for JSON; sources are numbered and written once each."""
        return {"kind": KIND, "schema": SCHEMA, **encode_entries(vars(self))}

    def save(self, path: str | Path) -> None:
        """Write the profile atomically.

        Raises:
            UsageError: it can't be written.
        """
        try:
            write_json(Path(path), self.to_json())
        except OSError as error:
            raise UsageError(
                f"can't write the profile {str(path)!r}: {error.strerror}", remedy="name another file"
            ) from error

    def with_entries(self, **entries: Iterable[ProfileEntry]) -> Profile:
        """Return the profile with more entries, by field name; each replaces the entry with the same key."""
        return replace(self, **{name: _merged(getattr(self, name), more) for name, more in entries.items()})

    def merged(self, other: Profile) -> Profile:
        """Return the profile with the entries of `other`, which win where both have one."""
        return self.with_entries(**vars(other))

    def compare(self, other: Profile) -> list[Difference]:
        """Return the differences in everything that both profiles measured."""
        found: list[Difference] = []
        for name in ("collectives", "calls", "rates", "exchanges"):
            theirs = {each.key: each for each in getattr(other, name)}
            for each in getattr(self, name):
                if each.key in theirs:
                    found += entry_differences(each, theirs[each.key])
        return found

    def collective(self, op: str, backend: str, network: str | None = None) -> CollectiveCost:
        """Return the cost of an operation.

        Args:
            op: such as ``"all-reduce"``.
            backend: such as ``"gloo"``.
            network: such as ``"loopback"``; may be left out where only one was measured.

        Raises:
            UsageError: it was not measured, or was measured on several networks and none is given.
        """
        if op not in OPS:
            raise unknown("operation", op, OPS)
        return _find_cost(self.collectives, op, backend, network)

    def exchange(self, op: str, backend: str, network: str | None = None) -> ExchangeCost:
        """Return the cost of an isolated exchange of Paceline's; arguments and errors as for `collective`."""
        isolated = [each for each in self.exchanges if each.caller == "paceline" and not each.queued]
        return _find_cost(isolated, op, backend, network)

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
        matching = [
            each
            for each in self.rates
            if (each.kind, each.dtype, each.device) == (kind, dtype, device)
            and threads in (None, each.threads)
        ]
        if not matching:
            known = "; ".join(f"{r.kind} {r.dtype} on {r.device}, {r.threads} threads" for r in self.rates)
            raise UsageError(
                f"the profile has no {kind} {dtype} on {device}"
                + (f", {threads} threads" if threads else ""),
                remedy=f"it has: {known}"
                if known
                else "measure it with paceline bench machine --profile FILE",
            )
        return max(matching, key=lambda rate: rate.value)


def _find_cost(costs: Sequence[C], op: str, backend: str, network: str | None) -> C:
    measured = [each for each in costs if (each.fit.op, each.backend) == (op, backend)]
    found = [each for each in measured if network in (None, each.network)]
    if len(found) == 1:
        return found[0]
    if found:
        networks = ", ".join(repr(each.network) for each in found)
        raise UsageError(
            f"{op} on {backend} was measured on several networks: {networks}", remedy="name one of them"
        )
    known = "; ".join(f"{each.fit.op} on {each.backend}, {each.network}" for each in costs)
    raise UsageError(
        f"the profile has no {op} on {backend}" + (f", network {network!r}" if network else ""),
        remedy=f"it has: {known}" if known else "measure with paceline bench collectives, then bench fit",
    )


def _merged(entries: tuple[E, ...], more: Iterable[E]) -> tuple[E, ...]:
    of_key = {each.key: each for each in entries}
    of_key.update((each.key, each) for each in more)
    return tuple(of_key.values())
