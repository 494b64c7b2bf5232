"""The keys of an elastic world in the store of its job, and a store whose waits can be ended."""

# pyright: reportIncompatibleMethodOverride=false
# (torch's stubs have only text as values)
from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.errors import WorldError

__all__ = ["AbortableStore", "StoreLink"]

_PREFIX = "elastic/"
_POLL_SECONDS = 0.002


class StoreLink:
    """Reads and writes keys of the elastic world.

    Args:
        store: of the job, on a connection of its own.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def read(self, key: str) -> bytes | None:
        """Return a value; None: there is no such key."""
        return self._store.get(_PREFIX + key) if self._store.check([_PREFIX + key]) else None

    def write(self, key: str, value: bytes) -> None:
        """Set a value."""
        self._store.set(_PREFIX + key, value)

    def create(self, key: str, value: bytes) -> bytes:
        """Set a value unless there is one; return the one that there is."""
        return self._store.compare_set(_PREFIX + key, "", value)


class AbortableStore(dist.Store):
    """A store in which waits raise once `abort` is called; process groups are formed with it.

    Args:
        store: that holds the keys.
        timeout: longest wait, in seconds.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout))
        self._store, self._aborted = store, False

    def abort(self) -> None:
        """Make waits raise, now and from now on."""
        self._aborted = True

    def set(self, key: str, value: bytes) -> None:
        self._check()
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = (self.timeout if timeout is None else timeout).total_seconds()  # type: ignore[attr-defined]
        end = time.monotonic() + limit
        while not self._store.check(list(keys)):
            self._check()
            if time.monotonic() > end:
                raise dist.DistStoreError(f"no {', '.join(keys)} within {limit:g} s")
            time.sleep(_POLL_SECONDS)
        self._check()

    def check(self, keys: list[str]) -> bool:
        self._check()
        return self._store.check(list(keys))

    def add(self, key: str, value: int) -> int:
        self._check()
        return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: bytes, desired_value: bytes) -> bytes:
        self._check()
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    deleteKey = delete_key  # torch's C++ calls it by this name, and the next ones by theirs

    def num_keys(self) -> int:
        return self._store.num_keys()

    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> AbortableStore:
        return self

    def _check(self) -> None:
        if self._aborted:
            raise WorldError("the world changed while it was formed")
