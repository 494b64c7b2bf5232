"""ZAP handler (ZeroMQ RFC 27): decides for libzmq which workers may connect to a hub.

It answers while the hub polls: a busy hub admits no new workers meanwhile.
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
from paceline.transport.zmq.curve_keys import HubKeys, read_public_key

__all__ = ["ZapAuthenticator"]

_DOMAIN = b"paceline"
_ENDPOINT = "inproc://zeromq.zap.01"
_ANSWERS_PER_CALL = 64
_REQUEST_PARTS = 7

_Stamps = dict[Path, tuple[int, int, int]]


class ZapAuthenticator:
    """Admits workers whose public keys are recorded; without keys, all.

    Args:
        context: of the hub; it can have one authenticator.
        keys: of the hub.

    Attributes:
        rejected: number of rejected connections, by reason.
        problem: description of a record that can't be read; empty: none. The other records are valid.

    Raises:
        UsageError: a record can't be read.
    """

    def __init__(self, context: zmq.Context[Any], keys: HubKeys | None) -> None:
        self.rejected: Counter[str] = Counter()
        self.problem = ""
        self._keys = keys
        self._stamps: _Stamps = {}
        self._name_of: dict[str, str] = {}
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
            name = self._admitted_name(request)
            status = [b"400", b"", b""] if name is None else [b"200", b"", name.encode()]
            self.socket.send_multipart([version, number, *status, b""])

    def reload(self) -> None:
        """Read the recorded public keys if any file has changed."""
        if self._keys is None:
            return
        try:
            stamps = _file_stamps(self._keys.workers)
        except OSError as error:
            self.problem = f"{self._keys.workers} can't be read, so no worker is added: {error.strerror}"
            return
        if stamps == self._stamps:
            return
        self._stamps, self._name_of, self.problem = stamps, {}, ""
        for path in sorted(stamps):
            try:
                name, public = read_public_key(path)
            except UsageError as error:
                self.problem = str(error).partition("\n")[0]
            else:
                self._name_of[public] = name

    def close(self) -> None:
        """Stop answering: no further worker can connect."""
        self.socket.close(0)

    def _admitted_name(self, request: list[bytes]) -> str | None:
        """Return the name of the worker that wants to connect, None to reject it."""
        if self._keys is None:
            return ""
        self.reload()
        mechanism, key = request[5:_REQUEST_PARTS] if len(request) == _REQUEST_PARTS else (b"", b"")
        name = self._name_of.get(z85.encode(key).decode()) if mechanism == b"CURVE" else None
        if name is None:
            self.rejected["unknown key"] += 1
        return name


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
