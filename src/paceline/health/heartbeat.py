"""Messages between the watchdogs of all ranks: heartbeats several times per second, notices of single events.

A message is a 4-byte length, a JSON object, and once both ends are authenticated a code of 16 bytes. A malformed
message or a wrong code closes its connection. A heartbeat replaces the previous one of its rank.

    | length: 4 | {"row": […]}  or  {"note": {…}}  or  {"ack": […]} … | code: 16 |
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import struct
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, get_args

from paceline._core.json_codec import Finite, Meta, decode
from paceline.errors import UsageError

__all__ = [
    "LARGEST_NBYTES",
    "NOTICE_KINDS",
    "TAG_NBYTES",
    "FailureNotice",
    "FrameParser",
    "Heartbeat",
    "MalformedFrame",
    "clip_text",
    "encode_frame",
    "frame_tag",
]

LARGEST_NBYTES = 128 << 10
"""Limit for one message."""

TAG_NBYTES = 16
"""Of the code that authenticates a frame: half of an HMAC-SHA256 (RFC 2104, section 5)."""

_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_TEXT_LENGTH = 16_000  # characters; at most six bytes each as JSON
_LARGEST_INT = (1 << 62) - 1

T = TypeVar("T")
Integer = Annotated[int, Meta(ge=-_LARGEST_INT, le=_LARGEST_INT)]
Name = Annotated[str, Meta(max_length=40)]
NoticeKind = Literal["raised", "thread", "gone", "done", "leaves", "stack", "verdict"]

NOTICE_KINDS: tuple[NoticeKind, ...] = get_args(NoticeKind)
"""An exception in the training thread, one in another thread, the end of the process, the end of the training loop,
exit because of another rank, a stack, an attribution that all ranks are to share."""


class MalformedFrame(ValueError):
    """Received bytes are not a valid message."""


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank.

    Attributes:
        rank: the sender.
        sequence: number of this heartbeat.
        step, phase, task, bucket, waiting: as in `paceline._core.step_state`.
        age: seconds since one of these changed.
        still: seconds for which the Python stack of the training thread has not changed.
        rounds, busy_seconds, sees_waiting: as in `paceline._core.step_state`.
        stopped: ranks of the same host whose processes are stopped.
    """

    rank: Integer
    sequence: Integer
    _: KW_ONLY
    step: Integer = 0
    phase: Name = "outside"
    task: Name = ""
    bucket: Integer = -1
    waiting: bool = False
    age: Finite = 0.0
    still: Finite = 0.0
    rounds: Integer = 0
    busy_seconds: Finite = 0.0
    sees_waiting: bool = True
    stopped: tuple[Integer, ...] = ()

    def message(self) -> dict[str, Any]:
        """Return this heartbeat as a message, its times to a hundredth of a millisecond."""
        values = [getattr(self, name) for name in _HEARTBEAT_FIELDS]
        return {"row": [round(value, 5) if isinstance(value, float) else value for value in values]}

    @classmethod
    def parse(cls, values: object, ranks: int) -> Heartbeat:
        """Return the heartbeat in a message from a world of `ranks` ranks.

        Raises:
            MalformedFrame: a field is missing or invalid.
        """
        if not isinstance(values, list) or len(values) != len(_HEARTBEAT_FIELDS):
            raise MalformedFrame(f"a heartbeat is a list of {len(_HEARTBEAT_FIELDS)} values")
        found = _decode(dict(zip(_HEARTBEAT_FIELDS, values, strict=True)), cls)
        _check_ranks((found.rank, *found.stopped), ranks)
        if found.age >= 0.0 and found.still >= 0.0 and found.busy_seconds >= 0.0:
            return found
        return dataclasses.replace(
            found,
            age=max(0.0, found.age),
            still=max(0.0, found.still),
            busy_seconds=max(0.0, found.busy_seconds),
        )


@dataclass(frozen=True)
class FailureNotice:
    """An event on a rank.

    Attributes:
        kind: one of `NOTICE_KINDS`.
        rank: where it happened; −1: on no single rank.
        by: the rank that reported it.
        ago: seconds since it happened.
        name: of the exception or attribution.
        text: message and traceback, or a stack.
        code: exit code of the process; −n: ended by signal n; None: unknown.
        step, phase, bucket: state of the rank at that time.
        others: ranks with the same failure.
        sequence: number of the latest heartbeat of the rank before it; orders its stacks.
    """

    kind: NoticeKind
    rank: Integer
    by: Integer
    ago: Finite = 0.0
    _: KW_ONLY
    name: Annotated[str, Meta(max_length=200)] = ""
    text: Annotated[str, Meta(max_length=LARGEST_NBYTES)] = ""
    code: Integer | None = None
    step: Integer = 0
    phase: Name = ""
    bucket: Integer = -1
    others: tuple[Integer, ...] = ()
    sequence: Integer = 0

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity: a rank reports each kind of event of another rank once; a later stack replaces one before."""
        return self.kind, str(self.rank), str(self.by)

    def message(self) -> dict[str, Any]:
        """Return this notice as a message."""
        return {"note": {name: getattr(self, name) for name in _NOTICE_FIELDS}}

    @classmethod
    def parse(cls, values: object, ranks: int) -> FailureNotice:
        """Return the notice in a message from a world of `ranks` ranks.

        Raises:
            MalformedFrame: a field is missing, unknown or invalid.
        """
        if not isinstance(values, dict) or set(values) != set(_NOTICE_FIELDS):
            raise MalformedFrame(f"a notice has the fields {', '.join(_NOTICE_FIELDS)}")
        found = _decode(values, cls)
        _check_ranks((found.by, *found.others, *([found.rank] if found.rank != -1 else [])), ranks)
        return dataclasses.replace(found, ago=max(0.0, found.ago))


_HEARTBEAT_FIELDS = tuple(field.name for field in fields(Heartbeat))
_NOTICE_FIELDS = tuple(field.name for field in fields(FailureNotice))


def _decode(values: object, kind: type[T]) -> T:
    try:
        return decode(values, kind, kind.__name__)
    except UsageError as error:
        raise MalformedFrame(str(error).partition("\n")[0]) from None


def _check_ranks(found: tuple[int, ...], ranks: int) -> None:
    for rank in found:
        if not 0 <= rank < ranks:
            raise MalformedFrame(f"rank {rank} of {ranks}")


def encode_frame(message: dict[str, Any]) -> bytes:
    """Return `message` as the bytes to send."""
    data = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(data) <= LARGEST_NBYTES, "texts are clipped"
    return _LENGTH.pack(len(data)) + data


def clip_text(text: str, limit: int = _TEXT_LENGTH) -> str:
    """Return `text` without characters that UTF-8 lacks, and without its middle where it exceeds `limit`."""
    text = text.encode(errors="replace").decode()
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head]}\n… {len(text) - limit} characters left out …\n{text[head - limit :]}"


def frame_tag(key: bytes, number: int, frame: bytes) -> bytes:
    """Return the code of the frame with this number in one direction of a connection, counted from 0."""
    return hmac.digest(key, _NUMBER.pack(number) + frame, "sha256")[:TAG_NBYTES]


class FrameParser:
    """Splits the bytes of a connection into messages.

    Args:
        largest: bytes of one message.
        key: of the codes that follow the frames; empty: there are none yet.
        rest: first bytes, which were received with earlier ones.
    """

    def __init__(self, largest: int = LARGEST_NBYTES, key: bytes = b"", rest: bytes = b"") -> None:
        self._largest, self._key, self._received = largest, key, 0
        self._buffer = bytearray(rest)

    def with_key(self, key: bytes) -> FrameParser:
        """Return the parser of the frames after those of this one, which have codes."""
        return FrameParser(key=key, rest=bytes(self._buffer))

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Append `data`, and yield the messages that are complete.

        Raises:
            MalformedFrame: the bytes are not a valid message.
        """
        self._buffer += data
        tag_nbytes = TAG_NBYTES if self._key else 0
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._largest:
                raise MalformedFrame(f"a message of {length} bytes; the limit is {self._largest}")
            end = _LENGTH.size + length
            if len(self._buffer) < end + tag_nbytes:
                return
            frame, tag = bytes(self._buffer[:end]), bytes(self._buffer[end : end + tag_nbytes])
            del self._buffer[: end + tag_nbytes]
            if self._key and not hmac.compare_digest(frame_tag(self._key, self._received, frame), tag):
                raise MalformedFrame("a wrong code: altered, repeated or sent by a stranger")
            self._received += 1
            try:
                message = json.loads(frame[_LENGTH.size :])
            except (ValueError, RecursionError) as error:
                raise MalformedFrame(f"no JSON: {error}") from None
            if not isinstance(message, dict):
                raise MalformedFrame("no JSON object")
            yield message
