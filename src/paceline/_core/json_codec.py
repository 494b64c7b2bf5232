"""Decodes JSON to typed values and encodes them (msgspec); errors name the file and the field.

A type is a dataclass or any other that msgspec supports; bounds are part of it::

    @dataclass(frozen=True)
    class Line:
        alpha: NonNegative
        points: Annotated[int, Meta(ge=1)]

    decode({"alpha": -1.0, "points": 3}, Line, "profile.json")     # UsageError: profile.json.alpha is -1.0: …
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from paceline.errors import UsageError

__all__ = [
    "Finite",
    "Meta",
    "NonNegative",
    "Positive",
    "Whole",
    "check_result",
    "decode",
    "encode",
    "field_error",
    "read_result",
]

T = TypeVar("T")

_LARGEST = sys.float_info.max
Finite = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
"""A number; neither NaN nor infinite."""
NonNegative = Annotated[float, Meta(ge=0.0, le=_LARGEST)]
"""A finite number of 0 or more."""
Positive = Annotated[float, Meta(gt=0.0, le=_LARGEST)]
"""A finite number above 0."""
Whole = Annotated[int, Meta(ge=0)]
"""An integer of 0 or more."""

_REMEDY = "correct it, or make the file anew"


def encode(value: object) -> Any:
    """Return a value as plain dicts, lists, strings and numbers that ``json.dumps`` takes."""
    return msgspec.to_builtins(value)


def decode(record: object, kind: type[T], where: str) -> T:
    """Return `record` as a value of type `kind`; unknown fields are ignored.

    Args:
        record: a result of ``json.loads``.
        kind: the type, such as a dataclass with bounds (`Positive`, `Whole`, …).
        where: the file, or the place in it, for errors.

    Raises:
        UsageError: a field is missing, or its type or value is not valid; names it and shows its value. Errors that the
            type's ``__post_init__`` raises are passed on.
    """
    try:
        return msgspec.convert(record, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UsageError):
            raise error.__cause__ from None
        said, _, path = str(error).partition(" - at `$")
        path = path.rstrip("`")
        if said.startswith("Object missing required field"):
            missing = said.split("`")[1]
            raise UsageError(f"{where}{path}.{missing} is missing", remedy=_REMEDY) from None
        expected = "expected a finite number" if "e+308" in said else f"{said[0].lower()}{said[1:]}"
        raise field_error(record, path, expected, where) from None


def field_error(record: object, path: str, expected: str, where: str) -> UsageError:
    """Return the error for a field that is not valid.

    Args:
        record: the whole value.
        path: of the field, such as ``".collectives[2].alpha"``; empty: the whole value.
        expected: the valid values.
        where: the file.
    """
    value: Any = record
    for name, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", path):
        try:
            value = value[name] if name else value[int(index)]
        except (KeyError, IndexError, TypeError):
            break
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return UsageError(f"{where}{path} is {shown}: {expected}", remedy=_REMEDY)


def read_result(path: str | Path, kind: str, schema: int, *, what: str, remedy: str) -> dict[str, Any]:
    """Return the result that a measuring command wrote.

    Args:
        path: the file.
        kind: the required ``"kind"``.
        schema: the newest ``"schema"`` that can be read.
        what: description of the kind, for errors: ``"measurement of collectives"``.
        remedy: for errors.

    Raises:
        UsageError: it can't be read, is not JSON, is of another kind or of a newer schema.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"can't read the {what} {str(path)!r}: {error.strerror}", remedy=remedy) from error
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not JSON: {error}", remedy=remedy) from error
    return check_result(record, Path(path).name, kind, schema, what=what, remedy=remedy)


class _Head(msgspec.Struct):
    kind: str
    schema: Annotated[int, Meta(ge=1)]


def check_result(
    record: object, where: str, kind: str, schema: int, *, what: str, remedy: str
) -> dict[str, Any]:
    """Return `record` if its ``"kind"`` and ``"schema"`` are right; arguments and errors as in `read_result`."""
    try:
        head = decode(record, _Head, where)
    except UsageError as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{where} is no {what}: {reason}", remedy=remedy) from error
    if head.kind != kind:
        raise UsageError(f"{where} is no {what}: its kind is {head.kind!r}", remedy=remedy)
    if head.schema > schema:
        raise UsageError(
            f"{where} has schema {head.schema}; this version reads up to {schema}",
            remedy="upgrade paceline, or measure anew",
        )
    return dict(record)  # type: ignore[call-overload]
