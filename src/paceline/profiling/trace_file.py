"""What a rank did and when: one JSON object per line, one file per rank, free when closed.

    trace.open(run / "trace" / f"rank{rank}.jsonl", rank)
    with trace.span("forward", step=7):
        loss = model(x)
    trace.mark("checkpoint", step=7)
    trace.close()

A line reads ``{"name": "forward", "start": 1760000000.123456, "seconds": 0.0042, "rank": 0, "step": 7}``.
``start`` is in unix seconds, so that ranks of one machine share a time line; it is ``time.perf_counter()``
plus one offset taken when the file is opened, so that it never jumps within a file.

While nothing is open, `span` returns one shared object that does nothing, and `mark` and `add` return at
once. While a file is open, each line is a single ``write`` to a file in append mode: nothing waits in a
buffer, so a process that is killed loses nothing, threads never mix their lines, and a forked child has
nothing of its parent's to flush. The child itself starts with the trace closed.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import time
from contextlib import AbstractContextManager, nullcontext
from io import FileIO
from pathlib import Path
from types import TracebackType

from paceline.errors import UsageError

__all__ = ["add", "close", "is_open", "mark", "open", "span"]

_OWN_FIELDS = frozenset({"name", "start", "seconds", "rank"})
_NOTHING: AbstractContextManager[None] = nullcontext()


class _Writer:
    """One open trace file."""

    __slots__ = ("_file", "_offset", "_rank")

    def __init__(self, file: FileIO, rank: int) -> None:
        self._file, self._rank = file, rank
        self._offset = time.time() - time.perf_counter()

    def write(self, name: str, start: float, seconds: float, fields: dict[str, object]) -> None:
        """Write one line; `start` is a value of ``time.perf_counter()``."""
        if not _OWN_FIELDS.isdisjoint(fields):
            taken = ", ".join(sorted(_OWN_FIELDS & fields.keys()))
            raise UsageError(f"trace of {name!r}: a field can't be called {taken}", remedy="rename the field")
        record = {
            "name": name,
            "start": round(start + self._offset, 6),
            "seconds": round(seconds, 9),
            "rank": self._rank,
            **fields,
        }
        self._file.write(_line(record))

    def close(self) -> None:
        self._file.close()


class _Span:
    """A span that is running; it is written when it ends, also by an exception."""

    __slots__ = ("_fields", "_name", "_start")

    def __init__(self, name: str, fields: dict[str, object]) -> None:
        self._name, self._fields = name, fields

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._start
        if kind is not None:
            self._fields["error"] = kind.__name__
        if _writer is not None:
            _writer.write(self._name, self._start, seconds, self._fields)


_writer: _Writer | None = None


def open(path: str | os.PathLike[str], rank: int, *, append: bool = False) -> None:
    """Start to write this process's trace to `path`; a trace that is open already is closed first.

    Args:
        path: the file; its folder is made if need be.
        rank: the rank that every line carries.
        append: keep what the file holds (a run that resumes), rather than start anew.

    Raises:
        UsageError: the file can't be written.
    """
    global _writer
    close()
    where = Path(path)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        if not append:
            where.unlink(missing_ok=True)
        file = FileIO(where, "a")
    except OSError as error:
        raise UsageError(
            f"can't write the trace to {where}: {error.strerror}",
            remedy="name a folder that you may write to",
        ) from error
    if file.tell():
        file.write(b"\n")  # ends a line that a killed run left half written; readers skip empty lines
    _writer = _Writer(file, rank)
    _register_once()


def close() -> None:
    """End the trace; closing twice is no error."""
    global _writer
    if _writer is not None:
        _writer.close()
        _writer = None


def is_open() -> bool:
    """Return whether spans are being written."""
    return _writer is not None


def span(name: str, **fields: object) -> AbstractContextManager[None]:
    """Return a context manager that writes how long its block took.

    A block that raises is written too, with the field ``error`` holding the exception's class name.

    Args:
        name: what happens in the block.
        fields: whatever helps to read the trace; values that JSON can hold.
    """
    return _NOTHING if _writer is None else _Span(name, fields)


def mark(name: str, **fields: object) -> None:
    """Write that something happened now, with ``seconds`` 0."""
    if _writer is not None:
        _writer.write(name, time.perf_counter(), 0.0, fields)


def add(name: str, start: float, seconds: float, **fields: object) -> None:
    """Write a span that was measured elsewhere.

    Args:
        name: what happened.
        start: when it began, a value of ``time.perf_counter()`` of this process.
        seconds: how long it took.
        fields: as for `span`.
    """
    if _writer is not None:
        _writer.write(name, start, seconds, fields)


def _line(record: dict[str, object]) -> bytes:
    """Return `record` as one line of strict JSON: NaN and infinities, which JSON can't say, become null."""
    try:
        try:
            text = json.dumps(record, allow_nan=False)
        except ValueError:
            text = json.dumps(_finite(record), allow_nan=False)
    except TypeError as error:
        raise UsageError(
            f"trace of {record['name']!r}: {error}",
            remedy="give numbers, strings, booleans, None, lists or dicts",
        ) from error
    return text.encode() + b"\n"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _forget() -> None:
    """Drop the parent's file in a forked child: two processes must not both speak for one rank."""
    close()


@functools.cache
def _register_once() -> None:
    atexit.register(close)
    os.register_at_fork(after_in_child=_forget)
