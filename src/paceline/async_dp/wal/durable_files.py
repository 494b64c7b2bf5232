"""Files that survive a crash: appended to, in new folders, or small ones with a checksum."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from paceline._core.files import fsync, make_private_folder, open_private, write_text
from paceline.async_dp.wal.journal_records import to_json
from paceline.errors import CheckpointError, DamagedCheckpoint, UsageError
from paceline.testing import fault_injection
from paceline.transport.envelope import Bytes

__all__ = [
    "AppendFile",
    "disk_errors",
    "make_folder",
    "numbered_files",
    "read_checked_file",
    "remove_temporary",
    "write_checked_file",
]

_BATCH = 512  # buffers per call; Linux takes 1024
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORMAT = 1


class AppendFile:
    """Buffers what is appended to a file, and writes it together.

    Args:
        path: the file.
        end: end of its contents in bytes; the rest is cut off.
        create: create the file if it is missing.

    Attributes:
        end: end of what was written.
        buffered_nbytes: size of what was not.

    Raises:
        OSError: it can't be written.
    """

    def __init__(self, path: Path, end: int, *, create: bool = False) -> None:
        self.path, self.end, self.buffered_nbytes = path, end, 0
        self._buffers: list[Bytes] = []
        self._handle = open_private(path, os.O_WRONLY | os.O_CREAT if create else os.O_WRONLY)
        try:
            os.ftruncate(self._handle, end)
        except OSError:
            os.close(self._handle)
            raise

    def __len__(self) -> int:
        """Return the number of buffers that are not written."""
        return len(self._buffers)

    def buffer(self, *buffers: Bytes) -> None:
        """Append contiguous bytes, which must not change until they are written."""
        self._buffers += buffers
        self.buffered_nbytes += sum(map(len, buffers))

    def flush(self, *, sync: bool = False) -> None:
        """Write what is buffered; with `sync` it is on disk when this returns.

        Raises:
            OSError: it can't be written. It stays buffered, and the next call writes all of it again: after a failed
                fdatasync it is unknown which parts were kept.
        """
        if not self._buffers:
            return
        try:
            _write_at(self._handle, self._buffers, self.end)
            if sync:
                self.sync()
        except OSError:
            with suppress(OSError):  # the rest is overwritten: same bytes, same place
                os.ftruncate(self._handle, self.end)
            raise
        self.end += self.buffered_nbytes
        self._buffers, self.buffered_nbytes = [], 0

    def sync(self) -> None:
        """Wait until all that was written is on disk."""
        os.fdatasync(self._handle)

    def close(self) -> None:
        """Close the file; what is buffered is lost."""
        os.close(self._handle)


def _write_at(handle: int, buffers: Sequence[Bytes], offset: int) -> None:
    for start in range(0, len(buffers), _BATCH):
        batch = [memoryview(buffer).cast("B") for buffer in buffers[start : start + _BATCH]]
        fault_injection.before_write(sum(buffer.nbytes for buffer in batch))
        while batch:
            nbytes = os.pwritev(handle, batch, offset)
            offset += nbytes
            while batch and nbytes >= batch[0].nbytes:
                nbytes -= batch.pop(0).nbytes
            if batch:
                batch[0] = batch[0][nbytes:]


def make_folder(path: Path, owner: str) -> None:
    """Make a folder and its parents where they are missing; they are on disk when this returns, and
    it is for its owner alone.

    Args:
        path: the folder.
        owner: for messages: ``"hub"``.

    Raises:
        UsageError: it can't be made.
    """
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        make_private_folder(path)
        for folder in reversed(new):
            fsync(folder.parent)
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} can't be the folder of a {owner}: {error.strerror or error}",
            remedy="name a folder that you may write to",
        ) from error


def numbered_files(folder: Path, name: re.Pattern[str]) -> dict[int, Path]:
    """Return the files with a matching name, by the number in its first group, in order."""
    found = {int(match[1]): path for path in folder.iterdir() if (match := name.fullmatch(path.name))}
    return dict(sorted(found.items()))


def remove_temporary(folder: Path, name: re.Pattern[str]) -> None:
    """Remove what processes that died have left of unfinished files; the caller holds the folder's lock."""
    for path in folder.iterdir():
        if name.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def disk_errors(path: Path, remedy: str, action: str = "written") -> Iterator[None]:
    """Raise an OSError of the block as a CheckpointError: `path` can't be written (or `action`), for example since the
    disk is full.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _NO_SPACE:
            reason = f"the disk is full ({reason})"
        raise CheckpointError(f"{str(path)!r} can't be {action}: {reason}", remedy=remedy) from error


def write_checked_file(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values with their checksum, as a whole; they are on disk when this returns.

    Raises:
        UsageError: they are not plain.
        OSError: they can't be written; the previous file is untouched.
    """
    body = json.loads(to_json(values, path.name))
    text = json.dumps({"format": _FORMAT, "xxh3": _checksum(body), "values": body}, indent=1) + "\n"
    fault_injection.before_write(len(text))
    write_text(path, text, private=True)


def read_checked_file(path: Path) -> dict[str, Any]:
    """Return the values of `write_checked_file`.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedCheckpoint: it can't be read, or its checksum is wrong.
        UsageError: it was written by a newer version of Paceline.
    """
    try:
        content = json.loads(path.read_bytes())
        version, checksum, values = content["format"], content["xxh3"], content["values"]
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{str(path)!r} can't be read: {error!r:.200}") from error
    if not isinstance(values, dict) or checksum != _checksum(values):
        raise DamagedCheckpoint(f"{str(path)!r} is not what was written: its checksum is wrong")
    if version != _FORMAT:
        raise UsageError(
            f"{str(path)!r} has format {version!r:.40}, this version of Paceline reads format {_FORMAT}",
            remedy="resume with the version that wrote it, or a newer one",
        )
    return values


def _checksum(values: Any) -> str:
    return xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
