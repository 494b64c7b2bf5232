"""Files of a complete checkpoint on a remote file system, read in blocks.

A block is read ahead as a whole: a request costs tens of milliseconds, and readers read one piece after the other.
Threads share the latest blocks in memory, since what one reads begins where that of another ends.
With a cache, a block is taken from this host's disk if it is there, and otherwise downloaded once for all of its ranks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from paceline.checkpoint.storage.file_system import FileInfo, FileSystem
from paceline.checkpoint.storage.host_cache import BLOCK_NBYTES, CachedFile, HostCache

__all__ = ["RemoteFile", "RemoteFiles"]


_KEPT_BLOCKS = 16
"""Blocks of a checkpoint in memory: readers have 4 threads, each of which needs two at a time, and their neighbours."""


class _Blocks:
    """The latest blocks of a checkpoint's files, each loaded by one thread while others wait for it."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._kept: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()

    def get(self, file: str, block: int, load: Callable[[int], bytes]) -> bytes:
        """Return a block of a file (a text that names its version, too), loaded unless it is there.

        Raises:
            BaseException: of `load`; the next call loads it again.
        """
        if self._process != os.getpid():  # threads of the parent that load blocks are not here
            self._begin()
        with self._lock:
            known = self._kept.get((file, block))
            found = self._kept[file, block] = known or Future()
            self._kept.move_to_end((file, block))
            while len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        if known is None:
            try:
                found.set_result(load(block))
            except BaseException as error:  # noqa: BLE001 — raised below, in this thread and in those that wait
                with self._lock:
                    self._kept.pop((file, block), None)
                found.set_exception(error)
        return found.result()

    def drop(self, file: str) -> None:
        """Release the memory of a file's blocks."""
        with self._lock:
            for key in [key for key in self._kept if key[0] == file]:
                del self._kept[key]


class RemoteFile:
    """An open file; see `OpenFile` for the methods.

    Args:
        files: where it is.
        path: of the file.
        info: its size and version.
        cached: what is on this host; None: nothing.
        blocks: in memory.
    """

    def __init__(
        self, files: FileSystem, path: str, info: FileInfo, cached: CachedFile | None, blocks: _Blocks
    ) -> None:
        self._files, self._path, self.nbytes, self._cached = files, path, info.nbytes, cached
        self._blocks, self._key = blocks, f"{path} {info.version}"

    def read_into(self, start: int, target: memoryview) -> None:
        if start + len(target) > self.nbytes:
            raise EOFError(f"it ends at byte {self.nbytes}")
        while len(target):
            block, offset = divmod(start, BLOCK_NBYTES)
            piece = memoryview(self._blocks.get(self._key, block, self._load))[offset : offset + len(target)]
            target[: len(piece)] = piece
            start, target = start + len(piece), target[len(piece) :]

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

    def for_thread(self) -> contextlib.AbstractContextManager[RemoteFile]:
        return contextlib.nullcontext(self)

    def close(self) -> None:
        self._blocks.drop(self._key)
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
        self._blocks = _Blocks()

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
        return RemoteFile(self._files, path, info, cached, self._blocks)
