"""Recovery of a hub's folder: the newest intact snapshot, and the end of the records that follow it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.async_dp.wal.decision_ledger import LedgerStatus
from paceline.async_dp.wal.hub_folder import HubFolder
from paceline.async_dp.wal.hub_snapshot import HubSnapshot, read_snapshot
from paceline.async_dp.wal.journal_file import JournalReader, JournalRecord
from paceline.async_dp.wal.journal_records import JOURNAL_HEADER_NBYTES, JournalHeader
from paceline.errors import DamagedCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "JournalEnd",
    "RecoveredState",
    "RecoveryBase",
    "find_base",
    "find_end",
    "journals_since",
    "records_between",
]

log = logging.getLogger("paceline.async_dp")


@dataclass(frozen=True)
class RecoveredState:
    """State from which a hub continues.

    Attributes:
        revision: of the snapshot; 0 without one.
        facts: of the snapshot.
        tensors: of the snapshot; None without one.
        records: values and payload of each later record, in order; to be read before the next snapshot.
    """

    revision: int
    facts: Mapping[str, Any]
    tensors: dict[str, Tensor] | None
    records: Iterator[tuple[dict[str, Any], bytes]]


@dataclass(frozen=True)
class RecoveryBase:
    """The snapshot from which recovery starts."""

    path: Path | None = None  # None: there is no snapshot
    snapshot: HubSnapshot = field(default_factory=lambda: HubSnapshot(0, 0, {}))
    tensors: dict[str, Tensor] | None = None
    damaged: tuple[Path, ...] = ()  # newer snapshots


@dataclass(frozen=True)
class JournalEnd:
    """End of the records."""

    path: Path | None  # last journal; None: there is none
    header: JournalHeader
    nbytes: int  # end of its last record; the rest was torn off
    next: int  # number of the next record


def find_base(folder: HubFolder) -> RecoveryBase:
    """Return the newest intact snapshot.

    Raises:
        DamagedCheckpoint: none of the snapshots is intact.
        UsageError: the newest was written by a newer version of Paceline.
    """
    damaged: dict[Path, DamagedCheckpoint] = {}
    for path in folder.snapshots().values():
        try:
            snapshot, tensors = read_snapshot(path)
        except DamagedCheckpoint as error:
            damaged[path] = error
        else:
            for newer, error in damaged.items():
                log.warning("skipped %s, which is damaged: %s", newer, error)
            return RecoveryBase(path, snapshot, tensors, tuple(damaged))
    if damaged:
        raise DamagedCheckpoint(
            f"none of the {len(damaged)} snapshots in {str(folder.path)!r} is intact: "
            + "; ".join(str(error) for error in damaged.values()),
            remedy="restore one from a copy",
        )
    return RecoveryBase()


def journals_since(folder: HubFolder, first: int) -> list[Path]:
    """Return the journals with the records from number `first` on, in order.

    Raises:
        DamagedCheckpoint: there are none, or the beginning of one is damaged.
    """
    paths: list[Path] = []
    begins = 0
    for path in folder.journals().values():
        with JournalReader(path) as reader:
            begins = reader.header.first
        paths.insert(0, path)
        if begins <= first:
            return paths
    if not paths and not first:
        return []
    raise DamagedCheckpoint(
        f"{str(folder.path)!r} has no journal with record {first}"
        + (f": the existing ones start with record {begins}" if paths else ""),
        remedy="restore it from a copy",
    )


def records_between(paths: Sequence[Path], first: int, stop: int) -> Iterator[JournalRecord]:
    """Yield the records `first` … `stop` − 1 of consecutive journals, which are known to hold them."""
    for path in paths:
        with JournalReader(path) as reader:
            for record in reader.records() if reader.header.first < stop else ():
                if record.sequence >= first:
                    yield record
                if record.sequence + 1 >= stop:
                    return


def find_end(paths: Sequence[Path], ledger: LedgerStatus) -> JournalEnd:
    """Read consecutive journals, and return the end of their records.

    Args:
        paths: the journals, in order.
        ledger: a witness of what was on disk, see [Note: torn or damaged] in `journal_file`.

    Raises:
        DamagedCheckpoint: a record that had been on disk is damaged or missing; names file and place.
    """
    path, header, at, next = None, JournalHeader(0, 0, 0), 0, 0
    for index, path in enumerate(paths):
        is_last = index == len(paths) - 1
        with JournalReader(path) as reader:
            if index and reader.header.first != next:
                reason = f"the next journal starts with record {reader.header.first}"
                raise _damage(paths[index - 1], at, next, reason)
            header, at, next = reader.header, JOURNAL_HEADER_NBYTES, reader.header.first
            try:
                for record in reader.records():
                    at, next = record.stop, record.sequence + 1
            except DamagedCheckpoint as error:
                durable = max(reader.durable_after(at), ledger.highest + 1)
                if durable > next or not is_last:
                    raise _damage(path, at, next, str(error)) from error
                log.warning(
                    "%s: cut off %d bytes from byte %d on, which were never acknowledged: %s",
                    path, reader.nbytes - at, at, error,
                )  # fmt: skip
    if path is None and ledger.highest >= 0:
        raise DamagedCheckpoint(
            "the ledger has lines, but there is no journal", remedy="restore it from a copy"
        )
    if path is not None and ledger.highest >= next:
        raise _damage(path, at, next, f"it ends there, and the ledger has records up to {ledger.highest}")
    return JournalEnd(path, header, at, next)


def _damage(path: Path, at: int, next: int, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{str(path)!r} is damaged at byte {at}, where record {next} begins: {reason}",
        remedy="restore it from a copy; or, to lose all records from there on: "
        f"truncate -s {at} {str(path)!r}, remove the journals after it, and the lines from "
        f'"n": {next} on in {str(path.with_name("ledger.jsonl"))!r}',
    )
