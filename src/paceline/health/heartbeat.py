"""What the watchers of ranks tell each other: rows several times a second, notices when something happened.

A message is four bytes of length and a JSON object: nothing that comes in can do more than be wrong, and what is wrong
is refused with its connection. A row replaces the one before of its rank; a notice is passed on once by everybody, so
that all have it even where a connection is missing.

    | length: 4 | {"row": […]}  or  {"note": {…}}  or  {"ack": […]}  or  {"hello": {…}} |
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

__all__ = [
    "KINDS",
    "LARGEST_NBYTES",
    "FailureNotice",
    "FrameParser",
    "Heartbeat",
    "MalformedFrame",
    "clipped",
    "pack",
]

LARGEST_NBYTES = 128 << 10
"""Of one message."""

_LENGTH = struct.Struct(">I")
_TEXT_LENGTH = 16_000  # six bytes each at most
_MOST_RANKS = 1 << 20

KINDS = ("raised", "thread", "gone", "done", "leaves", "stack", "verdict")
"""What a notice may tell of a rank: its exception, that of another thread of it, the end of its process, the end of its
loop, that it ends because of somebody else, where it stands, or a verdict on it that all shall share."""


class MalformedFrame(ValueError):
    """What came is no message of ours."""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank is doing.

    Attributes:
        rank, sequence: who tells, and how often it has told.
        step, phase, task, bucket, waiting: as in `paceline._core.step_state`.
        age: seconds since that changed.
        still: seconds for which its Python stack has been the same.
        rounds, busy_seconds, sees_waiting: as there.
        stopped: ranks of its host whose process is stopped.
    """

    rank: int
    sequence: int
    step: int = 0
    phase: str = "outside"
    task: str = ""
    bucket: int = -1
    waiting: bool = False
    age: float = 0.0
    still: float = 0.0
    rounds: int = 0
    busy_seconds: float = 0.0
    sees_waiting: bool = True
    stopped: tuple[int, ...] = ()

    def message(self) -> dict[str, Any]:
        """Return this row as a message."""
        return {"row": [getattr(self, name) for name in _ROW]}

    @classmethod
    def of(cls, values: object, ranks: int) -> Heartbeat:
        """Return the row that a message holds.

        Raises:
            Malformed: it is none of a world of `ranks` ranks.
        """
        if not isinstance(values, list) or len(values) != len(_ROW):
            raise MalformedFrame("a row of another length")
        found = dict(zip(_ROW, values, strict=True))
        if not isinstance(found["stopped"], list):
            raise MalformedFrame("stopped ranks that are no list")
        found["stopped"] = tuple(_rank(each, ranks) for each in found["stopped"])
        _rank(found["rank"], ranks)
        for name in ("sequence", "step", "bucket", "rounds"):
            _whole(name, found[name])
        for name in ("age", "still", "busy_seconds"):
            found[name] = _real(name, found[name])
        for name in ("waiting", "sees_waiting"):
            if not isinstance(found[name], bool):
                raise MalformedFrame(f"{name}={found[name]!r}")
        for name in ("phase", "task"):
            found[name] = _text(name, found[name], 40)
        return cls(**found)


@dataclass(frozen=True)
class FailureNotice:
    """Something that happened to a rank.

    Attributes:
        kind: one of `KINDS`.
        rank: to which.
        by: who tells.
        ago: seconds since it happened.
        name: of the exception, or of what the verdict is.
        text: what to say of it: message and traceback, or where the rank stands.
        code: exit code of its process; −n: ended by signal n; None: not known.
        step, phase, bucket: where it was.
        others: ranks that share its fate.
    """

    kind: str
    rank: int
    by: int
    ago: float = 0.0
    name: str = ""
    text: str = ""
    code: int | None = None
    step: int = 0
    phase: str = ""
    bucket: int = -1
    others: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """What tells notices apart: a rank tells each kind of thing about another once; stacks, each once."""
        return self.kind, str(self.rank), str(self.by), self.name if self.kind == "stack" else ""

    def message(self) -> dict[str, Any]:
        """Return this notice as a message."""
        return {"note": asdict(self)}

    @classmethod
    def of(cls, found: object, ranks: int) -> FailureNotice:
        """Return the notice that a message holds.

        Raises:
            Malformed: it is none of a world of `ranks` ranks.
        """
        if not isinstance(found, dict) or set(found) != _NOTICE:
            raise MalformedFrame("a notice with other fields")
        if found["kind"] not in KINDS:
            raise MalformedFrame(f"a notice of kind {found['kind']!r}"[:80])
        _rank(found["by"], ranks)
        if found["rank"] != -1:  # of no single rank
            _rank(found["rank"], ranks)
        for name in ("step", "bucket"):
            _whole(name, found[name])
        if found["code"] is not None:
            _whole("code", found["code"])
        if not isinstance(found["others"], list):
            raise MalformedFrame("others that are no list")
        return cls(
            **found
            | {
                "ago": _real("ago", found["ago"]),
                "name": _text("name", found["name"], 200),
                "text": _text("text", found["text"], LARGEST_NBYTES),
                "phase": _text("phase", found["phase"], 40),
                "others": tuple(_rank(each, ranks) for each in found["others"]),
            }
        )


_ROW = tuple(field.name for field in fields(Heartbeat))
_NOTICE = {field.name for field in fields(FailureNotice)}


def pack(message: dict[str, Any]) -> bytes:
    """Return `message` as bytes to send."""
    data = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(data) <= LARGEST_NBYTES, "texts are clipped"
    return _LENGTH.pack(len(data)) + data


def clipped(text: str, most: int = _TEXT_LENGTH) -> str:
    """Return `text` without its middle where it is longer than `most`, and without what can't be encoded."""
    text = text.encode(errors="replace").decode()
    if len(text) <= most:
        return text
    return f"{text[: most // 4]}\n… {len(text) - most} characters left out …\n{text[-(most - most // 4) :]}"


class FrameParser:
    """Turns the bytes of a connection into messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Take bytes in, and yield the messages that are complete.

        Raises:
            Malformed: what came is no message.
        """
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > LARGEST_NBYTES:
                raise MalformedFrame(f"a message of {length} bytes")
            if len(self._data) < _LENGTH.size + length:
                return
            body = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
            del self._data[: _LENGTH.size + length]
            try:
                message = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise MalformedFrame(f"no JSON: {error}") from None
            if not isinstance(message, dict):
                raise MalformedFrame("no object")
            yield message


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 62:
        raise MalformedFrame(f"{name}={value!r}"[:80])
    return value


def _rank(value: object, ranks: int) -> int:
    if not 0 <= _whole("rank", value) < min(ranks, _MOST_RANKS):
        raise MalformedFrame(f"rank {value!r}"[:80])
    return value  # pyright: ignore[reportReturnType] — it was checked


def _real(name: str, value: object) -> float:
    if isinstance(value, int):
        return max(0.0, float(_whole(name, value)))
    if not isinstance(value, float) or not math.isfinite(value):
        raise MalformedFrame(f"{name}={value!r}"[:80])
    return max(0.0, value)


def _text(name: str, value: object, most: int) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise MalformedFrame(f"{name} is no text of up to {most} characters")
    return value
