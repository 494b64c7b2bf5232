"""Files of remote checkpoints on a disk of this host, which its ranks share.

    /var/tmp/paceline-1000/9d0f…/              one folder per URL
        writing/<process>-<random>/            what a rank has written and not uploaded yet
        step-00000200/5f0c…/model.safetensors.77ab…          blocks of a file, where they are in the file
        step-00000200/5f0c…/model.safetensors.77ab….blocks   their checksums; 0: the block is not there
        locks/0 … 63                           held while a block is downloaded

A rank that has uploaded a file leaves it here, and ranks that read write here what they download, so each block is
downloaded once per host. A block counts only if its checksum is right, and the file only for the version in its name,
so a torn write, a bad disk or a file that was written anew costs a download and nothing else. Before a rank writes a
checkpoint, all but that and the newest complete one are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from xxhash import xxh3_64, xxh3_64_digest, xxh3_64_hexdigest

from paceline._core.file_lock import FileLock
from paceline._core.files import make_private_folder, open_private
from paceline.errors import UsageError
from paceline.world.process_probe import has_process_ended, host_key, process_start_ticks

__all__ = ["BLOCK_NBYTES", "BlockChecksums", "CachedFile", "HostCache"]

BLOCK_NBYTES = 4 << 20

_DIGEST_NBYTES = 8
_ABSENT = bytes(_DIGEST_NBYTES)
_SUFFIX = ".blocks"
_WRITING, _LOCKS = "writing", "locks"

_LOCK_COUNT = 64
_LOCK_SECONDS, _LOCK_POLL_SECONDS = 60.0, 0.02
"""How long another rank's download of a block is waited for, then it is downloaded twice."""


class BlockChecksums:
    """Computes the checksum of each block of a file, from data in order."""

    def __init__(self) -> None:
        self._block, self._left = xxh3_64(), BLOCK_NBYTES
        self._found: list[bytes] = []

    def update(self, data: bytes) -> None:
        """Continue with `data`."""
        view = memoryview(data)
        while view:
            self._block.update(view[: self._left])
            view, used = view[self._left :], min(self._left, len(view))
            self._left -= used
            if not self._left:
                self._next()

    def _next(self) -> None:
        self._found.append(self._block.digest())
        self._block, self._left = xxh3_64(), BLOCK_NBYTES

    def finish(self) -> bytes:
        """Return the checksums, in order."""
        if self._left < BLOCK_NBYTES:
            self._next()
        return b"".join(self._found)


class CachedFile:
    """A file of which some blocks are on this host.

    Args:
        path: the file; created, with no blocks, if it is absent.
        nbytes: its size.
        locks: folder with locks.

    Raises:
        OSError: it can't be used.
    """

    def __init__(self, path: Path, nbytes: int, locks: Path) -> None:
        self._nbytes, self._locks = nbytes, locks
        self._first_lock = xxh3_64(str(path).encode()).intdigest()
        self._data = self._checksums = -1
        try:
            self._data = open_private(path, os.O_RDWR | os.O_CREAT)
            self._checksums = open_private(f"{path}{_SUFFIX}", os.O_RDWR | os.O_CREAT)
            os.ftruncate(self._data, nbytes)
        except BaseException:
            self.close()
            raise

    def read(self, block: int) -> bytes | None:
        """Return a block; None: it is not there, or can't be read, or is damaged."""
        start = block * BLOCK_NBYTES
        try:
            digest = os.pread(self._checksums, _DIGEST_NBYTES, block * _DIGEST_NBYTES)
            if len(digest) < _DIGEST_NBYTES or digest == _ABSENT:
                return None
            data = os.pread(self._data, min(BLOCK_NBYTES, self._nbytes - start), start)
        except OSError:
            return None
        return data if xxh3_64_digest(data) == digest else None

    def write(self, block: int, data: bytes) -> None:
        """Add a block.

        Raises:
            OSError: it can't be written.
        """
        os.pwrite(self._checksums, _ABSENT, block * _DIGEST_NBYTES)
        os.pwrite(self._data, data, block * BLOCK_NBYTES)
        os.pwrite(self._checksums, xxh3_64_digest(data), block * _DIGEST_NBYTES)

    @contextlib.contextmanager
    def downloading(self, block: int) -> Iterator[None]:
        """Wait until no other process downloads the block; others then wait for this one."""
        lock = None
        try:
            with contextlib.suppress(OSError):  # no locks: then it may be downloaded twice
                lock = FileLock(self._locks / str((self._first_lock + block) % _LOCK_COUNT))
                lock.acquire(_LOCK_SECONDS, _LOCK_POLL_SECONDS)
            yield
        finally:
            if lock is not None:
                lock.close()

    def close(self) -> None:
        """Release it; closing twice is no error."""
        handles, self._data, self._checksums = (self._data, self._checksums), -1, -1
        for handle in handles:
            if handle >= 0:
                os.close(handle)

    def __del__(self) -> None:
        self.close()


class HostCache:
    """Folder of one URL's files on this host.

    Args:
        url: of the checkpoints.
        parent: folder for it and those of other URLs; None: ``$TMPDIR/paceline-<user>``, or in ``/var/tmp``.
    """

    def __init__(self, url: str, parent: str | Path | None = None) -> None:
        self._parent = (_default_parent() if parent is None else Path(parent)).absolute()
        self._is_default = parent is None
        self.path = self._parent / xxh3_64_hexdigest(url.encode())

    def new_folder(self) -> Path:
        """Make a folder in which this process writes.

        Raises:
            OSError: it can't be made. UsageError: another user has made its parent.
        """
        self._make(self.path / _WRITING)
        folder = self.path / _WRITING / f"{_process_name()}-{uuid.uuid4().hex[:12]}"
        make_private_folder(folder)
        return folder

    def _make(self, folder: Path) -> None:
        """Make a folder in this one, private to this user."""
        make_private_folder(self._parent)
        if self._is_default and self._parent.stat().st_uid != os.getuid():
            raise UsageError(
                f"{str(self._parent)!r}, where checkpoints are written before their upload, is another user's",
                remedy="set TMPDIR, or name a folder with cache=",
            )
        missing = [each for each in (folder, *folder.parents) if self.path in (each, *each.parents)]
        for each in reversed(missing):
            make_private_folder(each)

    # ------------------------------------------------------------------ files

    def keep(self, local: Path, name: str, version: str, checksums: bytes) -> None:
        """Move an uploaded file here, from a folder of `new_folder`.

        Args:
            local: the file.
            name: its path from the URL.
            version: of the file at the other end.
            checksums: of its blocks.

        Raises:
            OSError: it can't be moved.
        """
        target = self._path(name, version)
        self._make(target.parent)
        os.replace(local, target)
        with open(f"{target}{_SUFFIX}", "wb", opener=open_private) as file:
            file.write(checksums)

    def open(self, name: str, version: str, nbytes: int) -> CachedFile | None:
        """Return a file of which blocks are here, or may be written here; None: the disk has too little room.

        Args:
            name: its path from the URL.
            version: of the file at the other end.
            nbytes: its size.
        """
        path = self._path(name, version)
        try:
            self._make(path.parent)
            if not path.exists() and shutil.disk_usage(path.parent).free < 2 * nbytes:
                return None
            self._make(self.path / _LOCKS)
            return CachedFile(path, nbytes, self.path / _LOCKS)
        except (OSError, UsageError):
            return None

    def _path(self, name: str, version: str) -> Path:
        return self.path / f"{name}.{_short(version)}"

    # ------------------------------------------------------------------ removal

    def keep_only(self, names: Iterable[str]) -> None:
        """Remove the files of all checkpoints but these."""
        kept = set(names)
        for path in self.path.glob("step-*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def remove_stale(self) -> None:
        """Remove folders of processes that have ended, and files that no run has used for a week."""
        week_ago = time.time() - 7 * 24 * 3600
        host = _short(host_key())
        for path in (self.path / _WRITING).glob("*"):
            match = re.fullmatch(rf"{host}-(\d+)-(\d+)-\w+", path.name)
            has_ended = match is not None and has_process_ended(int(match[1]), int(match[2]))
            if has_ended or _modified_before(path, week_ago):  # of another container, or before a reboot
                shutil.rmtree(path, ignore_errors=True)
        for path in self._parent.glob("*/step-*"):
            if _modified_before(path, week_ago):
                shutil.rmtree(path, ignore_errors=True)


def _modified_before(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime < moment
    except FileNotFoundError:
        return False


def _short(key: str) -> str:
    return xxh3_64_hexdigest(key.encode())


def _process_name() -> str:
    return f"{_short(host_key())}-{os.getpid()}-{process_start_ticks(os.getpid())}"


def _default_parent() -> Path:
    given = os.environ.get("TMPDIR", "")
    folder = Path(given) if given else Path("/var/tmp")  # on a disk, where /tmp is often memory
    if not os.access(folder, os.W_OK):
        folder = Path(tempfile.gettempdir())
    return folder / f"paceline-{os.getuid()}"
