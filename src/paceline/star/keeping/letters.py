"""A letter: what a worker offers of a fragment in a round, and the file in its outbox that holds it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import faults
from paceline.durable import write_whole
from paceline.errors import DamagedCheckpoint
from paceline.star.keeping.plain import packed
from paceline.star.keeping.records import CHECKSUM_NBYTES, HEAD_NBYTES, encode, head_of, values_of

__all__ = ["Letter", "Sender", "letter_path", "letter_paths", "read_letter", "write_letter"]

_NAME = re.compile(r"letter-(\d{6,})\.msg")


@dataclass(frozen=True)
class Letter:
    """What a worker offers of a fragment in a round: plain values, and a payload."""

    round: int
    fragment: int
    values: Mapping[str, Any]
    payload: bytes


@dataclass(frozen=True)
class Sender:
    """Whose letter it is: the run, empty if it was not known yet, and the worker's number."""

    run: str
    worker: int


def letter_path(folder: Path, fragment: int) -> Path:
    """Return where the letter of a fragment is."""
    return folder / f"letter-{fragment:06d}.msg"


def letter_paths(folder: Path) -> dict[int, Path]:
    """Return the letters in a folder, by fragment."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def write_letter(folder: Path, letter: Letter, sender: Sender) -> None:
    """Put a letter into a folder, whole and on the disk when this returns.

    Raises:
        UsageError: something in it can't be packed.
        OSError: it can't be written; what was there stays.
    """
    data = pack_letter(letter, sender)
    faults.writing(len(data))
    write_whole(letter_path(folder, letter.fragment), lambda beside: beside.write_bytes(data))


def pack_letter(letter: Letter, sender: Sender) -> bytes:
    """Return a letter as bytes: one record, as in a hub's journal.

    Raises:
        UsageError: something in it can't be packed.
    """
    about = {"run": sender.run, "worker": sender.worker, "round": letter.round, "fragment": letter.fragment}
    values = packed({**about, "values": dict(letter.values)})
    return b"".join(encode(letter.round, 0, values, letter.payload, seed=0))


def read_letter(path: Path) -> tuple[Letter, Sender]:
    """Return a letter, and whose it is.

    Raises:
        DamagedCheckpoint: it is not what was written, or can't be read.
    """
    try:
        data = path.read_bytes()
        head = head_of(data)
        if head.total_nbytes != len(data):
            raise DamagedCheckpoint(f"it has {len(data)} bytes, should have {head.total_nbytes}")
        front_nbytes = HEAD_NBYTES + head.size
        payload = data[front_nbytes:-CHECKSUM_NBYTES]
        about = values_of(data[:front_nbytes], payload, data[-CHECKSUM_NBYTES:], seed=0)
        return (
            Letter(about["round"], about["fragment"], about["values"], payload),
            Sender(about["run"], about["worker"]),
        )
    except (OSError, KeyError) as error:
        raise DamagedCheckpoint(f"it can't be read: {error!r}") from error
