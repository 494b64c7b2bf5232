"""A worker's outbox: what it offers to the hub stays here until the hub has acknowledged it.

    worker.json          the worker's own number, its run, and the next round of each fragment
    letter-000003.msg    what is offered of fragment 3, a record as in a hub's journal
    outbox.lock          held while a worker has the folder open

A worker that dies offers the same letters again. The hub knows a letter by worker, fragment and round, and takes it
once; so no round's number may ever be used for another letter, and it is on the disk before it is used.

[Note: what is damaged] A file that is damaged is renamed and the worker goes on, as its work is worth less than its
going on. If that file is worker.json, nobody knows which rounds were used: the worker gets another number, and letters
of the old one are put aside too. If its number is a given one, rounds go on with the microseconds since 1970 instead,
which is more than any round that was used.

A letter: what a worker offers of a fragment in a round, and the file in its outbox that holds it.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline._core.file_lock import FolderLock
from paceline._core.files import write_atomic
from paceline.async_dp.wal.hub_folder import write_failure, make_folder
from paceline.async_dp.wal.journal_records import CHECKSUM_NBYTES, RECORD_HEADER_NBYTES, encode_record, parse_record_header, parse_record_values
from paceline.async_dp.wal.plain_values import pack_values, read_checked_file, write_checked_file
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.testing import fault_injection
from paceline.transport.envelope import Bytes

__all__ = ["Outbox", "PendingUpdate", "UpdateSender", "read_update", "update_path", "update_paths", "write_update"]

log = logging.getLogger("paceline.async_dp")


_PAGE = "worker.json"


_LEFT = re.compile(r"\.(worker\.json|letter-\d+\.msg)-.*")


_MOST_WORKERS = 2**53
"""Numbers of workers are below: each is exact as a float too, as some readers of JSON have it."""


class Outbox:
    """Holds, of each fragment, what was offered and is not yet acknowledged; used by one thread.

    Args:
        folder: of this worker, on a disk that outlives it; None: in memory.
        worker: its number; None: the one in the folder, or one that is drawn.

    Attributes:
        worker: its number, from 1 to 2⁵³ - 1.
        run: what was told by `bind`, empty before.

    Raises:
        UsageError: the number is none, or not that in the folder; another worker has the folder open; or it can't be
            written.
        CheckpointError: the number can't be written down.

    Example:
        >>> outbox = Outbox(None, worker=7)
        >>> outbox.put(outbox.next_round(fragment=3), 3, {"base": 12}, b"update")
        >>> [(letter.round, letter.fragment) for letter in outbox.pending()]
        [(0, 3)]
        >>> outbox.acknowledge(0, 3)
        True
    """

    def __init__(self, folder: str | Path | None, worker: int | None = None) -> None:
        if worker is not None and not 1 <= worker < _MOST_WORKERS:
            raise UsageError(f"worker={worker!r}", remedy=f"give a number from 1 to {_MOST_WORKERS - 1}")
        self.worker, self.run = worker or _drawn(), ""
        self._rounds: dict[int, int] = {}
        self._round_least = 0
        self._letters: dict[int, PendingUpdate] = {}
        self._folder = None if folder is None else Path(folder)
        self._lock: FolderLock | None = None
        if self._folder is not None:
            make_folder(self._folder, "worker")
            self._lock = FolderLock(self._folder / "outbox.lock", "worker")
            try:
                self._read(self._folder, worker)
            except OSError as error:
                self.close()
                raise write_failure(
                    self._folder, error, "mend that, then start the worker again", "opened"
                ) from error
            except BaseException:
                self.close()
                raise

    # ------------------------------------------------------------------ letters

    def bind(self, run: str) -> None:
        """Say which run this worker serves; the folder remembers it.

        Raises:
            UsageError: letters for another run are waiting.
            CheckpointError: it can't be written down.
        """
        if run == self.run:
            return
        if self.run and self._letters:
            where = "" if self._folder is None else f" in {str(self._folder)!r}"
            raise UsageError(
                f"{len(self._letters)} letters{where} wait for run {self.run!r}, this is run {run!r}",
                remedy="give this worker another folder; or remove that one, if the other run is over",
            )
        before, self.run = self.run, run
        try:
            self._write_page()
        except BaseException:
            self.run = before
            raise

    def next_round(self, fragment: int) -> int:
        """Return a number for the next round of a fragment, which no other round of it ever has, over all restarts.

        Raises:
            UsageError: this is no fragment.
            CheckpointError: it can't be written down, so it may not be used.
        """
        if fragment < 0:
            raise UsageError(f"fragment={fragment!r}", remedy="fragments are counted from 0")
        number = self._begun(fragment)
        self._rounds[fragment] = number + 1
        self._write_page()
        return number

    def put(self, round: int, fragment: int, values: Mapping[str, Any], payload: Bytes = b"") -> None:
        """Offer a letter; it is on the disk when this returns.

        Args:
            round: its number, of `next_round`.
            fragment: what it is of.
            values: plain values, at most 64 KiB of them.
            payload: contiguous bytes, at most 1 GiB; they are copied.

        Raises:
            UsageError: there is one of this fragment, which was not acknowledged; the round was not given by
                `next_round`; or something can't be packed.
            CheckpointError: it can't be written; it is not offered.
        """
        there = self._letters.get(fragment)
        if there is not None:
            raise UsageError(
                f"a letter of fragment {fragment}, round {there.round}, waits to be acknowledged",
                remedy="offer that one until it is, then put the next",
            )
        if not 0 <= round < self._begun(fragment):
            raise UsageError(
                f"round {round} of fragment {fragment} was not begun",
                remedy="ask next_round() for its number: it must never be used twice",
            )
        letter = PendingUpdate(round, fragment, dict(values), bytes(payload))
        if self._folder is not None:
            try:
                write_update(self._folder, letter, UpdateSender(self.run, self.worker))
            except OSError as error:
                path = update_path(self._folder, fragment)
                raise write_failure(path, error, "it is not offered: make room, then put it again") from error
        self._letters[fragment] = letter

    def pending(self) -> list[PendingUpdate]:
        """Return the letters that were not acknowledged, by fragment."""
        return [letter for _, letter in sorted(self._letters.items())]

    def letter(self, fragment: int) -> PendingUpdate:
        """Return the letter of a fragment that was not acknowledged."""
        return self._letters[fragment]

    def acknowledge(self, round: int, fragment: int) -> bool:
        """Remove a letter that the hub has safe; return whether it was there.

        Raises:
            CheckpointError: it can't be removed.
        """
        letter = self._letters.get(fragment)
        if letter is None or letter.round != round:
            return False
        if self._folder is not None:
            path = update_path(self._folder, fragment)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise write_failure(path, error, "let this worker write to its folder", "removed") from error
        del self._letters[fragment]
        return True

    def close(self) -> None:
        """Let another worker open the folder; closing twice is closing once."""
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Outbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ the folder

    def _read(self, folder: Path, worker: int | None) -> None:
        """Take up what is in the folder."""
        for path in folder.iterdir():
            if _LEFT.fullmatch(path.name) and path.is_dir():
                shutil.rmtree(path)
        self._read_page(folder, worker)
        for fragment, path in update_paths(folder).items():
            try:
                letter, sender = read_update(path)
                self._check_letter(letter, sender, fragment)
            except DamagedCheckpoint as error:
                _set_aside(path, error)
            else:
                self._letters[fragment] = letter
                self.run = self.run or sender.run
        self._write_page()

    def _read_page(self, folder: Path, worker: int | None) -> None:
        path = folder / _PAGE
        try:
            page = read_checked_file(path)
            number, run = int(page["worker"]), str(page["run"])
            rounds = {int(fragment): int(after) for fragment, after in page["rounds"].items()}
            least = int(page["round_least"])
        except FileNotFoundError:
            lost = update_paths(folder) or _aside(path).exists()
        except (DamagedCheckpoint, KeyError, ValueError, AttributeError) as error:
            _set_aside(path, error)
            lost = True
        else:
            if worker not in (None, number):
                raise UsageError(
                    f"{str(folder)!r} is the folder of worker {number}, this is worker {worker}",
                    remedy="give every worker a folder of its own",
                )
            self.worker, self.run, self._rounds, self._round_least = number, run, rounds, least
            return
        if lost and worker is not None:
            self._round_least = time.time_ns() // 1000

    def _check_letter(self, letter: PendingUpdate, sender: UpdateSender, fragment: int) -> None:
        """Raise a DamagedCheckpoint unless a letter may be offered again."""
        if letter.fragment != fragment:
            raise DamagedCheckpoint(f"it is of fragment {letter.fragment}")
        if sender.worker != self.worker:
            raise DamagedCheckpoint(f"it is of worker {sender.worker}, this is worker {self.worker}")
        if letter.round >= self._begun(fragment):
            raise DamagedCheckpoint(f"it is of round {letter.round}, which was not begun")

    def _begun(self, fragment: int) -> int:
        """Return a number above those of all rounds of a fragment that were begun."""
        return self._rounds.get(fragment, self._round_least)

    def _write_page(self) -> None:
        if self._folder is None:
            return
        path = self._folder / _PAGE
        page = {
            "worker": self.worker,
            "run": self.run,
            "rounds": {str(fragment): after for fragment, after in sorted(self._rounds.items())},
            "round_least": self._round_least,
        }
        try:
            write_checked_file(path, page)
        except OSError as error:
            raise write_failure(path, error, "make room, then try again") from error


def _drawn() -> int:
    return 1 + secrets.randbelow(_MOST_WORKERS - 1)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.damaged")


def _set_aside(path: Path, why: Exception) -> None:
    log.warning("%s is put aside as %s: %s", path, _aside(path).name, why)
    path.replace(_aside(path))


_NAME = re.compile(r"letter-(\d{6,})\.msg")


@dataclass(frozen=True)
class PendingUpdate:
    """What a worker offers of a fragment in a round: plain values, and a payload."""

    round: int
    fragment: int
    values: Mapping[str, Any]
    payload: bytes


@dataclass(frozen=True)
class UpdateSender:
    """Whose letter it is: the run, empty if it was not known yet, and the worker's number."""

    run: str
    worker: int


def update_path(folder: Path, fragment: int) -> Path:
    """Return where the letter of a fragment is."""
    return folder / f"letter-{fragment:06d}.msg"


def update_paths(folder: Path) -> dict[int, Path]:
    """Return the letters in a folder, by fragment."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def write_update(folder: Path, letter: PendingUpdate, sender: UpdateSender) -> None:
    """Put a letter into a folder, whole and on the disk when this returns.

    Raises:
        UsageError: something in it can't be packed.
        OSError: it can't be written; what was there stays.
    """
    data = pack_update(letter, sender)
    fault_injection.writing(len(data))
    write_atomic(update_path(folder, letter.fragment), lambda beside: beside.write_bytes(data))


def pack_update(letter: PendingUpdate, sender: UpdateSender) -> bytes:
    """Return a letter as bytes: one record, as in a hub's journal.

    Raises:
        UsageError: something in it can't be packed.
    """
    about = {"run": sender.run, "worker": sender.worker, "round": letter.round, "fragment": letter.fragment}
    values = pack_values({**about, "values": dict(letter.values)})
    return b"".join(encode_record(letter.round, 0, values, letter.payload, seed=0))


def read_update(path: Path) -> tuple[PendingUpdate, UpdateSender]:
    """Return a letter, and whose it is.

    Raises:
        DamagedCheckpoint: it is not what was written, or can't be read.
    """
    try:
        data = path.read_bytes()
        head = parse_record_header(data)
        if head.total_nbytes != len(data):
            raise DamagedCheckpoint(f"it has {len(data)} bytes, should have {head.total_nbytes}")
        front_nbytes = RECORD_HEADER_NBYTES + head.size
        payload = data[front_nbytes:-CHECKSUM_NBYTES]
        about = parse_record_values(data[:front_nbytes], payload, data[-CHECKSUM_NBYTES:], seed=0)
        return (
            PendingUpdate(about["round"], about["fragment"], about["values"], payload),
            UpdateSender(about["run"], about["worker"]),
        )
    except (OSError, KeyError) as error:
        raise DamagedCheckpoint(f"it can't be read: {error!r}") from error
