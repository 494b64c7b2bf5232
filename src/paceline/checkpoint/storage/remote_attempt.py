"""A checkpoint that ranks write to a remote file system: files first on a disk of the host, then uploaded.

    step-00000300/5f0c…/…          files of the ranks of the run with this mark, and their reports
    step-00000300/manifest.json    written by rank 0 once all files are there
    step-00000300/manifest.json.xxh128    written last: it completes the checkpoint

Nothing is renamed. Ranks of an earlier run that still upload do so to a folder of their own, and its rank 0 completes
nothing, since the run no longer owns the place.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath

from paceline.checkpoint.storage.file_system import RETRY_SECONDS, FileSystem
from paceline.checkpoint.storage.host_cache import HostCache
from paceline.checkpoint.storage.paced_upload import RateLimit, upload

__all__ = ["AttemptPlace", "RemoteAttempt", "has_program_ended"]

log = logging.getLogger("paceline.checkpoint")

_UPLOADS = 4  # at a time: a connection to an object store is slower than the network
_LISTING_SECONDS = 0.5  # between two listings of the reports
_ABANDON_SECONDS = 20.0

_EXIT_SECONDS = 300.0
"""How long a program that has reached its end waits for its last checkpoint."""

_saving: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_ended = threading.Event()


def has_program_ended() -> bool:
    """Return whether the program has reached its end, and only saves keep its process alive."""
    return _ended.is_set() or not threading.main_thread().is_alive()


def _finish_saving() -> None:
    _ended.set()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in list(_saving):
        thread.join(max(0.0, deadline - time.monotonic()))


# Once the main thread has ended, Python starts no work in executors any more, which connections need. There is no
# public hook before that; importing concurrent.futures has registered its own, and the last one is called first.
getattr(threading, "_register_atexit", lambda call: None)(_finish_saving)


@dataclass(frozen=True)
class AttemptPlace:
    """What an attempt needs of the checkpoints of its run.

    Attributes:
        files: the remote file system.
        cache: of this host.
        limit: of the rate of uploads.
        verify_owner: raises OSError unless this run owns the place.
        set_aside: takes a complete checkpoint out of the list.
    """

    files: FileSystem
    cache: HostCache
    limit: RateLimit
    verify_owner: Callable[[], None]
    set_aside: Callable[[str], None]


class RemoteAttempt:
    """A checkpoint that this thread writes; see `SaveAttempt` for the methods. At its end, the program waits for it.

    Args:
        place: where.
        name: of the checkpoint.
        mark: of the run.
    """

    def __init__(self, place: AttemptPlace, name: str, mark: str) -> None:
        self._place, self._files, self._name, self.prefix = place, place.files, name, f"{mark}/"
        self.folder = place.cache.new_folder()
        self._written: list[tuple[str, bytes]] = []
        self._there: set[str] = set()
        self._listed_at, self._failing_since = -_LISTING_SECONDS, 0.0
        if (thread := threading.current_thread()) is not threading.main_thread():
            _saving.add(thread)

    # ------------------------------------------------------------------ every rank

    def publish(self, names: Sequence[str]) -> None:
        if len(names) < 2:
            for name in names:
                self._upload(name)
            return
        with ThreadPoolExecutor(_UPLOADS, "paceline-upload") as pool:
            for done in [pool.submit(self._upload, name) for name in names]:
                done.result()

    def _upload(self, name: str) -> None:
        local, path = self.folder / name, self._path(name)
        checksums, version = upload(self._files, local, path, self._place.limit)
        try:
            self._place.cache.keep(local, path, version, checksums)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                local.unlink()

    def link(self, name: str, earlier: str) -> bool:
        try:
            self._files.copy(f"{earlier}/{name}", f"{self._name}/{name}")
        except OSError:
            return False
        return True

    def report(self, name: str, text: bytes) -> None:
        self._files.write(self._path(name), text)

    def reported(self, name: str) -> bytes | None:
        now = time.monotonic()
        try:
            if name not in self._there:
                if now - self._listed_at < _LISTING_SECONDS:
                    return None
                self._listed_at = now
                self._there = set(self._files.list(f"{self._name}/{self.prefix}".rstrip("/"), seconds=0))
            text = self._files.read(self._path(name), seconds=0) if name in self._there else None
        except FileNotFoundError:
            return None
        except OSError:
            self._failing_since = self._failing_since or now
            if now - self._failing_since >= RETRY_SECONDS or not threading.main_thread().is_alive():
                raise
            return None  # rank 0 asks again
        self._failing_since = 0.0
        return text

    def _path(self, name: str) -> str:
        return f"{self._name}/{self.prefix}{name}"

    # ------------------------------------------------------------------ rank 0

    def complete(self, last: Sequence[tuple[str, bytes]], sizes: Mapping[str, int]) -> None:
        self._place.verify_owner()
        self._check_sizes(sizes)
        if self._files.exists(f"{self._name}/{last[-1][0]}"):
            self._place.set_aside(self._name)  # from an earlier attempt at this step, which was skipped
        for name, content in last[:-1]:
            self._put(name, content)
        self._place.verify_owner()
        self._put(*last[-1])
        for name, content in last:
            if self._files.read(f"{self._name}/{name}") != content:
                raise OSError(
                    errno.EBUSY, f"another run has overwritten {self._files.location}/{self._name}/{name}"
                )

    def _check_sizes(self, sizes: Mapping[str, int]) -> None:
        found: dict[str, int] = {}
        for folder in {str(PurePosixPath(self._path(name)).parent) for name in sizes}:
            found |= {f"{folder}/{name}": entry.nbytes for name, entry in self._files.list(folder).items()}
        for name, nbytes in sizes.items():
            if found.get(self._path(name)) != nbytes:
                raise OSError(errno.EIO, f"{name} is missing, shorter or longer than what was written to it")

    def _put(self, name: str, content: bytes) -> None:
        """Write a file that only this run, as the owner, may write; a late one of an earlier run is replaced."""
        path = f"{self._name}/{name}"
        self._written.append((path, content))
        for _ in range(3):
            try:
                self._files.create(path, content)
                return
            except FileExistsError:
                self._place.verify_owner()
                self._files.remove(path)
        raise OSError(errno.EBUSY, f"another run writes {self._files.location}/{path}")

    def abandon(self) -> None:
        try:
            for path, content in reversed(
                self._written
            ):  # first the one that may have completed the checkpoint
                with contextlib.suppress(FileNotFoundError):
                    if self._files.read(path, seconds=_ABANDON_SECONDS) == content:
                        self._files.remove(path, seconds=_ABANDON_SECONDS)
            self._files.remove_folder(f"{self._name}/{self.prefix}".rstrip("/"), seconds=_ABANDON_SECONDS)
        except OSError as error:
            log.warning("what was written of %s stays until the next run: %s", self._name, error)
        self.remove_local()

    def remove_local(self) -> None:
        """Remove this rank's folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
