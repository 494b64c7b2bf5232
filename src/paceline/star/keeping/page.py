"""A small file of plain values with its checksum, for people to read as well."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from paceline import faults
from paceline.durable import write_text
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.star.keeping.plain import text_of

__all__ = ["read_page", "write_page"]

_FORMAT = 1


def write_page(path: Path, values: Mapping[str, Any]) -> None:
    """Put plain values at `path`, whole and on the disk when this returns.

    Raises:
        UsageError: they are not plain.
        OSError: they can't be written; what was there stays.
    """
    body = json.loads(text_of(values, path.name))
    text = json.dumps({"format": _FORMAT, "xxh3": _sum_of(body), "values": body}, indent=1) + "\n"
    faults.writing(len(text))
    write_text(path, text)


def read_page(path: Path) -> dict[str, Any]:
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
