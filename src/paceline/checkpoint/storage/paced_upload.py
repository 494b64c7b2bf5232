"""Uploads files in parts, at a limited rate.

An upload that fails starts again from the beginning of its file, as long as it gets further each time; implementations
repeat single parts themselves. A file counts once its size at the other end is right.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.checkpoint.storage.file_system import FileSystem, file_info
from paceline.checkpoint.storage.host_cache import BlockChecksums
from paceline.transport.token_bucket import TokenBucket

__all__ = ["RateLimit", "upload"]

_STRIDE_NBYTES = 256 << 10
_PART_NBYTES, _MOST_PARTS = 8 << 20, 9000  # S3 has at most 10,000 parts, of 5 MiB or more


class RateLimit:
    """Limits the rate at which threads of this process write.

    Args:
        rate: bytes per second; None: unlimited.
        now: returns the time in seconds.
        sleep: waits.

    Raises:
        UsageError: `rate` is not positive.
    """

    def __init__(
        self,
        rate: float | None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now, self._sleep, self._lock = now, sleep, threading.Lock()
        self._bucket = None if rate is None else TokenBucket(rate, _STRIDE_NBYTES, now())

    def wait(self, nbytes: int) -> None:
        """Wait until this many bytes may be written."""
        if self._bucket is None:
            return
        with self._lock:
            while (seconds := self._bucket.seconds_until(nbytes, self._now())) > 0:
                self._sleep(seconds)
            self._bucket.take(nbytes, self._now())


def upload(files: FileSystem, local: Path, path: str, limit: RateLimit) -> tuple[bytes, str]:
    """Upload a file, and return the checksums of its blocks, and its version at the other end.

    Args:
        files: where to.
        local: the file.
        path: its path there.
        limit: of the rate.

    Raises:
        OSError: it can't be read or uploaded.
    """
    nbytes, furthest = local.stat().st_size, 0
    size = {} if files.renames else {"block_size": max(_PART_NBYTES, _round_up(nbytes // _MOST_PARTS))}

    def action(fs: Any, full: str) -> tuple[bytes, str]:
        nonlocal furthest
        checksums, written = BlockChecksums(), 0
        with (
            open(local, "rb", buffering=0) as source,
            _completed_or_discarded(fs.open(full, "wb", **size)) as target,
        ):
            while stride := source.read(_STRIDE_NBYTES):
                limit.wait(len(stride))
                target.write(stride)
                checksums.update(stride)
                written += len(stride)
                furthest = max(furthest, written)
        arrived = file_info(fs, full)
        if arrived.nbytes != nbytes:
            raise OSError(errno.EIO, f"{arrived.nbytes} bytes arrived instead of {nbytes}")
        return checksums.finish(), arrived.version

    return files.retry(path, files.in_folder(action), reached=lambda: furthest)


def _round_up(nbytes: int) -> int:
    return -(-nbytes // (1 << 20)) << 20


@contextlib.contextmanager
def _completed_or_discarded(file: Any) -> Iterator[Any]:
    """Close a file that is being uploaded; after an error, don't complete it, as its own `close` would."""
    try:
        yield file
        file.close()
    except BaseException:
        with contextlib.suppress(Exception):
            file.discard()
        with contextlib.suppress(Exception):
            file.closed = True  # where that can be set, `close` would complete it
        with contextlib.suppress(Exception):
            file.close()
        raise
