"""The hub's journal: what it decided, on the disk before anybody is told.

    journal = Journal.open("runs/hub", resume=True)
    found = journal.recovered()                  # the last snapshot, and the records since
    journal.append({"worker": 7, "round": 3}, update)
    journal.commit()                             # on the disk: now the worker may be told
    journal.snapshot(revision, tensors, facts)   # every so often; the records before it are of no more use

Records wait in memory until a commit, which takes one fdatasync however many there are. A commit that fails loses
none of them: they are written anew by the next. What the files are is told in `folder`, their format in `records`,
what becomes of damage in `reading` and `recovery`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from paceline._core.file_lock import FolderLock
from paceline.async_dp.wal.decision_ledger import DecisionLedger, LedgerStatus, ledger_status
from paceline.async_dp.wal.hub_folder import HubFolder, write_failure, make_folder
from paceline.async_dp.wal.hub_snapshot import HubSnapshot, read_snapshot, write_snapshot
from paceline.async_dp.wal.journal_file import JournalWriter
from paceline.async_dp.wal.journal_recovery import (
    JournalEnd,
    RecoveredState,
    find_end,
    find_base,
    journals_since,
    records_between,
)
from paceline.async_dp.wal.plain_values import ledger_line, pack_values, read_checked_file, to_json, write_checked_file
from paceline.errors import CheckpointError, DamagedCheckpoint, UsageError
from paceline.transport.envelope import Bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HubJournal"]

_MOST_WAITING_NBYTES = 64 << 20
_OWN_NBYTES = 512
"""What a record takes in memory beside its bytes, roughly."""


class HubJournal:
    """Keeps what a hub must not forget; used by one thread. `open` makes one.

    Attributes:
        run_facts: facts of the run, told once by `describe`.
    """

    def __init__(self, folder: HubFolder, lock: FolderLock) -> None:
        self._folder, self._lock = folder, lock
        self._broken = ""
        folder.sweep()
        facts = _facts_of(folder.page)
        self.run_facts: Mapping[str, Any] = MappingProxyType(facts or {})
        self._described = facts is not None
        base = find_base(folder)
        self._base_path, self._base = base.path, base.snapshot
        self._tensors = base.tensors  # until they are asked for
        lines = ledger_status(folder.ledger, self._base.next, self._base.ledger_nbytes)
        if lines.bad_line and lines.last + 1 < self._base.next:
            raise DamagedCheckpoint(
                f"line {lines.bad_line} of {str(folder.ledger)!r} is not in order, and its record is not kept any more",
                remedy="correct the line, or move the ledger elsewhere: another one is begun",
            )
        self._logs = journals_since(folder, self._base.next)
        end = find_end(self._logs, lines)
        for path in base.passed_over:
            folder.set_aside(path)
        self._write_from(end, lines)

    def _write_from(self, end: JournalEnd, lines: LedgerStatus) -> None:
        """Cut off what was torn, and have the ledger hold a line for each record."""
        with ExitStack() as undo:
            if end.path is None:
                self._log = JournalWriter.create(self._folder.log(0), 0, 0)
                self._logs = [self._log.path]
            else:
                self._log = JournalWriter(end.path, end.start, end.nbytes, end.next)
            undo.callback(self._log.close)
            self._ledger = DecisionLedger(self._folder.ledger, lines.end)
            undo.callback(self._ledger.close)
            missing = range(max(lines.last + 1, self._base.next), end.next)
            for record in records_between(self._logs, missing.start, missing.stop) if missing else ():
                self._ledger.add(ledger_line(record.sequence, record.values))
                if self._ledger.waiting >= 1000:
                    self._ledger.write()
            self._ledger.write()
            undo.pop_all()

    @classmethod
    def open(cls, folder: str | Path, *, resume: bool) -> HubJournal:
        """Open the journal in a folder; one that is empty, or not there, is a new one.

        Args:
            folder: of the hub.
            resume: go on with the run that is in it; False: there must be none.

        Raises:
            UsageError: there is a run, and it is not to be resumed; another hub has the folder open; it can't be
                written; or a newer version of Paceline has written it.
            DamagedCheckpoint: something that had been on the disk is not there any more, or not what was written.
            CheckpointError: what is to be repaired can't be written.
        """
        path = Path(folder)
        make_folder(path, "hub")
        lock = FolderLock(path / "hub.lock", "hub")
        try:
            if not resume and HubFolder(path).holds_run():
                raise UsageError(f"{str(path)!r} holds a run", remedy="resume it, or choose another folder")
            return cls(HubFolder(path), lock)
        except OSError as error:
            lock.close()
            raise write_failure(path, error, "mend that, then open it again", "opened") from error
        except BaseException:
            lock.close()
            raise

    # ------------------------------------------------------------------ what is there

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Remember facts of the run, on the disk when this returns; they can't be changed afterwards.

        Args:
            facts: plain values.

        Raises:
            UsageError: they are not plain, or others were told before.
            CheckpointError: they can't be written.
        """
        told = json.loads(to_json(facts, "facts of a run"))
        if self._described:
            if told != dict(self.run_facts):
                raise UsageError(
                    f"the run in {str(self._folder.path)!r} was described before, with other facts: "
                    + _difference(dict(self.run_facts), told),
                    remedy="describe it as it was, or choose another folder",
                )
            return
        try:
            write_checked_file(self._folder.page, told)
        except OSError as error:
            raise write_failure(self._folder.page, error, "make room, then describe it again") from error
        self.run_facts, self._described = MappingProxyType(told), True

    def recovered(self) -> RecoveredState:
        """Return the last snapshot, and the records that were committed since.

        Raises:
            DamagedCheckpoint: the disk has lost what was there when the journal was opened.
        """
        base = self._base
        tensors, self._tensors = self._tensors, None
        if tensors is None and self._base_path is not None:
            base, tensors = read_snapshot(self._base_path)
        records = records_between(self._logs, base.next, self._log.durable)
        return RecoveredState(
            base.revision, base.facts, tensors, ((record.values, record.payload) for record in records)
        )

    # ------------------------------------------------------------------ what is new

    def append(self, values: Mapping[str, Any], payload: Bytes = b"") -> int:
        """Have a record wait for the next commit, and return its number among all of the run, from 0.

        Once many bytes wait they are committed by themselves, so that memory does not grow.

        Args:
            values: plain values, at most 64 KiB of them; none is called ``"n"``.
            payload: contiguous bytes, at most 1 GiB. What may be written to is copied.

        Raises:
            UsageError: a value is not plain, or something is too long.
            CheckpointError: what waited before can't be written; this record was not taken.
        """
        data = pack_values(values)
        held = memoryview(payload).cast("B")
        kept = held if held.readonly else bytes(held)
        self._check()
        if self._log.waiting_nbytes + _OWN_NBYTES * self._ledger.waiting > _MOST_WAITING_NBYTES:
            self.commit()
        with self._in_one_go():
            sequence = self._log.next
            self._log.add(data, kept)
            self._ledger.add(ledger_line(sequence, values))
        return sequence

    def commit(self) -> None:
        """Wait until all that was appended is on the disk; the ledger's lines are written then too.

        Raises:
            CheckpointError: it can't be written, such as for want of room. Nothing that was appended is lost as long
                as this process lives: commit again.
        """
        self._check()
        with self._in_one_go():
            for file in (self._log, self._ledger):
                try:
                    file.write()
                except OSError as error:
                    raise write_failure(
                        file.path, error, "nothing that was appended is lost: make room, then commit again"
                    ) from error

    def snapshot(self, revision: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Put a state on the disk that all records so far have gone into, and begin a new journal after it.

        The last two snapshots stay, and the journals since the older of them.

        Args:
            revision: of the state, at least that of the snapshot before.
            tensors: the state.
            facts: plain values that belong to it.

        Raises:
            UsageError: the revision is too small, a fact is not plain, or a tensor is none that can be stored.
            CheckpointError: it can't be written; the snapshot and the records before it are untouched.
        """
        least = max(self._base.revision, self._log.start.revision)
        if revision < least:
            raise UsageError(
                f"snapshot of revision {revision} after that of {least}", remedy="revisions only grow"
            )
        self.commit()
        path = self._folder.snapshot(revision)
        snapshot = HubSnapshot(revision, self._log.next, dict(facts), self._ledger.end)
        try:
            self._ledger.sync()
            write_snapshot(path, snapshot, tensors)
        except OSError as error:
            raise write_failure(
                path, error, "what was there before is untouched: make room, then take the snapshot again"
            ) from error
        self._base_path, self._base, self._tensors = path, snapshot, None
        if revision != self._log.start.revision:
            self._begin(revision)
        self._logs = [self._log.path]
        self._folder.remove_old()

    def _begin(self, revision: int) -> None:
        """Go on in a new journal.

        Once its file may be there, no record may go into the one before: what is interrupted takes nothing more.
        """
        path = self._folder.log(revision)
        self._broken = f"{path.name} was begun, but not to the end"
        try:
            begun = JournalWriter.create(path, revision, self._log.next)
        except OSError as error:
            if not path.exists():
                self._broken = ""
            raise write_failure(path, error, "the snapshot is on the disk: make room, then go on") from error
        self._log.close()
        self._log, self._broken = begun, ""

    def close(self) -> None:
        """Commit, and let the next hub open the folder; closing twice is closing once."""
        if self._lock is None:
            return
        try:
            if not self._broken:
                self.commit()
        finally:
            self._broken = "it is closed"
            self._log.close()
            self._ledger.close()
            self._lock.close()
            self._lock = None

    def __enter__(self) -> HubJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ what must not be done by halves

    def _check(self) -> None:
        """Raise if nothing more can be taken."""
        if self._broken:
            raise CheckpointError(
                f"the journal in {str(self._folder.path)!r} takes nothing more: {self._broken}",
                remedy="open it again: what was committed is there",
            )

    @contextmanager
    def _in_one_go(self) -> Iterator[None]:
        """Take nothing more once this was interrupted half way, such as by Ctrl-C."""
        self._broken = "it was interrupted"
        try:
            yield
        except (CheckpointError, UsageError):
            self._broken = ""
            raise
        self._broken = ""


def _facts_of(page: Path) -> dict[str, Any] | None:
    try:
        return read_checked_file(page)
    except FileNotFoundError:
        return None
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(str(error), remedy="put it back from a copy") from error


def _difference(before: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    """Return which facts differ, in words."""
    differ = [
        name
        for name in {**before, **told}
        if name not in before or name not in told or before[name] != told[name]
    ]
    return "; ".join(f"{name} {_told(before, name)} → {_told(told, name)}" for name in differ)


def _told(facts: Mapping[str, Any], name: str) -> str:
    return f"{facts[name]!r:.60}" if name in facts else "not told"
