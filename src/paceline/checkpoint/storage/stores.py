"""The place, or the single checkpoint, that a path or URL names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Protocol

from paceline.checkpoint.format.manifest import MANIFEST, METADATA
from paceline.checkpoint.storage.checkpoint_store import CheckpointFiles, CheckpointStore
from paceline.checkpoint.storage.local_folder import LocalFiles, LocalFolder
from paceline.checkpoint.storage.remote_folder import RemoteFolder
from paceline.errors import UsageError

__all__ = ["ReadableStore", "checkpoints_at", "is_url", "local_path", "open_store", "store_at"]


class ReadableStore(Protocol):
    """Checkpoints to read."""

    @property
    def location(self) -> str:
        """Its path or URL."""
        ...

    def names(self) -> list[str]:
        """Return the names of checkpoints, newest first."""
        ...

    def files(self, name: str) -> CheckpointFiles:
        """Return the files of a checkpoint."""
        ...


class _OneCheckpoint:
    """A folder that is a checkpoint, whatever its name is."""

    def __init__(self, files: CheckpointFiles) -> None:
        self._files, self.location = files, files.location

    def names(self) -> list[str]:
        return [self._files.name]

    def files(self, name: str) -> CheckpointFiles:
        return self._files


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL, such as ``s3://bucket/run``.

    Raises:
        UsageError: it is what a `Path` makes of a URL, and would name a folder on this host.
    """
    text = os.fspath(path)
    if re.match(r"\w[\w+.-]*:/(?!/)", text):
        raise UsageError(
            f"{text!r} is neither a path nor a URL",
            remedy="pass a URL as a string, such as 's3://bucket/run'",
        )
    return "://" in text


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of what is to be written on a disk.

    Raises:
        UsageError: it is a URL.
    """
    if is_url(path):
        raise UsageError(
            f"{os.fspath(path)!r} is a URL, and this is written to a disk",
            remedy="name a path, and copy what is written there",
        )
    return Path(path)


def open_store(folder: str | os.PathLike[str] | CheckpointStore) -> CheckpointStore:
    """Return the place for the checkpoints of a run.

    Args:
        folder: a path, the URL of a folder on a file system that fsspec knows, or the place itself.

    Raises:
        UsageError: a URL is not valid, or a package for it is missing.
    """
    if not isinstance(folder, str | os.PathLike):
        return folder
    return RemoteFolder(os.fspath(folder)) if is_url(folder) else LocalFolder(folder)


def store_at(path: str | Path, *, reads_cache: bool = True) -> ReadableStore:
    """Return what is at a path: one checkpoint, or those of a run's folder, or of the ``checkpoint`` folder in it.

    Args:
        path: path or URL; it need not exist, and then holds no checkpoints.
        reads_cache: of a URL, read what is on this host from there.

    Raises:
        UsageError: a URL is not valid, or a package for it is missing.
        OSError: it can't be read.
    """
    if is_url(path):
        return _remote_store_at(os.fspath(path).rstrip("/"), reads_cache)
    folder = Path(path).absolute()
    if (folder / MANIFEST).exists() or (folder / METADATA).exists():
        return _OneCheckpoint(LocalFiles(folder))
    inner = LocalFolder(folder / "checkpoint")
    return inner if inner.names() else LocalFolder(folder)


def checkpoints_at(path: str | Path, *, reads_cache: bool = False) -> tuple[ReadableStore, list[str]]:
    """Return what is at a path, and the names of the checkpoints there, newest first.

    Args:
        path: path or URL, see `store_at`.
        reads_cache: of a URL, read what is on this host from there, and keep what is downloaded.

    Raises:
        UsageError: there are none; a URL is not valid, a package for it is missing, or it can't be read.
    """
    if is_url(path):
        RemoteFolder(os.fspath(path)).check_readable()
    elif not Path(path).exists():
        raise UsageError(f"{str(path)!r} does not exist", remedy="name a checkpoint, or a folder of them")
    try:
        store = store_at(path, reads_cache=reads_cache)
        names = store.names()
    except OSError as error:
        raise UsageError(
            f"checkpoints can't be read: {error.strerror or error}",
            remedy="check the path, and what it permits",
        ) from error
    if not names:
        where = "; check the bucket, and the folder in it" if is_url(path) else ""
        raise UsageError(
            f"{store.location!r} holds no checkpoint",
            remedy=f"name the folder passed to paceline.Checkpoint, or a checkpoint{where}",
        )
    return store, names


def _remote_store_at(url: str, reads_cache: bool) -> ReadableStore:
    parent, _, name = url.rpartition("/")
    if not parent.endswith(("/", ":")):  # else it is a bucket or a host
        files = RemoteFolder(parent, reads_cache=reads_cache).files(name)
        if files.has(MANIFEST) or files.has(METADATA):
            return _OneCheckpoint(files)
    inner = RemoteFolder(f"{url}/checkpoint", reads_cache=reads_cache)
    return inner if inner.names() else RemoteFolder(url, reads_cache=reads_cache)
