"""torch's store for the ranks of several hosts, on a `RequestServer`: who lacks the job's key can't use it.

[Note: two stores] Ranks of a single host use torch's FileStore in a folder that only their user can enter: the kernel
keeps others out, nothing listens, no thread or lock of Python is involved, and starting takes no longer than with
torch's TCPStore. A file does not reach other hosts, and torch has no store that authenticates. So several hosts use
this subclass of torch's Store, which torch calls back from C++.

[Note: the interpreter's lock] torch calls a store from Python's threads and, with NCCL, from threads of its own, which
take the interpreter's lock first. No method holds it while it waits for the server, so threads don't delay each other;
each call has a connection of its own, so a long `get` blocks no other call, and `clone` may return the store itself.
An instance is kept until the process ends, as torch's C++ may hold it longer than Python does. NCCL's monitor thread
calls `check` once a second (torch 2.11); programs that ended without leaving their group ended well in 5 of 5 tries.
"""

from __future__ import annotations

from base64 import b64decode
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline._core.job_key import JobKey
from paceline.world.store.key_value_state import (
    KEY_VALUE_SERVICE,
    AddToKey,
    AppendToKey,
    CheckKeys,
    CompareSet,
    CountKeys,
    DeleteKey,
    GetKeys,
    KeyRequest,
    SetKeys,
    WaitKeys,
)
from paceline.world.store.request_client import SILENT_SECONDS, ConnectionLost, RequestClient

__all__ = ["AuthenticatedStore"]

_Text = str | bytes
_kept: list[AuthenticatedStore] = []


class AuthenticatedStore(dist.Store):
    """A space of keys on the job's server; see [Note: two stores] and [Note: the interpreter's lock].

    Args:
        host: of the server.
        port: of the server.
        key: of the job; None: the server has none either.
        space: name of the space.
        timeout: seconds that `get` and `wait` wait for a key.

    Raises:
        torch.distributed.DistNetworkError: by every method, if the server is lost.
        torch.distributed.DistStoreError: by every method, if the time is up, or the request not possible.
    """

    def __init__(self, host: str, port: int, key: JobKey | None, space: str, timeout: float = 300.0) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout))
        self._client, self._space = RequestClient(host, port, key), space
        self._where = f"{host}:{port}"
        _kept.append(self)

    def set(self, key: str, value: _Text) -> None:
        self._call(SetKeys(0, self._space, {key: _bytes(value)}))

    def multi_set(self, keys: list[str], values: list[_Text]) -> None:
        self._call(SetKeys(0, self._space, dict(zip(keys, map(_bytes, values), strict=True))))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        seconds = self._seconds(None)
        found = self._call(GetKeys(0, self._space, list(keys), seconds), seconds)
        return [_decoded(value) for value in found]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds(timeout)
        self._call(WaitKeys(0, self._space, list(keys), seconds), seconds)

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Wait for keys, and return whether all exist."""
        try:
            self.wait(keys, timedelta(seconds=seconds))
        except dist.DistNetworkError:
            raise
        except dist.DistStoreError:
            return False
        return True

    def check(self, keys: list[str]) -> bool:
        return self._call(CheckKeys(0, self._space, list(keys)))

    def add(self, key: str, value: int) -> int:
        return self._call(AddToKey(0, self._space, key, value))

    def append(self, key: str, value: _Text) -> None:
        self._call(AppendToKey(0, self._space, key, _bytes(value)))

    def compare_set(self, key: str, expected_value: _Text, desired_value: _Text) -> bytes:
        request = CompareSet(0, self._space, key, _bytes(expected_value), _bytes(desired_value))
        return _decoded(self._call(request))

    def delete_key(self, key: str) -> bool:
        return self._call(DeleteKey(0, self._space, key))

    deleteKey = delete_key  # torch's C++ calls it by this name, and the next ones by theirs

    def num_keys(self) -> int:
        return self._call(CountKeys(0, self._space))

    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> AuthenticatedStore:
        return self

    def _seconds(self, timeout: timedelta | None) -> float:
        limit = self.timeout if timeout is None else timeout  # type: ignore[attr-defined] — not in torch's stub
        return limit.total_seconds()

    def _call(self, request: KeyRequest, seconds: float = 0.0) -> Any:
        try:
            reply = self._client.call(KEY_VALUE_SERVICE, request, seconds + SILENT_SECONDS)
        except ConnectionLost as error:
            raise dist.DistNetworkError(f"the job's store at {self._where} was lost: {error}") from None
        except TimeoutError as error:
            raise dist.DistNetworkError(f"the job's store at {self._where} was lost: {error}") from None
        except ValueError as error:
            raise dist.DistStoreError(f"the job's store at {self._where} refuses {error}") from None
        if reply.error:
            raise dist.DistStoreError(reply.error)
        return reply.result


def _bytes(value: _Text) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _decoded(value: str) -> bytes:
    """Return a value from a reply, in which JSON has bytes as base64."""
    return b64decode(value)
