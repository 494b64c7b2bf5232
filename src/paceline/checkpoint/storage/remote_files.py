"""Files of a complete checkpoint on a remote file system, read in blocks.

A block is read ahead as a whole: a request costs tens of milliseconds, and readers read one piece after the other.
With a cache, a block is taken from this host's disk if it is there, and otherwise downloaded once for all of its ranks.
"""

from __future__ import annotations

import contextlib
import threading

from paceline.checkpoint.storage.file_system import FileSystem
from paceline.checkpoint.storage.host_cache import BLOCK_NBYTES, CachedFile, HostCache

__all__ = ["RemoteFile", "RemoteFiles"]


class RemoteFile:
    """An open file; see `OpenFile` for the methods.

    Args:
        files: where it is.
        path: of the file.
        nbytes: its size.
        cached: what is on this host; None: nothing.
    """

    def __init__(self, files: FileSystem, path: str, nbytes: int, cached: CachedFile | None) -> None:
        self._files, self._path, self.nbytes, self._cached = files, path, nbytes, cached
        self._last = threading.local()  # the block that a thread has read last

    def read_into(self, start: int, target: memoryview) -> None:
        if start + len(target) > self.nbytes:
            raise EOFError(f"it ends at byte {self.nbytes}")
        while len(target):
            block, offset = divmod(start, BLOCK_NBYTES)
            piece = self._block(block)[offset : offset + len(target)]
            target[: len(piece)] = piece
            start, target = start + len(piece), target[len(piece) :]

    def _block(self, block: int) -> memoryview:
        known: tuple[int, memoryview] | None = getattr(self._last, "block", None)
        if known is None or known[0] != block:
            self._last.block = known = block, memoryview(self._load(block))
        return known[1]

    def _load(self, block: int) -> bytes:
        cached = self._cached
        if cached is None:
            return self._download(block)
        if (data := cached.read(block)) is None:
            with cached.downloading(block):
                if (data := cached.read(block)) is None:
                    data = self._download(block)
                    with contextlib.suppress(OSError):  # a full disk
                        cached.write(block, data)
        return data

    def _download(self, block: int) -> bytes:
        start = block * BLOCK_NBYTES
        return self._files.read_range(self._path, start, min(start + BLOCK_NBYTES, self.nbytes))

    def close(self) -> None:
        if self._cached is not None:
            self._cached.close()


class RemoteFiles:
    """The files of a checkpoint; see `CheckpointFiles` for the methods.

    Args:
        files: where the checkpoints are.
        name: of the checkpoint.
        cache: of this host; None: read everything from the remote file system.
    """

    def __init__(self, files: FileSystem, name: str, cache: HostCache | None) -> None:
        self._files, self._name, self._cache = files, name, cache

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def location(self) -> str:
        """Its URL."""
        return f"{self._files.location}/{self._name}"

    def read(self, file: str) -> bytes:
        """Return a small file; errors as for `CheckpointFiles.read`."""
        return self._files.read(f"{self._name}/{file}")

    def has(self, file: str) -> bool:
        """Return whether a file is there; OSError: that can't be found out."""
        return self._files.exists(f"{self._name}/{file}")

    def open(self, file: str) -> RemoteFile:
        """Open a file; errors as for `CheckpointFiles.read`."""
        path = f"{self._name}/{file}"
        info = self._files.info(path)
        cached = None if self._cache is None else self._cache.open(path, info.version, info.nbytes)
        return RemoteFile(self._files, path, info.nbytes, cached)
