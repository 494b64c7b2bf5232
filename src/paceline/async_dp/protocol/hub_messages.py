"""Messages between the hub and its workers (pure).

    worker → hub
      hello          joins: version, name, schedule; payload: the layout of its model
      update         a pseudo-gradient, and in how many seconds it wants global parameters; payload: a packed fragment
      fetch          requests the global parameters of a fragment
      parameters     its own parameters, answer to ``ask``; payload: a packed fragment
      score          score of its own parameters, or of the global parameters at a revision
      beat           heartbeat: steps, samples, speed, loss, current schedule
      bye            leaves
    hub → worker
      welcome        accepted: run, phase, which of how many workers it is
      later          no memory for an update now: send it again after the next ``later`` that says so
      refusal        rejected, and why
      standby        this hub is a standby: say hello to the active one
      who            unknown or expired session: say hello
      ack            an update was merged, or refused and why; the decision is on disk
      global_params  answer to ``fetch`` or ``update``, and acknowledges the latter; payload: a packed fragment of the
                     global parameters
      ask            requests the worker's parameters; its round is the number of the request
      adopt          parameters of another worker that replace its own; payload: a packed fragment
      together       all share the global parameters from now on; names the worker they were taken from
    hub ↔ hub        see `paceline.async_dp.standby`

A message that arrives twice does no harm: an update is identified by (worker, round, fragment), global parameters by
their revision, and the others state what holds at the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from paceline.transport.envelope import Bytes

__all__ = [
    "BULK_KINDS",
    "PROTOCOL_VERSION",
    "HubMessage",
    "Number",
    "UpdateHeader",
    "meta_count",
    "meta_number",
    "meta_text",
]

PROTOCOL_VERSION = 2
"""Hub and workers must have the same."""

BULK_KINDS = frozenset({"hello", "update", "parameters", "global_params", "adopt"})
"""Kinds with a payload; all others have none."""

Number = int | float

_NUMBER_TYPES = frozenset((int, float))
_EMPTY: Mapping[str, Any] = MappingProxyType({})
_TEXT_LIMIT = 200
_MOST = 2**53
"""Most samples or steps of an update: more can't be counted in a float."""


@dataclass(slots=True)
class HubMessage:
    """A message of any length, before it is split into frames."""

    kind: str
    source: int
    target: int
    round: int = 0  # of an update; for global parameters their revision
    fragment: int = 0
    meta: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)  # plain values
    payload: Bytes = b""
    dtype: str = ""  # codec of the payload


def meta_number(meta: Mapping[str, Any], name: str) -> Number | None:
    """Return the number under `name`; None if it is missing or of another type."""
    value = meta.get(name)
    return value if type(value) in _NUMBER_TYPES else None


def meta_count(meta: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Return the integer ≥ 0 under `name`; `default` if there is none."""
    value = meta_number(meta, name)
    return int(value) if value is not None and 0 <= value < 2**63 else default


def meta_text(meta: Mapping[str, Any], name: str) -> str:
    """Return the printable part of the text under `name`, at most 200 characters; empty if there is none."""
    value = meta.get(name)
    if not value or not isinstance(value, str):
        return ""
    return "".join(each for each in value[:_TEXT_LIMIT] if each.isprintable())


@dataclass(kw_only=True, slots=True)
class UpdateHeader:
    """Metadata of an update."""

    base: Number  # revision that it started from; NaN if missing, as the next two
    samples: Number
    steps: Number
    rate: Number | None = None  # the worker's samples per second
    score: Number | None = None  # of the worker's parameters
    before: Number | None = None  # score of the parameters at `base`

    @classmethod
    def parse(cls, meta: Mapping[str, Any]) -> UpdateHeader:
        """Return the header in `meta`, whatever that holds."""
        base, samples, steps = (
            meta_number(meta, "base"),
            meta_number(meta, "samples"),
            meta_number(meta, "steps"),
        )
        return cls(
            base=math.nan if base is None else base,
            samples=math.nan if samples is None else samples,
            steps=math.nan if steps is None else steps,
            rate=meta_number(meta, "rate"),
            score=meta_number(meta, "score"),
            before=meta_number(meta, "before"),
        )

    def is_plausible(self, revision: int) -> bool:
        """Return whether an update can have these values when the global parameters are at `revision`."""
        known = 0 <= self.base <= revision
        return known and 0 <= self.samples <= _MOST and 1 <= self.steps <= _MOST
