"""A disk whose n-th operation fails or kills the process."""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable
from typing import Any

__all__ = ["OPERATIONS", "FailingDisk", "die", "refuse"]

OPERATIONS = [
    (builtins, "open"),
    *((os, name) for name in ("open", "replace", "unlink", "mkdir", "rmdir", "ftruncate")),
    *((os, name) for name in ("pwritev", "fsync", "fdatasync")),
]


class FailingDisk:
    """Counts operations while it is entered; operation number `at` calls `fail`."""

    def __init__(self, at: int, fail: Callable[[], object]) -> None:
        self.at, self.count, self._fail = at, 0, fail
        self._real = [(where, name, getattr(where, name)) for where, name in OPERATIONS]

    def __enter__(self) -> FailingDisk:
        for where, name, real in self._real:
            setattr(where, name, self._counted(real))
        return self

    def __exit__(self, *_: object) -> None:
        for where, name, real in self._real:
            setattr(where, name, real)

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                self._fail()
            return real(*args, **options)

        return counted


def die() -> None:
    """End the process as a kill does."""
    os._exit(9)


def refuse() -> None:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
