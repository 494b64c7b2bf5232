"""Envelope header: addressing, framing and checksum of one payload, packed with msgpack (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import msgpack

from paceline.errors import DamagedEnvelope, ForeignEnvelope, UsageError

__all__ = ["HEADER_LIMIT_NBYTES", "SCHEMA", "Header", "pack_header", "unpack_header"]

SCHEMA = 1
"""Version of the header's fields. Receivers refuse any other."""

HEADER_LIMIT_NBYTES = 16 << 10
"""Maximum size of a packed header, enforced by sender and receiver."""

_TEXT_LIMIT, _DIMENSIONS_LIMIT, _META_LIMIT = 200, 32, 64
_MAX_INT = 2**63 - 1
_PLAIN_TYPES = (str, int, float, bool, type(None))
_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True)
class Header:
    """Metadata of one envelope. Treat as immutable (a frozen dataclass takes four times as long to construct).

    Attributes:
        run: name of the run; receivers refuse envelopes of other runs.
        kind: purpose, such as ``"frame"`` or ``"close"``.
        source: rank or worker number of the sender.
        target: rank or worker number of the receiver.
        sequence: consecutive number per (source, target) pair, from 0.
        round: round of the exchange.
        frame: index of this frame within its message.
        frames: frames per message; 1 if the message is not split.
        offset: position of the payload in the message, in bytes.
        total_nbytes: size of the whole message.
        dtype: numpy dtype of the message; empty for plain bytes.
        shape: shape of the message; empty for plain bytes.
        nbytes: size of the payload.
        checksum: xxh3-64 of the payload.
        meta: a few further plain values of the application: worker, base revision, samples, score, …
    """

    run: str
    kind: str
    source: int
    target: int
    sequence: int
    round: int = 0
    frame: int = 0
    frames: int = 1
    offset: int = 0
    total_nbytes: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    checksum: int = 0
    meta: Mapping[str, Any] = field(default_factory=lambda: _EMPTY)

    def __str__(self) -> str:
        """Return a name for error messages: ``envelope 5 from 1 to 2 (frame 3 of 24, round 0)``."""
        part = f"frame {self.frame} of {self.frames}" if self.frames > 1 else self.kind
        return f"envelope {self.sequence} from {self.source} to {self.target} ({part}, round {self.round})"


_NAMES = tuple(each.name for each in fields(Header))  # meta is the last
_INTEGERS = tuple(each.name for each in fields(Header) if each.type == "int")


def pack_header(header: Header) -> bytes:
    """Serialise a header.

    Raises:
        UsageError: a field is invalid, or the result exceeds `HEADER_LIMIT_NBYTES`.
    """
    values = {name: getattr(header, name) for name in _NAMES} | {"meta": dict(header.meta)}
    problem = _problem(values)
    if problem:
        raise UsageError(f"{header} can't be sent: {problem}")
    packed = bytes(msgpack.packb([SCHEMA, *values.values()], use_bin_type=True) or b"")
    if len(packed) > HEADER_LIMIT_NBYTES:
        raise UsageError(
            f"{header} can't be sent: its header has {len(packed)} bytes, the limit is {HEADER_LIMIT_NBYTES}",
            remedy="move long values into the payload; meta is for a few plain values",
        )
    return packed


def unpack_header(data: bytes | memoryview) -> Header:
    """Deserialise the output of `pack_header`, whose checksum the caller has verified.

    Raises:
        ForeignEnvelope: the schema version differs.
        DamagedEnvelope: `data` is not a valid header.
    """
    try:
        values = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise _damaged(f"header can't be decoded: {error or type(error).__name__}") from error
    if not isinstance(values, list) or not values:
        raise _damaged("header is not a list of values")
    if values[0] != SCHEMA:
        raise ForeignEnvelope(
            f"envelope has schema {values[0]!r}, this program supports schema {SCHEMA}",
            remedy="run the same version of Paceline everywhere",
            part="header",
        )
    if len(values) != len(_NAMES) + 1:
        raise _damaged(f"header has {len(values) - 1} fields, expected {len(_NAMES)}")
    named = dict(zip(_NAMES, values[1:], strict=True))
    if isinstance(named["shape"], list):
        named["shape"] = tuple(named["shape"])
    problem = _problem(named)
    if problem:
        raise _damaged(f"header is invalid: {problem}")
    return Header(**named)


def _damaged(text: str) -> DamagedEnvelope:
    return DamagedEnvelope(text, part="header")


def _problem(values: Mapping[str, Any]) -> str:
    """Return the first invalid field and the rule it breaks; empty if all are valid."""
    for name in ("run", "kind", "dtype"):
        if not isinstance(values[name], str) or len(values[name]) > _TEXT_LIMIT:
            return f"{name} is {values[name]!r:.80}, not a string of at most {_TEXT_LIMIT} characters"
    for name in _INTEGERS:
        limit = 2**64 - 1 if name == "checksum" else _MAX_INT
        if not _is_integer(values[name], limit):
            return f"{name} is {values[name]!r:.80}, not an integer from 0 to {limit}"
    shape = values["shape"]
    if not isinstance(shape, tuple) or len(shape) > _DIMENSIONS_LIMIT:
        return f"shape is {shape!r:.80}, not at most {_DIMENSIONS_LIMIT} dimensions"
    if not all(_is_integer(size, _MAX_INT) for size in shape):
        return f"shape is {shape!r:.80}, not integers ≥ 0"
    if values["frame"] >= values["frames"]:
        return f"frame {values['frame']} of {values['frames']} frames"
    end = values["offset"] + values["nbytes"]
    if values["frames"] > 1 and end > values["total_nbytes"]:
        return f"the payload ends at byte {end} of {values['total_nbytes']}"
    return _meta_problem(values["meta"])


def _is_integer(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _meta_problem(meta: object) -> str:
    if not isinstance(meta, dict) or len(meta) > _META_LIMIT:
        return f"meta is not a dictionary of at most {_META_LIMIT} values"
    for name, value in meta.items():
        if not isinstance(name, str) or not isinstance(value, _PLAIN_TYPES):
            return (
                f"meta[{name!r:.40}] is a {type(value).__name__}, not a string, number, True, False or None"
            )
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return f"meta[{name!r:.40}] is {value}, which needs more than 64 bits"
    return ""
