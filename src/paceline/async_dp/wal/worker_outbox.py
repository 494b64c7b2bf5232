"""A worker's outbox: updates stay here until the hub has acknowledged them.

    worker.json          the worker's number, its run, and the next round of each fragment
    rounds.json          a bound that no used round has reached, should worker.json be lost
    letter-000003.msg    the pending update of fragment 3, a record as in a hub's journal
    outbox.lock          locked while a worker has the folder open

A worker that dies sends the same updates again. The hub identifies an update by worker, fragment and round, and merges
it once; so a round's number must never be used for another update, and is on disk before it is used.

[Note: damaged files] A damaged file is renamed and the worker continues, since its work is worth less than training on.
If that file is worker.json, it is unknown which rounds were used: the worker gets another number, and updates of the
old one are set aside too. If its number was given, rounds continue with the bound in rounds.json, which is raised
before a round reaches it.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from paceline._core.file_lock import FolderLock
from paceline._core.files import write_atomic
from paceline.async_dp.wal.durable_files import (
    disk_errors,
    make_folder,
    numbered_files,
    read_checked_file,
    remove_temporary,
    write_checked_file,
)
from paceline.async_dp.wal.journal_records import (
    encode_record,
    pack_values,
    parse_record,
)
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.testing import fault_injection
from paceline.transport.envelope import Bytes

__all__ = ["Outbox", "PendingUpdate", "read_update", "write_update"]

log = logging.getLogger("paceline.async_dp")

_STATUS_FILE, _ROUNDS_FILE = "worker.json", "rounds.json"
_UPDATE_FILE = re.compile(r"letter-(\d{6,})\.msg")
_TEMPORARY = re.compile(r"\.(worker\.json|rounds\.json|letter-\d+\.msg)-.*")
_RESERVED_ROUNDS = 10_000  # by which the bound is raised: a write to disk for so many rounds
_WORKER_LIMIT = 2**53
"""Worker numbers are below: each is exact as a float too, as some readers of JSON represent it."""


@dataclass(frozen=True)
class PendingUpdate:
    """An update that is not acknowledged: plain values, and a payload."""

    round: int
    fragment: int
    values: Mapping[str, Any]
    payload: bytes


class _Status(msgspec.Struct):
    """Contents of worker.json."""

    worker: int
    run: str
    rounds: dict[int, int]  # next, by fragment
    round_least: int  # next of all other fragments


class _Rounds(msgspec.Struct):
    """Contents of rounds.json."""

    worker: int
    below: int  # all rounds that were used are smaller


class Outbox:
    """Stores the pending update of each fragment; used by one thread.

    Args:
        folder: of this worker, on a disk that outlives it; None: in memory.
        worker: its number; None: that in the folder, or a random one.

    Attributes:
        worker: its number, from 1 to 2⁵³ − 1.
        run: from `bind`; empty before.

    Raises:
        UsageError: the number is out of range or not that in the folder, the rounds that it used are unknown, another
            worker has the folder open, or it can't be written.
        CheckpointError: the number can't be written.

    Example:
        >>> outbox = Outbox(None, worker=7)
        >>> outbox.put(outbox.next_round(fragment=3), 3, {"base": 12}, b"update")
        >>> [(update.round, update.fragment) for update in outbox.pending()]
        [(0, 3)]
        >>> outbox.acknowledge(0, 3)
        True
    """

    def __init__(self, folder: str | Path | None, worker: int | None = None) -> None:
        if worker is not None and not 1 <= worker < _WORKER_LIMIT:
            raise UsageError(f"worker={worker!r}", remedy=f"give a number from 1 to {_WORKER_LIMIT - 1}")
        self.worker, self.run = worker or 1 + secrets.randbelow(_WORKER_LIMIT - 1), ""
        self._next_rounds: dict[int, int] = {}
        self._first_round = self._round_bound = 0
        self._updates: dict[int, PendingUpdate] = {}
        self._folder = None if folder is None else Path(folder)
        self._lock: FolderLock | None = None
        if self._folder is not None:
            make_folder(self._folder, "worker")
            self._lock = FolderLock(self._folder / "outbox.lock", "worker")
            with (
                ExitStack() as undo,
                disk_errors(self._folder, "correct that, then restart the worker", "opened"),
            ):
                undo.callback(self.close)
                self._read(self._folder, worker)
                undo.pop_all()

    # ------------------------------------------------------------------ updates

    def bind(self, run: str) -> None:
        """Set the run that this worker serves; the folder remembers it.

        Raises:
            UsageError: updates for another run are pending.
            CheckpointError: it can't be written.
        """
        if run == self.run:
            return
        if self.run and self._updates:
            where = "" if self._folder is None else f" in {str(self._folder)!r}"
            raise UsageError(
                f"{len(self._updates)} updates{where} are pending for run {self.run!r}, this is run {run!r}",
                remedy="give this worker another folder; or remove that one, if the other run has ended",
            )
        before, self.run = self.run, run
        try:
            self._write_status()
        except BaseException:
            self.run = before
            raise

    def next_round(self, fragment: int) -> int:
        """Return a number for the next round of a fragment, never used before, over all restarts.

        Raises:
            UsageError: the fragment's number is negative.
            CheckpointError: the round can't be written, so it must not be used.
        """
        if fragment < 0:
            raise UsageError(f"fragment={fragment!r}", remedy="fragments are counted from 0")
        number = self._next_round(fragment)
        self._next_rounds[fragment] = number + 1
        self._reserve(number)
        self._write_status()
        return number

    def put(self, round: int, fragment: int, values: Mapping[str, Any], payload: Bytes = b"") -> None:
        """Add a pending update; it is on disk when this returns.

        Args:
            round: its number, from `next_round`.
            fragment: of the model.
            values: plain values, at most 64 KiB.
            payload: contiguous bytes, below 4 GiB; copied.

        Raises:
            UsageError: an update of this fragment is pending, the round is not from `next_round`, or something can't
                be packed.
            CheckpointError: it can't be written, and is not pending.
        """
        pending = self._updates.get(fragment)
        if pending is not None:
            raise UsageError(
                f"the update of fragment {fragment}, round {pending.round}, is not acknowledged yet",
                remedy="send that one until it is, then put the next",
            )
        if not 0 <= round < self._next_round(fragment):
            raise UsageError(
                f"round {round} of fragment {fragment} was not begun",
                remedy="take its number from next_round(): it must never be used twice",
            )
        update = PendingUpdate(round, fragment, dict(values), bytes(payload))
        if self._folder is not None:
            path = _update_path(self._folder, fragment)
            with disk_errors(path, "it is not pending: free disk space, then put it again"):
                write_update(self._folder, update, self.run, self.worker)
        self._updates[fragment] = update

    def pending(self) -> list[PendingUpdate]:
        """Return the pending updates by fragment."""
        return [update for _, update in sorted(self._updates.items())]

    def get(self, fragment: int) -> PendingUpdate:
        """Return the pending update of a fragment."""
        return self._updates[fragment]

    def acknowledge(self, round: int, fragment: int) -> bool:
        """Remove an update that the hub has stored; return whether it was pending.

        Raises:
            CheckpointError: it can't be removed.
        """
        update = self._updates.get(fragment)
        if update is None or update.round != round:
            return False
        if self._folder is not None:
            path = _update_path(self._folder, fragment)
            with disk_errors(path, "allow this worker to write to its folder", "removed"):
                path.unlink(missing_ok=True)
        del self._updates[fragment]
        return True

    def close(self) -> None:
        """Release the folder; may be called twice."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Outbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the folder

    def _read(self, folder: Path, worker: int | None) -> None:
        remove_temporary(folder, _TEMPORARY)
        self._read_status(folder, worker)
        for fragment, path in numbered_files(folder, _UPDATE_FILE).items():
            try:
                update, run, sender = read_update(path)
                self._check(update, sender, fragment)
            except DamagedCheckpoint as error:
                _set_aside(path, error)
            else:
                self._updates[fragment] = update
                self.run = self.run or run
        self._reserve(max(self._first_round, *self._next_rounds.values(), 0))
        self._write_status()

    def _read_status(self, folder: Path, worker: int | None) -> None:
        path = folder / _STATUS_FILE
        try:
            status = msgspec.convert(read_checked_file(path), _Status, strict=False)
        except FileNotFoundError:
            lost = numbered_files(folder, _UPDATE_FILE) or _aside(path).exists()
        except (DamagedCheckpoint, msgspec.ValidationError) as error:
            _set_aside(path, error)
            lost = True
        else:
            if worker not in (None, status.worker):
                raise UsageError(
                    f"{str(folder)!r} is the folder of worker {status.worker}, this is worker {worker}",
                    remedy="give each worker another folder",
                )
            self.worker, self.run = status.worker, status.run
            self._next_rounds, self._first_round = status.rounds, status.round_least
            return
        if lost and worker is not None:
            self._first_round = _used_rounds_below(folder, worker)

    def _check(self, update: PendingUpdate, sender: int, fragment: int) -> None:
        """Raise a DamagedCheckpoint unless an update may be sent again."""
        if update.fragment != fragment:
            raise DamagedCheckpoint(f"it is of fragment {update.fragment}")
        if sender != self.worker:
            raise DamagedCheckpoint(f"it is of worker {sender}, this is worker {self.worker}")
        if update.round >= self._next_round(fragment):
            raise DamagedCheckpoint(f"it is of round {update.round}, which was not begun")

    def _next_round(self, fragment: int) -> int:
        return self._next_rounds.get(fragment, self._first_round)

    def _reserve(self, round: int) -> None:
        """Raise the bound on disk above a round that is about to be used."""
        if self._folder is None or round < self._round_bound:
            return
        path, bound = self._folder / _ROUNDS_FILE, round + _RESERVED_ROUNDS
        with disk_errors(path, "free disk space, then try again"):
            write_checked_file(path, msgspec.to_builtins(_Rounds(self.worker, bound)))
        self._round_bound = bound

    def _write_status(self) -> None:
        if self._folder is None:
            return
        path = self._folder / _STATUS_FILE
        status = _Status(self.worker, self.run, dict(sorted(self._next_rounds.items())), self._first_round)
        with disk_errors(path, "free disk space, then try again"):
            write_checked_file(path, msgspec.to_builtins(status, str_keys=True))


def _used_rounds_below(folder: Path, worker: int) -> int:
    """Return a bound of the rounds that a worker has used.

    Raises:
        UsageError: it is unknown.
    """
    path = folder / _ROUNDS_FILE
    try:
        rounds = msgspec.convert(read_checked_file(path), _Rounds)
        reason = "" if rounds.worker == worker else f"it is of worker {rounds.worker}"
    except FileNotFoundError:
        rounds, reason = None, "it is missing"
    except (DamagedCheckpoint, msgspec.ValidationError) as error:
        rounds, reason = None, str(error)
    if rounds is None or reason:
        raise UsageError(
            f"{_STATUS_FILE} in {str(folder)!r} is lost, and {_ROUNDS_FILE} does not help ({reason}): which rounds "
            f"worker {worker} has used is unknown, and the hub would ignore an update with a used one",
            remedy="give this worker another number, or none",
        )
    return rounds.below


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _set_aside(path: Path, why: Exception) -> None:
    log.warning("%s is renamed to %s: %s", path, _aside(path).name, why)
    path.replace(_aside(path))


def _update_path(folder: Path, fragment: int) -> Path:
    return folder / f"letter-{fragment:06d}.msg"


def write_update(folder: Path, update: PendingUpdate, run: str, worker: int) -> None:
    """Write an update into a folder, as a whole; it is on disk when this returns.

    Args:
        folder: of the worker.
        update: is written.
        run: that it is for; empty: not known yet.
        worker: its sender.

    Raises:
        UsageError: something in it can't be packed.
        OSError: it can't be written; the previous file is untouched.
    """
    about = {"run": run, "worker": worker, "round": update.round, "fragment": update.fragment}
    values = pack_values({**about, "values": dict(update.values)})
    data = b"".join(encode_record(update.round, 0, values, update.payload, seed=0))
    fault_injection.before_write(len(data))
    write_atomic(
        _update_path(folder, update.fragment), lambda temporary: temporary.write_bytes(data), private=True
    )


def read_update(path: Path) -> tuple[PendingUpdate, str, int]:
    """Return an update, its run and its sender.

    Raises:
        DamagedCheckpoint: it can't be read, or is not what was written.
    """
    try:
        about, payload = parse_record(path.read_bytes(), seed=0)
        update = PendingUpdate(about["round"], about["fragment"], about["values"], payload)
        return update, about["run"], about["worker"]
    except (OSError, KeyError) as error:
        raise DamagedCheckpoint(f"it can't be read: {error!r}") from error
