"""Checked reading of JSON that somebody may have edited: every error names the field.

Reading what a measuring command wrote: its kind and schema are checked, the rest field by field.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

__all__ = ["Fields", "checked_result", "read_result"]

_REMEDY = "mend it, or make the file anew"


_LARGEST = sys.float_info.max


class Fields:
    """One JSON object, read field by field.

    Args:
        record: what the JSON holds.
        where: how errors name it, such as ``"profile.json: collectives[2]"``.

    Raises:
        UsageError: `record` is no object; and from each method: the field is missing or is not what it must be.

    Example:
        >>> Fields({"alpha": -1.0}, "line").number("alpha", least=0.0)
        Traceback (most recent call last):
        paceline.errors.UsageError: line.alpha is -1.0: a number of 0 or more must stand there
          → mend it, or make the file anew
    """

    def __init__(self, record: object, where: str) -> None:
        self._where = where
        if not isinstance(record, Mapping):
            raise UsageError(f"{where} is no object: {_short(record)}", remedy=_REMEDY)
        self._record: Mapping[str, Any] = record

    def text(self, name: str) -> str:
        """Return a text."""
        value = self._get(name)
        return value if isinstance(value, str) else self._wrong(name, "a text")

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._get(name)
        return value if isinstance(value, bool) else self._wrong(name, "true or false")

    def number(self, name: str, *, least: float = -math.inf) -> float:
        """Return a finite number of `least` or more."""
        value = self._get(name)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not max(least, -_LARGEST) <= value <= _LARGEST:  # NaN is in no range
            self._wrong(name, "a number" + (f" of {least:g} or more" if least > -math.inf else ""))
        return float(value)

    def number_or_none(self, name: str, *, least: float = -math.inf) -> float | None:
        """Return a finite number of `least` or more, or None for null."""
        return None if self._get(name) is None else self.number(name, least=least)

    def size_or_none(self, name: str) -> float | None:
        """Return a number of 0 or more, infinity for ``"inf"`` (JSON has none), or None for null."""
        return math.inf if self._get(name) == "inf" else self.number_or_none(name, least=0.0)

    def positive(self, name: str) -> float:
        """Return a finite number above 0."""
        return self.number(name) if self.number(name) > 0 else self._wrong(name, "a number above 0")

    def whole(self, name: str, *, least: int = 0) -> int:
        """Return a whole number of `least` or more."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._wrong(name, f"a whole number of {least} or more")
        return value

    def whole_numbers(self, name: str, *, least: int = 0) -> tuple[int, ...]:
        """Return a list of whole numbers of `least` or more, at least one."""
        values = self._list(name)
        if not values or any(isinstance(v, bool) or not isinstance(v, int) or v < least for v in values):
            self._wrong(name, f"a list of whole numbers of {least} or more")
        return tuple(values)

    def positives(self, name: str) -> tuple[float, ...]:
        """Return a list of finite numbers above 0, at least one."""
        values = self._list(name)
        real = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        if not values or not real or not all(0 < value <= _LARGEST for value in values):
            self._wrong(name, "a list of numbers above 0")
        return tuple(float(value) for value in values)

    def mapping(self, name: str) -> dict[str, Any]:
        """Return an object as it is."""
        value = self._get(name)
        return dict(value) if isinstance(value, Mapping) else self._wrong(name, "an object")

    def fields(self, name: str) -> Fields:
        """Return an object for reading its fields."""
        return Fields(self._get(name), f"{self._where}.{name}")

    def fields_or_none(self, name: str) -> Fields | None:
        """Return an object for reading its fields, or None for null."""
        return None if self._get(name) is None else self.fields(name)

    def rows(self, name: str, *, optional: bool = False) -> Iterator[Fields]:
        """Yield the objects of a list; none where it is missing and may be."""
        if optional and name not in self._record:
            return
        for at, row in enumerate(self._list(name)):
            yield Fields(row, f"{self._where}.{name}[{at}]")

    def wrong(self, name: str, expected: str) -> UsageError:
        """Return the error that says what must stand in the field instead."""
        return UsageError(
            f"{self._where}.{name} is {_short(self._get(name))}: {expected} must stand there", remedy=_REMEDY
        )

    def _wrong(self, name: str, expected: str) -> Any:
        raise self.wrong(name, expected)

    def _list(self, name: str) -> Sequence[Any]:
        value = self._get(name)
        return value if isinstance(value, list) else self._wrong(name, "a list")

    def _get(self, name: str) -> Any:
        if name not in self._record:
            raise UsageError(f"{self._where}.{name} is missing", remedy=_REMEDY)
        return self._record[name]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def read_result(path: str | Path, kind: str, schema: int, what: str, remedy: str) -> Fields:
    """Return the result in a file, for reading its fields.

    Args:
        path: the file.
        kind, schema, what, remedy: as for `checked_result`.

    Raises:
        UsageError: the file can't be read, is of another kind, or of a newer schema.
    """
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"can't read the {what} {str(path)!r}: {error.strerror}", remedy=remedy) from error
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is no JSON: {error}", remedy=remedy) from error
    return checked_result(record, Path(path).name, kind, schema, what, remedy)


def checked_result(record: object, where: str, kind: str, schema: int, what: str, remedy: str) -> Fields:
    """Return what a file's JSON holds, for reading its fields.

    Args:
        record: what the JSON holds. where: how errors name it, such as the file's name.
        kind: that it must have. schema: the newest that is understood.
        what: kind in words, for messages, such as ``"measurement of collectives"``. remedy: what to name instead.

    Raises:
        UsageError: it is of another kind, or of a newer schema.
    """
    top = Fields(record, where)
    if top.text("kind") != kind:
        raise UsageError(f"{where} is no {what}: its kind is {top.text('kind')!r}", remedy=remedy)
    if top.whole("schema", least=1) > schema:
        raise UsageError(
            f"{where} has schema {top.whole('schema')}; this version reads up to {schema}",
            remedy="upgrade paceline, or measure anew",
        )
    return top
