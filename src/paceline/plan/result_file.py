"""Reading what a measuring command wrote: its kind and schema are checked, the rest field by field."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.errors import UsageError
from paceline.plan.fields import Fields

__all__ = ["checked_result", "read_result"]


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
