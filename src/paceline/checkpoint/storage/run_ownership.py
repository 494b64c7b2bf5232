"""Ownership of a place by one run, where the file system has no locks.

    owner.json          the run that writes here: an id, host, process, since when
    heartbeat-<id>      a number that its rank 0 increases every 5 s

A run takes the place of another one once that has removed `owner.json`, or its process is known to have ended (on the
same host), or its heartbeat has stood still for 20 s. No clocks of hosts are compared. A run that was only cut off, or
stopped, for that long finds out before it completes a checkpoint: `verify` fails. The two files are separate so that a
late heartbeat can't overwrite the new owner.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from dataclasses import dataclass
from datetime import datetime

from paceline.checkpoint.storage.file_system import FileSystem
from paceline.errors import CheckpointError
from paceline.world.process_probe import has_process_ended, host_key, process_start_ticks

__all__ = ["HEARTBEAT", "OWNER", "RunOwnership"]

log = logging.getLogger("paceline.checkpoint")

OWNER, HEARTBEAT = "owner.json", "heartbeat-"

_BEAT_SECONDS, _STALE_SECONDS, _WAIT_SECONDS, _POLL_SECONDS = 5.0, 20.0, 25.0, 1.0
_CLOSE_SECONDS = 20.0  # for which removing the files is tried


@dataclass(frozen=True)
class _Owner:
    """What `owner.json` has; a text that is not valid JSON belongs to a run of which nothing is known."""

    text: bytes
    id: str = ""
    host: str = ""
    pid: int = 0
    since: str = ""
    machine: str = ""
    start_ticks: int = 0

    @staticmethod
    def read(text: bytes) -> _Owner:
        try:
            found = json.loads(text)
            return _Owner(text, **{name: type_(found[name]) for name, type_ in _FIELDS.items()})
        except (ValueError, KeyError, TypeError):
            return _Owner(text)

    @staticmethod
    def this_process() -> _Owner:
        found = {
            "id": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            "machine": host_key(),
            "start_ticks": process_start_ticks(os.getpid()),
        }
        return _Owner.read(json.dumps(found).encode())

    @property
    def is_this_process(self) -> bool:
        return self.machine == host_key() and self.pid == os.getpid() and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to have ended."""
        return self.machine == host_key() and has_process_ended(self.pid, self.start_ticks)

    def __str__(self) -> str:
        return (
            f"process {self.pid} on {self.host}, since {self.since}" if self.pid else "a run that has no name"
        )


_FIELDS = {"id": str, "host": str, "pid": int, "since": str, "machine": str, "start_ticks": int}


class RunOwnership:
    """Makes this run the owner of a place, until it is closed, is no longer used, or the process ends.

    Args:
        files: the place.

    Raises:
        CheckpointError: another run owns it, which is named.
        OSError: the place can't be read or written.
    """

    def __init__(self, files: FileSystem) -> None:
        self._files, self._own = files, _Owner.this_process()
        try:
            self._acquire()
        except BaseException:
            with contextlib.suppress(OSError):
                files.remove(self.heartbeat, seconds=0)
            raise
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=_beat, args=(files, self._own, self._ended), name="paceline-checkpoint-owner", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._ended.set).atexit = False

    def _acquire(self) -> None:
        began = changed = time.monotonic()
        seen: tuple[bytes, bytes] | None = None
        moved = False
        while True:
            owner = self._owner()
            if owner is None:
                self._files.write(self.heartbeat, b"0")
                with contextlib.suppress(FileExistsError):
                    self._files.create(OWNER, self._own.text)
                if self._is_owner():  # not overwritten by a run that began at the same time
                    return
                continue
            now, beat = time.monotonic(), (owner.text, self._beat_of(owner))
            if seen is not None and beat != seen:
                changed, moved = now, True
            seen = beat
            if owner.has_ended or now - changed >= _STALE_SECONDS:
                log.info("taking over %s from %s, which has ended", self._files.location, owner)
                if self._owner() == owner:
                    self._files.remove(OWNER)
            elif owner.is_this_process or (moved and now - began >= _WAIT_SECONDS):
                raise self._busy(owner)
            else:
                time.sleep(_POLL_SECONDS)

    def _busy(self, owner: _Owner) -> CheckpointError:
        own = owner.is_this_process
        return CheckpointError(
            f"{self._files.location!r} is in use by {'this' if own else 'another'} run: {owner}",
            remedy=f"{'close it' if own else 'end that run'} first, or name another folder",
        )

    def _owner(self) -> _Owner | None:
        try:
            return _Owner.read(self._files.read(OWNER))
        except FileNotFoundError:
            return None

    def _beat_of(self, owner: _Owner) -> bytes:
        try:
            return self._files.read(HEARTBEAT + owner.id)
        except FileNotFoundError:
            return b""

    def _is_owner(self) -> bool:
        return self._owner() == self._own

    def verify(self) -> None:
        """Check that this run still owns the place.

        Raises:
            OSError: it does not, or that can't be found out.
        """
        owner = self._owner()
        if owner != self._own:
            raise OSError(
                errno.EBUSY, f"another run has taken over {self._files.location}: {owner or 'unknown'}"
            )

    @property
    def heartbeat(self) -> str:
        """Name of the file with the heartbeat."""
        return HEARTBEAT + self._own.id

    def close(self) -> None:
        """Give up the place; closing twice is no error. A forked process can't."""
        self._ended.set()
        if self._own.pid == os.getpid():
            self._thread.join()


def _beat(files: FileSystem, own: _Owner, ended: threading.Event) -> None:
    """Increase the number in the heartbeat as long as this run is the owner; in the end remove both files."""
    number, is_owner = 0, True
    while is_owner and not ended.wait(_BEAT_SECONDS):
        number += 1
        try:
            is_owner = files.read(OWNER, seconds=0) == own.text
            if is_owner:
                files.write(HEARTBEAT + own.id, b"%d" % number, seconds=0)
        except FileNotFoundError:
            is_owner = False
        except OSError:
            pass  # it is down: the next beat may arrive in time
    try:
        files.remove(HEARTBEAT + own.id, seconds=_CLOSE_SECONDS)
        if files.read(OWNER, seconds=_CLOSE_SECONDS) == own.text:
            files.remove(OWNER, seconds=_CLOSE_SECONDS)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s stays marked as in use, until another run takes over: %s", files.location, error)
