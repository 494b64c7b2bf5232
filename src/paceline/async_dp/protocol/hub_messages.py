"""The messages between the hub of a star and its workers (pure).

    worker → hub
      hello        who I am, how I train; payload: the layout of my model
      update       what I learnt in a round; payload: a packed fragment
      fetch        send me the centre of this fragment
      parameters   what I was asked for: my parameters as they are; payload: a packed fragment
      score        how good my parameters, or the centre's at a revision, are
      beat         I am alive: steps, samples, speed, loss, how I train now
      bye          I leave
    hub → worker
      welcome      you are in: run, phase, which of how many you are
      refusal      you are not, and why
      who          I don't know you (any more): say hello
      ack          an update was taken in, or refused, and why; it is on disk
      centre       what was fetched; payload: a packed fragment
      ask          send me your parameters
      adopt        take what follows for your own: another's parameters; payload: a packed fragment
      together     all share a centre from now on, and whose parameters it began from

All are harmless when they come twice: an update is known by (worker, round, fragment), a centre by its revision, and
the rest says what is so at the time.

What a worker tells of an update, beside its numbers (pure).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from paceline.transport.envelope import Bytes

__all__ = ["BULK_KINDS", "PROTOCOL_VERSION", "HubMessage", "Number", "UpdateHeader", "meta_number", "meta_text", "meta_count"]

PROTOCOL_VERSION = 1
"""Of this set of messages; hub and workers must have the same."""


BULK_KINDS = frozenset({"hello", "update", "parameters", "centre", "adopt"})
"""Messages whose payload may be long; all others have none."""


_NOTHING: Mapping[str, Any] = MappingProxyType({})


Number = int | float


_NUMBERS = frozenset((int, float))


@dataclass(slots=True)
class HubMessage:
    """What is said, of any length.

    Attributes:
        kind: see above. source, target: numbers of worker or hub. round: of an update; of a centre its revision.
        fragment: of the model.
        meta: plain values. payload: bytes. dtype: how the payload is packed.
    """

    kind: str
    source: int
    target: int
    round: int = 0
    fragment: int = 0
    meta: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    payload: Bytes = b""
    dtype: str = ""


def meta_number(meta: Mapping[str, Any], name: str) -> Number | None:
    """Return a number that was told, None if none was, whatever else was told there."""
    value = meta.get(name)
    return value if type(value) in _NUMBERS else None


def meta_count(meta: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Return a whole number ≥ 0 that was told, `default` if none was."""
    value = meta_number(meta, name)
    return int(value) if value is not None and 0 <= value < 2**63 else default


def meta_text(meta: Mapping[str, Any], name: str) -> str:
    """Return a text that was told, at most 200 characters that can be printed; empty if none was."""
    value = meta.get(name)
    if not value or not isinstance(value, str):
        return ""
    return "".join(each for each in value[:200] if each.isprintable())


@dataclass(slots=True)
class UpdateHeader:
    """An update's facts.

    Attributes:
        base: revision that it began from. samples, steps: that it was learnt from; NaN if that was not told.
        rate: samples a second of its worker. score: of its parameters. before: of what it began from.
    """

    base: Number
    samples: float
    steps: Number
    rate: Number | None = None
    score: Number | None = None
    before: Number | None = None

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> UpdateHeader:
        """Return what was told, whatever that is."""
        base, samples, steps = meta_number(meta, "base"), meta_number(meta, "samples"), meta_number(meta, "steps")
        return cls(
            math.nan if base is None else base,
            math.nan if samples is None else samples,
            math.nan if steps is None else steps,
            meta_number(meta, "rate"),
            meta_number(meta, "score"),
            meta_number(meta, "before"),
        )

    def makes_sense(self, revision: int) -> bool:
        """Tell whether it can be, of a centre at this revision."""
        known = 0 <= self.base <= revision
        return known and 0 <= self.samples < math.inf and 1 <= self.steps < math.inf
