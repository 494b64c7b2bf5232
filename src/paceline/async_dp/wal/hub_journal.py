"""The hub's journal: its decisions, on disk before anything is answered.

    journal = HubJournal.open("runs/hub", resume=True)
    found = journal.recovered()                  # the last snapshot, and the records since
    journal.append({"worker": 7, "round": 3}, update)
    journal.commit()                             # on disk: now the worker may be answered
    journal.snapshot(revision, tensors, facts)   # from time to time; earlier records are no longer needed

Records are buffered until a commit, which takes one fdatasync however many they are. A commit that fails loses none of
them: the next one writes them again. For the files see `hub_folder`, for their format `journal_records`, for damage
`journal_file` and `journal_recovery`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paceline._core.file_lock import FolderLock
from paceline._core.format import format_bytes
from paceline.async_dp.wal.decision_ledger import LedgerStatus, ledger_status
from paceline.async_dp.wal.durable_files import (
    AppendFile,
    disk_errors,
    make_folder,
    read_checked_file,
    write_checked_file,
)
from paceline.async_dp.wal.hub_folder import HubFolder
from paceline.async_dp.wal.hub_snapshot import HubSnapshot, read_snapshot, write_snapshot
from paceline.async_dp.wal.journal_file import JournalWriter
from paceline.async_dp.wal.journal_records import ledger_line, pack_values, to_json
from paceline.async_dp.wal.journal_recovery import (
    JournalEnd,
    RecoveredState,
    find_base,
    find_end,
    journals_since,
    records_between,
)
from paceline.errors import CheckpointError, DamagedCheckpoint, UsageError
from paceline.transport.envelope import Bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HubJournal"]

log = logging.getLogger("paceline.async_dp")

_MAX_BUFFERED_NBYTES = 64 << 20
_RECORD_OVERHEAD_NBYTES = 512  # memory per record besides its bytes, roughly
_MIN_JOURNAL_NBYTES, _JOURNAL_SNAPSHOTS = 256 << 20, 4
_SNAPSHOTS_ON_DISK = 3  # two that are kept, and one being written


class HubJournal:
    """Write-ahead log of a hub; used by one thread. Made by `open`.

    Attributes:
        folder: its files.
        run_facts: facts of the run, written once by `describe`.
        max_journal_nbytes: size of the records since the last snapshot above which `snapshot_due`.
        problem: why records wait to be written; empty if nothing is wrong.
    """

    def __init__(self, folder: HubFolder, lock: FolderLock) -> None:
        self.folder = folder
        self._lock: FolderLock | None = lock
        self._unusable = ""  # why nothing more can be appended
        self.max_journal_nbytes, self.problem = _MIN_JOURNAL_NBYTES, ""
        folder.remove_temporary()
        facts = _read_facts(folder.run_file)
        self.run_facts: Mapping[str, Any] = MappingProxyType(facts or {})
        self._described = facts is not None
        base = find_base(folder)
        self._base_path, self._base = base.path, base.snapshot
        self._tensors = base.tensors  # until they are recovered
        ledger = ledger_status(folder.ledger, self._base.next, self._base.ledger_nbytes)
        if ledger.bad_line and ledger.last + 1 < self._base.next:
            raise DamagedCheckpoint(
                f"line {ledger.bad_line} of {str(folder.ledger)!r} is out of order, and its record no longer exists",
                remedy="correct the line, or move the ledger elsewhere: a new one is started",
            )
        self._journals = journals_since(folder, self._base.next)
        end = find_end(self._journals, ledger)
        for path in base.damaged:
            folder.set_aside(path)
        self._open_files(end, ledger)

    def _open_files(self, end: JournalEnd, ledger: LedgerStatus) -> None:
        """Cut off what was torn, and complete the ledger from the records."""
        with ExitStack() as undo:
            if end.path is None:
                self._writer = JournalWriter.create(self.folder.journal(0), 0, 0)
                self._journals = [self._writer.path]
            else:
                self._writer = JournalWriter(end.path, end.header, end.nbytes, end.next)
            undo.callback(self._writer.close)
            self._ledger = AppendFile(self.folder.ledger, ledger.end, create=True)
            undo.callback(self._ledger.close)
            missing = range(max(ledger.last + 1, self._base.next), end.next)
            for record in records_between(self._journals, missing.start, missing.stop) if missing else ():
                self._ledger.buffer(ledger_line(record.sequence, record.values))
                if len(self._ledger) >= 1000:
                    self._ledger.flush()
            self._ledger.flush()
            undo.pop_all()

    @classmethod
    def open(cls, folder: str | Path, *, resume: bool, lock: FolderLock | None = None) -> HubJournal:
        """Open the journal in a folder; if that is missing or empty, a new one.

        Args:
            folder: of the hub.
            resume: continue the run in it; False: there must be none.
            lock: of the folder, if it is held already.

        Raises:
            UsageError: the folder holds a run and `resume` is False, another hub has it open, it can't be written, or a
                newer version of Paceline wrote it.
            DamagedCheckpoint: something that had been on disk is missing or damaged.
            CheckpointError: a repair can't be written.
        """
        path = Path(folder).absolute()
        make_folder(path, "hub")
        lock = lock or FolderLock(path / "hub.lock", "hub")
        with ExitStack() as undo, disk_errors(path, "correct that, then open it again", "opened"):
            undo.callback(lock.close)
            if not resume and HubFolder(path).holds_run():
                raise UsageError(f"{str(path)!r} holds a run", remedy="resume it, or choose another folder")
            journal = cls(HubFolder(path), lock)
            undo.pop_all()
        return journal

    # ------------------------------------------------------------------ reading

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write facts of the run, plain values; they are on disk when this returns, and can't be changed later.

        Raises:
            UsageError: they are not plain, or differ from those written before.
            CheckpointError: they can't be written.
        """
        plain = json.loads(to_json(facts, "facts of a run"))
        if self._described:
            if plain != dict(self.run_facts):
                raise UsageError(
                    f"the run in {str(self.folder.path)!r} was described before, with other facts: "
                    + _difference(self.run_facts, plain),
                    remedy="describe it as before, or choose another folder",
                )
            return
        with disk_errors(self.folder.run_file, "free disk space, then describe it again"):
            write_checked_file(self.folder.run_file, plain)
        self.run_facts, self._described = MappingProxyType(plain), True

    def recovered(self) -> RecoveredState:
        """Return the last snapshot, and the records committed since.

        Raises:
            DamagedCheckpoint: the disk has lost what existed when the journal was opened.
        """
        base = self._base
        tensors, self._tensors = self._tensors, None
        if tensors is None and self._base_path is not None:
            base, tensors = read_snapshot(self._base_path)
        records = records_between(self._journals, base.next, self._writer.durable)
        pairs = ((record.values, record.payload) for record in records)
        return RecoveredState(base.revision, base.facts, tensors, pairs)

    # ------------------------------------------------------------------ writing

    def append(self, values: Mapping[str, Any], payload: Bytes = b"") -> int:
        """Buffer a record for the next commit, and return its number among all of the run, from 0.

        Commits once many bytes are buffered, so that memory does not grow. If that fails, `problem` says why, and
        nothing more should be appended until a `commit` succeeds.

        Args:
            values: plain values, at most 64 KiB; none is called ``"n"``.
            payload: contiguous bytes, below 4 GiB; copied if writable.

        Raises:
            UsageError: a value is not plain, or something is too long.
            CheckpointError: the journal was interrupted or closed.
        """
        data = pack_values(values)
        view = memoryview(payload).cast("B")
        kept = view if view.readonly else bytes(view)
        self._check_usable()
        with self._uninterrupted():
            sequence = self._writer.next
            self._writer.append(data, kept)
            self._ledger.buffer(ledger_line(sequence, values))
        buffered = self._writer.buffered_nbytes + _RECORD_OVERHEAD_NBYTES * len(self._ledger)
        if buffered > _MAX_BUFFERED_NBYTES and not self.problem:
            with suppress(CheckpointError):  # which is in `problem`
                self.commit()
        return sequence

    def commit(self) -> None:
        """Wait until all appended records are on disk; then write the ledger's lines.

        Raises:
            CheckpointError: they can't be written, for example because the disk is full. Nothing is lost while this
                process lives: commit again.
        """
        self._check_usable()
        try:
            with self._uninterrupted():
                for file, write in (self._writer, self._writer.commit), (self._ledger, self._ledger.flush):
                    with disk_errors(file.path, "nothing is lost: free disk space, then commit again"):
                        write()
        except CheckpointError as error:
            self.problem = str(error)
            raise
        self.problem = ""

    def reserve(self, snapshot_nbytes: int) -> None:
        """Bound the journal relative to the size of a snapshot, and log what the folder may need, and what is free."""
        bound = self.max_journal_nbytes = max(_MIN_JOURNAL_NBYTES, _JOURNAL_SNAPSHOTS * snapshot_nbytes)
        needed = _SNAPSHOTS_ON_DISK * snapshot_nbytes + 2 * bound
        with disk_errors(self.folder.path, "correct that, then open it again", "examined"):
            free = shutil.disk_usage(self.folder.path).free + self.folder.nbytes()
        log.log(
            logging.INFO if free > needed else logging.WARNING,
            "%r may need up to %s, besides its ledger; %s are free or used by it",
            str(self.folder.path), format_bytes(needed), format_bytes(free),
        )  # fmt: skip

    @property
    def position(self) -> tuple[Path, int]:
        """The current file of records, and the end of those in it that are on disk, in bytes."""
        return self._writer.path, self._writer.end

    @property
    def snapshot_due(self) -> bool:
        """Whether the journal has grown so long that a snapshot should follow."""
        return self._writer.end + self._writer.buffered_nbytes > self.max_journal_nbytes

    def snapshot(self, revision: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Write a state that includes all records so far, and start a new journal after it.

        The last two snapshots are kept, and the journals since the older of them.

        Args:
            revision: of the state, at least that of the previous snapshot.
            tensors: the state.
            facts: plain values that belong to it.

        Raises:
            UsageError: the revision is too small, a fact is not plain, or a tensor can't be stored.
            CheckpointError: it can't be written; the previous snapshot and the records are untouched.
        """
        minimum = max(self._base.revision, self._writer.header.revision)
        if revision < minimum:
            raise UsageError(
                f"snapshot of revision {revision} after that of {minimum}",
                remedy="revisions must not decrease",
            )
        self.commit()
        path = self.folder.snapshot(revision)
        snapshot = HubSnapshot(revision, self._writer.next, dict(facts), self._ledger.end)
        with disk_errors(path, "the previous snapshot is untouched: free disk space, then take it again"):
            self._ledger.sync()
            write_snapshot(path, snapshot, tensors)
        self._base_path, self._base, self._tensors = path, snapshot, None
        if revision != self._writer.header.revision:
            self._start_journal(revision)
        self._journals = [self._writer.path]
        self.folder.remove_old()

    def _start_journal(self, revision: int) -> None:
        """Continue in a new journal.

        Once its file may exist, no record may go into the previous one: if this is interrupted, nothing is appended.
        """
        path = self.folder.journal(revision)
        self._unusable = f"{path.name} was begun, but not completed"
        try:
            with disk_errors(path, "the snapshot is on disk: free disk space, then continue"):
                writer = JournalWriter.create(path, revision, self._writer.next)
        except CheckpointError:
            if not path.exists():
                self._unusable = ""
            raise
        self._writer.close()
        self._writer, self._unusable = writer, ""

    def close(self) -> None:
        """Commit, and release the folder; may be called twice."""
        if self._lock is None:
            return
        try:
            if not self._unusable:
                self.commit()
        finally:
            self._unusable = "it is closed"
            self._writer.close()
            self._ledger.close()
            self._lock.close()
            self._lock = None

    def __enter__(self) -> HubJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._unusable:
            raise CheckpointError(
                f"the journal in {str(self.folder.path)!r} can't be written any more: {self._unusable}",
                remedy="open it again: what was committed is there",
            )

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Allow nothing more to be appended if the block is interrupted, for example by Ctrl-C."""
        self._unusable = "it was interrupted"
        try:
            yield
        except (CheckpointError, UsageError):
            self._unusable = ""
            raise
        self._unusable = ""


def _read_facts(path: Path) -> dict[str, Any] | None:
    try:
        return read_checked_file(path)
    except FileNotFoundError:
        return None
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(str(error), remedy="restore it from a copy") from error


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe which facts differ."""

    def shown(facts: Mapping[str, Any], name: str) -> str:
        return f"{facts[name]!r:.60}" if name in facts else "missing"

    names = {**before, **now}
    differ = [name for name in names if name not in before or name not in now or before[name] != now[name]]
    return "; ".join(f"{name} {shown(before, name)} → {shown(now, name)}" for name in differ)
