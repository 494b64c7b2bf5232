"""Trace of a rank: one JSON object per line, one file per rank, at no cost while none is open.

    trace_file.open(run / "trace" / f"rank{rank}.jsonl", rank)
    started = time.perf_counter()
    loss = model(x)
    trace_file.add("forward", started, time.perf_counter() - started, step=7)
    trace_file.mark("checkpoint", step=7)
    trace_file.close()

A line reads ``{"name": "forward", "start": 1760000000.123456, "seconds": 0.0042, "rank": 0, "step": 7}``. ``start`` is
in unix seconds, so that ranks of one machine share a time line; it is ``time.perf_counter()`` plus one offset taken
when the file is opened, so it never jumps within a file.

Each line is a single ``write`` to a file in append mode, without a buffer. So a process that is killed loses nothing,
threads never mix their lines, and a forked child, which starts with the trace closed, has nothing of its parent's to
flush.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import os
import time
from io import FileIO
from pathlib import Path

from paceline.errors import UsageError

__all__ = ["add", "close", "mark", "open", "renumber"]

_OWN_FIELDS = frozenset({"name", "start", "seconds", "rank"})


class _Writer:
    """An open trace file."""

    __slots__ = ("_file", "_offset", "rank")

    def __init__(self, file: FileIO, rank: int) -> None:
        self._file, self.rank = file, rank
        self._offset = time.time() - time.perf_counter()

    def write(self, name: str, start: float, seconds: float, fields: dict[str, object]) -> None:
        if not _OWN_FIELDS.isdisjoint(fields):
            taken = ", ".join(sorted(_OWN_FIELDS & fields.keys()))
            raise UsageError(f"trace of {name!r}: a field can't be called {taken}", remedy="rename the field")
        record = {
            "name": name,
            "start": round(start + self._offset, 6),
            "seconds": round(seconds, 9),
            "rank": self.rank,
            **fields,
        }
        self._file.write(_line(record))

    def close(self) -> None:
        self._file.close()


_writer: _Writer | None = None


def open(path: str | os.PathLike[str], rank: int, *, append: bool = False) -> None:
    """Start to write this process's trace to `path`; a trace that is already open is closed first.

    Args:
        path: the file; its folder is created if need be.
        rank: written to every line.
        append: keep the file's content (of a run that resumes) instead of starting over.

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


def renumber(rank: int) -> None:
    """Write `rank` to every line from now on: this process has another place in the world."""
    if _writer is not None:
        _writer.rank = rank


def mark(name: str, **fields: object) -> None:
    """Write an event that happens now, with ``seconds`` 0."""
    if _writer is not None:
        _writer.write(name, time.perf_counter(), 0.0, fields)


def add(name: str, start: float, seconds: float, **fields: object) -> None:
    """Write a span of time.

    Args:
        name: of the span.
        start: when it began, a value of ``time.perf_counter()`` of this process.
        seconds: its duration.
        fields: further JSON values.
    """
    if _writer is not None:
        _writer.write(name, start, seconds, fields)


def _line(record: dict[str, object]) -> bytes:
    """Return `record` as a line of strict JSON; NaN and infinities, which JSON lacks, become null."""
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


@functools.cache
def _register_once() -> None:
    atexit.register(close)
    os.register_at_fork(after_in_child=close)  # two processes must not both write for one rank
