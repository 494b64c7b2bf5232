"""What an envelope says about itself: plain values, packed by msgpack (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import msgpack

from paceline.errors import DamagedEnvelope, ForeignEnvelope, UsageError

__all__ = ["HEADER_LIMIT_NBYTES", "SCHEMA", "Header", "pack_header", "unpack_header"]

SCHEMA = 1
"""Version of the header's fields; an envelope of another one is foreign."""

HEADER_LIMIT_NBYTES = 16 << 10
"""A longer header is refused, by who sends and by who receives."""

_TEXT_LIMIT, _DIMENSIONS_LIMIT, _META_LIMIT = 200, 32, 64
_BIGGEST = 2**63 - 1
_PLAIN = (str, int, float, bool, type(None))
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True)
class Header:
    """What an envelope says about itself; nobody changes it (a frozen one would take four times as long to make).

    Attributes:
        run: names the run; envelopes of other runs are foreign.
        kind: what it is for, such as ``"frame"`` or ``"close"``.
        source, target: who sends and who is to receive: ranks, or numbers of workers.
        sequence: its number among all that this source sends to this target, from 0.
        round: which round of the exchange it belongs to.
        frame, frames: which of how many parts of a message; a message of one part is frame 0 of 1.
        offset: where its payload begins in the message, in bytes.
        total_nbytes: bytes of the whole message.
        dtype, shape: what the message is, in numpy's words; empty if it is just bytes.
        nbytes: bytes of the payload.
        checksum: xxh3-64 of the payload.
        meta: a few plain values more, of whoever uses the envelope: worker, base revision, samples, score, …
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
    meta: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)

    def __str__(self) -> str:
        """Return how messages call it, such as ``envelope 5 from 1 to 2 (frame 3 of 24, round 0)``."""
        of = f"frame {self.frame} of {self.frames}" if self.frames > 1 else self.kind
        return f"envelope {self.sequence} from {self.source} to {self.target} ({of}, round {self.round})"


_NAMES = tuple(each.name for each in fields(Header))
_WHOLE = ("sequence", "round", "frame", "frames", "offset", "total_nbytes", "nbytes", "checksum")


def pack_header(header: Header) -> bytes:
    """Return a header as bytes.

    Raises:
        UsageError: a field has no valid value, or the header is too long.
    """
    wrong = _problem(asdict(replace(header, meta={})) | {"meta": dict(header.meta)})
    if wrong:
        raise UsageError(f"{header} can't be sent: {wrong}")
    values = [getattr(header, name) for name in _NAMES]
    values[_NAMES.index("meta")] = dict(header.meta)
    packed = bytes(msgpack.packb([SCHEMA, *values], use_bin_type=True) or b"")
    if len(packed) > HEADER_LIMIT_NBYTES:
        raise UsageError(
            f"{header} can't be sent: its header has {len(packed)} bytes, more than {HEADER_LIMIT_NBYTES}",
            remedy="put long values into the payload; meta is for a few plain ones",
        )
    return packed


def unpack_header(data: bytes | memoryview) -> Header:
    """Return the header that `pack_header` packed, once its checksum is known to be right.

    Raises:
        ForeignEnvelope: it follows another schema.
        DamagedEnvelope: it is no header at all.
    """
    try:
        values = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise DamagedEnvelope(
            f"a header can't be read: {error or type(error).__name__}", part="header"
        ) from error
    if not isinstance(values, list) or not values:
        raise DamagedEnvelope("a header is no list of values", part="header")
    if values[0] != SCHEMA:
        raise ForeignEnvelope(
            f"an envelope follows schema {values[0]!r}, this program knows schema {SCHEMA}",
            remedy="run the same version of Paceline everywhere",
            part="header",
        )
    if len(values) != len(_NAMES) + 1:
        raise DamagedEnvelope(f"a header has {len(values) - 1} fields, not {len(_NAMES)}", part="header")
    named = dict(zip(_NAMES, values[1:], strict=True))
    if isinstance(named["shape"], list):
        named["shape"] = tuple(named["shape"])
    wrong = _problem(named)
    if wrong:
        raise DamagedEnvelope(f"a header makes no sense: {wrong}", part="header")
    return Header(**named)


def _problem(values: Mapping[str, Any]) -> str:
    """Return what is wrong with a header's values, empty if nothing is."""
    for name in ("run", "kind", "dtype"):
        if not isinstance(values[name], str) or len(values[name]) > _TEXT_LIMIT:
            return f"{name} is {values[name]!r:.80}, not a text of at most {_TEXT_LIMIT} characters"
    for name in ("source", "target", *_WHOLE):
        most = 2**64 - 1 if name == "checksum" else _BIGGEST
        if not _is_whole(values[name], most):
            return f"{name} is {values[name]!r:.80}, not a whole number from 0 to {most}"
    shape = values["shape"]
    if not isinstance(shape, tuple) or len(shape) > _DIMENSIONS_LIMIT:
        return f"shape is {shape!r:.80}, not at most {_DIMENSIONS_LIMIT} sizes"
    if not all(_is_whole(size, _BIGGEST) for size in shape):
        return f"shape is {shape!r:.80}, not sizes ≥ 0"
    if values["frame"] >= values["frames"]:
        return f"frame {values['frame']} of {values['frames']} frames"
    if values["frames"] > 1 and values["offset"] + values["nbytes"] > values["total_nbytes"]:
        return f"its payload ends at byte {values['offset'] + values['nbytes']} of {values['total_nbytes']}"
    return _meta_problem(values["meta"])


def _is_whole(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _meta_problem(meta: object) -> str:
    if not isinstance(meta, dict) or len(meta) > _META_LIMIT:
        return f"meta is no dictionary of at most {_META_LIMIT} values"
    for name, value in meta.items():
        if not isinstance(name, str) or not isinstance(value, _PLAIN):
            return f"meta[{name!r:.40}] is a {type(value).__name__}, not a text, number, True, False or None"
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return f"meta[{name!r:.40}] is {value}, which needs more than 64 bits"
    return ""
