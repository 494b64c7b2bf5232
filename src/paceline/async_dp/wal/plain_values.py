"""Plain values: texts, numbers, True, False, None, and lists and dictionaries of them (pure).

They go into a record packed by msgpack, and as a line of JSON into the ledger; either way the same comes back. JSON
here is Python's, which has ``NaN`` and ``Infinity``: a loss that is none must not end the hub that notes it.

A small file of plain values with its checksum, for people to read as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack
from xxhash import xxh3_64_hexdigest

from paceline._core.files import write_text
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.testing import fault_injection

__all__ = [
    "VALUES_LIMIT_NBYTES",
    "ledger_line",
    "pack_values",
    "read_checked_file",
    "to_json",
    "unpack_values",
    "write_checked_file",
]

VALUES_LIMIT_NBYTES = 64 << 10
"""Longer values are refused; what is long goes into the payload."""


_DEEPEST = 16


_AS_LINE = json.JSONEncoder(ensure_ascii=False)


def pack_values(values: Mapping[str, Any]) -> bytes:
    """Return values as bytes.

    Raises:
        UsageError: they are not plain, or too long, or one is called ``"n"``, as the ledger calls a record's number.

    Example:
        >>> unpacked(packed({"worker": 7, "loss": 2.5}))
        {'worker': 7, 'loss': 2.5}
    """
    check_plain(values, "a record")
    if "n" in values:
        raise UsageError(
            "a record can't have a value 'n': the ledger calls the record's number so",
            remedy="give it another name",
        )
    data = bytes(msgpack.packb(values if isinstance(values, dict) else dict(values)) or b"")
    if len(data) > VALUES_LIMIT_NBYTES:
        raise UsageError(
            f"the values of a record take {len(data)} bytes, more than {VALUES_LIMIT_NBYTES}",
            remedy="put what is long into the payload",
        )
    return data


def unpack_values(data: bytes) -> dict[str, Any]:
    """Return the values that `pack_values` packed, once their checksum is known to be right.

    Raises:
        DamagedCheckpoint: these are no values.
    """
    try:
        values = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise DamagedCheckpoint(f"values can't be read: {error or type(error).__name__}") from error
    if not isinstance(values, dict):
        raise DamagedCheckpoint(f"values are a {type(values).__name__}, not a dictionary")
    return values


def ledger_line(sequence: int, values: Mapping[str, Any]) -> bytes:
    """Return the ledger's line for a record, whose values are plain."""
    return _AS_LINE.encode({"n": sequence, **values}).encode() + b"\n"


def to_json(values: Mapping[str, Any], what: str) -> str:
    """Return values as JSON.

    Args:
        values: plain ones.
        what: they are, for messages, such as ``"facts of a run"``.

    Raises:
        UsageError: they are not plain.
    """
    check_plain(values, what)
    return json.dumps(dict(values), ensure_ascii=False)


def check_plain(values: Mapping[str, Any], what: str) -> None:
    """Raise a UsageError unless `values` are plain; `what` they are is told."""
    problem = _problem(dict(values), 0)
    if problem:
        raise UsageError(
            f"{what} can't hold {problem}",
            remedy="give texts, numbers, True, False, None, and lists and dictionaries of them",
        )


def _problem(value: object, depth: int) -> str:
    """Return what in `value` is not plain, empty if nothing is."""
    if value is None or isinstance(value, bool | float):
        return ""
    if isinstance(value, int):
        return "" if -(2**63) <= value < 2**64 else f"{value}, which needs more than 64 bits"
    if isinstance(value, str):
        return "" if value.isascii() or _encodes(value) else f"{value!r:.60}, which is no Unicode"
    if depth >= _DEEPEST:
        return f"values nested deeper than {_DEEPEST}"
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str) or not _encodes(name):
                return f"{name!r:.60} as a name"
            problem = _problem(inner, depth + 1)
            if problem:
                return f"{problem} (in {name!r:.60})" if depth == 0 else problem
        return ""
    if isinstance(value, list | tuple):
        return next((problem for each in value if (problem := _problem(each, depth + 1))), "")
    return f"a {type(value).__name__}"


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_FORMAT = 1


def write_checked_file(path: Path, values: Mapping[str, Any]) -> None:
    """Put plain values at `path`, whole and on the disk when this returns.

    Raises:
        UsageError: they are not plain.
        OSError: they can't be written; what was there stays.
    """
    body = json.loads(to_json(values, path.name))
    text = json.dumps({"format": _FORMAT, "xxh3": _sum_of(body), "values": body}, indent=1) + "\n"
    fault_injection.writing(len(text))
    write_text(path, text)


def read_checked_file(path: Path) -> dict[str, Any]:
    """Return the values at `path`.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedCheckpoint: it is not what was written, or can't be read.
        UsageError: a newer version of Paceline wrote it.
    """
    try:
        page = json.loads(path.read_bytes())
        version, told, values = page["format"], page["xxh3"], page["values"]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{str(path)!r} can't be read: {error!r:.200}") from error
    if not isinstance(values, dict) or told != _sum_of(values):
        raise DamagedCheckpoint(f"{str(path)!r} is not what was written: its checksum does not fit")
    if version != _FORMAT:
        raise UsageError(
            f"{str(path)!r} has format {version!r:.40}, this version of Paceline knows format {_FORMAT}",
            remedy="resume with the version that wrote it, or a newer one",
        )
    return values


def _sum_of(values: Any) -> str:
    return xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
