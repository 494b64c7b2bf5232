"""ZAP handler (ZeroMQ RFC 27): decides for libzmq which workers may connect to a hub.

libzmq attaches the worker's public key to every message of an admitted connection.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from paceline.errors import UsageError
from paceline.transport.zmq.curve_keys import JOB_KEY_NAME, HubKeys, read_public_key

__all__ = ["ZapAuthenticator"]

_DOMAIN = b"paceline"
_ENDPOINT = "inproc://zeromq.zap.01"
_ANSWERS_PER_CALL = 64
_REQUEST_PARTS = 7

_Stamps = dict[Path, tuple[int, int, int]]


class ZapAuthenticator:
    """Admits workers whose public keys are recorded, or that have the job's key; without keys, all.

    The hub's own key is admitted too: its standby has it.

    Args:
        context: of the hub; it can have one authenticator.
        keys: of the hub.

    Attributes:
        has_keys: whether connections are encrypted and authenticated.
        rejected: number of rejected connections, by reason.
        problem: description of a record that can't be read; empty: none. The other records are valid.

    Raises:
        UsageError: a record can't be read.
    """

    def __init__(self, context: zmq.Context[Any], keys: HubKeys | None) -> None:
        self.rejected: Counter[str] = Counter()
        self.problem = ""
        self.has_keys = keys is not None
        self._keys = keys
        self._stamps: _Stamps | None = None
        self._admitted: dict[str, str] = {}  # names by key; replaced as a whole, since two threads use it
        self._name_of: dict[str, str] = {}  # of withdrawn keys too
        self._own = {} if keys is None else {keys.public: "hub"}  # a standby has the keys of its hub
        if keys is not None and keys.workers is None:
            self._admitted = self._name_of = {keys.shared: JOB_KEY_NAME, **self._own}
        self.reload()
        if self.problem:
            raise UsageError(self.problem, remedy="remove that file, and make the worker's keys again")
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ENDPOINT)

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Require authentication for all connections of a socket that is not bound yet."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # reject all without an authenticator
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())

    def answer_requests(self) -> None:
        """Answer pending requests; never blocks."""
        for _ in range(_ANSWERS_PER_CALL):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, number, *_ = (*request, b"", b"")
            key = self._admitted_key(request)
            status = [b"400", b"", b""] if key is None else [b"200", b"", key.encode()]
            self.socket.send_multipart([version, number, *status, b""])

    def admits(self, key: str) -> bool:
        """Return whether the connections of a key may stay; from any thread."""
        return self._keys is None or key in self._admitted

    def name_of(self, key: str) -> str:
        """Return the name of a worker's key, also if it was withdrawn; from any thread."""
        return self._name_of.get(key, key)

    def reload(self) -> bool:
        """Read the recorded public keys if any file has changed; return whether a key was withdrawn."""
        if self._keys is None or self._keys.workers is None:
            return False
        folder = self._keys.workers
        try:
            stamps = _file_stamps(folder)
        except OSError as error:
            self.problem = f"{folder} can't be read, so no worker is added or removed: {error.strerror}"
            return False
        if stamps == self._stamps:
            return False
        admitted, self._stamps, self.problem = dict(self._own), stamps, ""
        for path in sorted(stamps):
            try:
                name, public = read_public_key(path)
            except UsageError as error:
                self.problem = str(error).partition("\n")[0]
            else:
                admitted[public] = name
        withdrawn = self._admitted.keys() - admitted.keys()
        self._admitted, self._name_of = admitted, {**self._name_of, **admitted}
        return bool(withdrawn)

    def close(self) -> None:
        """Stop answering: no further worker can connect."""
        self.socket.close(0)

    def _admitted_key(self, request: list[bytes]) -> str | None:
        """Return the key of the worker that wants to connect, None to reject it."""
        if self._keys is None:
            return ""
        self.reload()
        mechanism, key = request[5:_REQUEST_PARTS] if len(request) == _REQUEST_PARTS else (b"", b"")
        public = z85.encode(key).decode() if mechanism == b"CURVE" else ""
        if public in self._admitted:
            return public
        self.rejected["unknown key"] += 1
        return None


def _file_stamps(folder: Path) -> _Stamps:
    """Return inode, modification time and size of every record."""
    stamps: _Stamps = {}
    with os.scandir(folder) as entries:
        for each in entries:
            if each.name.endswith(".pub"):
                with contextlib.suppress(FileNotFoundError):  # just removed
                    stat = each.stat()
                    stamps[Path(each.path)] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return stamps
