"""What a hub finds in its folder: the newest intact snapshot, and where the records that follow it end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
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

__all__ = ["RecoveryBase", "JournalEnd", "RecoveredState", "find_end", "find_base", "journals_since", "records_between"]

log = logging.getLogger("paceline.async_dp")


@dataclass(frozen=True)
class RecoveredState:
    """What a hub goes on from.

    Attributes:
        revision: of the snapshot; 0 where there is none.
        facts: of the snapshot.
        tensors: of the snapshot; None where there is none.
        records: values and payload of each record after it, in order; to be read before the next snapshot.
    """

    revision: int
    facts: Mapping[str, Any]
    tensors: dict[str, Tensor] | None
    records: Iterator[tuple[dict[str, Any], bytes]]


@dataclass(frozen=True)
class RecoveryBase:
    """Where recovery begins.

    Attributes:
        path: of the snapshot; None: there is none yet.
        snapshot: what it says; without one, revision 0 and the first record.
        tensors: of it; None: there is none.
        passed_over: newer snapshots that are not intact.
    """

    path: Path | None = None
    snapshot: HubSnapshot = field(default_factory=lambda: HubSnapshot(0, 0, {}))
    tensors: dict[str, Tensor] | None = None
    passed_over: tuple[Path, ...] = ()


@dataclass(frozen=True)
class JournalEnd:
    """Where the records end.

    Attributes:
        path: the last journal; None: there is none.
        start: what it begins with.
        nbytes: where its last record ends; what follows was torn off.
        next: number of the next record.
    """

    path: Path | None
    start: JournalHeader
    nbytes: int
    next: int


def find_base(folder: HubFolder) -> RecoveryBase:
    """Return the newest snapshot that is intact.

    Raises:
        DamagedCheckpoint: there are snapshots, but none is intact.
        UsageError: the newest was written by a newer version of Paceline.
    """
    passed: dict[Path, DamagedCheckpoint] = {}
    for path in folder.snapshots().values():
        try:
            snapshot, tensors = read_snapshot(path)
        except DamagedCheckpoint as error:
            passed[path] = error
        else:
            for newer, why in passed.items():
                log.warning("passed over %s, which is not intact: %s", newer, why)
            return RecoveryBase(path, snapshot, tensors, tuple(passed))
    if passed:
        raise DamagedCheckpoint(
            f"none of the {len(passed)} snapshots in {str(folder.path)!r} is intact: "
            + "; ".join(str(error) for error in passed.values()),
            remedy="put a copy of one back",
        )
    return RecoveryBase()


def journals_since(folder: HubFolder, first: int) -> list[Path]:
    """Return the journals that have the records from number `first` on, in order.

    Raises:
        DamagedCheckpoint: there are none, or one of them does not begin as it should.
    """
    paths: list[Path] = []
    begins = 0
    for path in folder.logs().values():
        with closing(JournalReader(path)) as one:
            begins = one.start.first
        paths.insert(0, path)
        if begins <= first:
            return paths
    if not paths and not first:
        return []
    raise DamagedCheckpoint(
        f"{str(folder.path)!r} has no journal with record {first}"
        + (f": those that are there begin with record {begins}" if paths else ""),
        remedy="put it back from a copy",
    )


def records_between(paths: Sequence[Path], first: int, stop: int) -> Iterator[JournalRecord]:
    """Yield the records `first` … `stop` - 1 of consecutive journals, which are known to hold them."""
    for path in paths:
        with closing(JournalReader(path)) as one:
            for record in one.records() if one.start.first < stop else ():
                if record.sequence >= first:
                    yield record
                if record.sequence + 1 >= stop:
                    return


def find_end(paths: Sequence[Path], ledger: LedgerStatus) -> JournalEnd:
    """Read consecutive journals through, and return where their records end.

    Args:
        paths: the journals, in order.
        ledger: a witness of what was on the disk, see [Note: torn or damaged] in `reading`.

    Raises:
        DamagedCheckpoint: a record that had been on the disk is damaged or missing; file and place are told.
    """
    path, start, at, due = None, JournalHeader(0, 0, 0), 0, 0
    for number, path in enumerate(paths):
        is_last = number == len(paths) - 1
        with closing(JournalReader(path)) as one:
            if number and one.start.first != due:
                raise _lost(
                    paths[number - 1], at, due, f"the next journal begins with record {one.start.first}"
                )
            start, at, due = one.start, JOURNAL_HEADER_NBYTES, one.start.first
            try:
                for record in one.records():
                    at, due = record.stop, record.sequence + 1
            except DamagedCheckpoint as error:
                durable = max(one.durable_behind(at), ledger.told + 1)
                if durable > due or not is_last:
                    raise _lost(path, at, due, str(error)) from error
                log.warning(
                    "%s: cut off what nobody was told of, %d bytes from byte %d on: %s",
                    path, one.nbytes - at, at, error,
                )  # fmt: skip
    if path is None and ledger.told >= 0:
        raise DamagedCheckpoint(
            "the ledger has lines, but there is no journal", remedy="put it back from a copy"
        )
    if path is not None and ledger.told >= due:
        raise _lost(path, at, due, f"it ends there, and the ledger has records up to {ledger.told}")
    return JournalEnd(path, start, at, due)


def _lost(path: Path, at: int, due: int, why: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{str(path)!r} is damaged at byte {at}, where record {due} begins: {why}",
        remedy="put it back from a copy; or, to lose all records from there on and go on without them: "
        f"truncate -s {at} {str(path)!r}, remove the journals after it, and the lines from "
        f'"n": {due} on in {str(path.with_name("ledger.jsonl"))!r}',
    )
