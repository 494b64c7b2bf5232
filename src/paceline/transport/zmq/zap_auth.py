"""Who may come to a hub: answers libzmq, which asks for every handshake (ZAP, ZeroMQ RFC 27).

It is asked while the hub polls: a hub that does something else for long lets nobody new in meanwhile.
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
_ANSWERS_A_LOOK = 64
_REQUEST_PARTS = 7

_Seen = dict[Path, tuple[int, int, int]]


class ZapAuthenticator:
    """Admits the workers that are recorded, by their public keys; without keys everybody.

    Args:
        context: the hub's; there is one door in it.
        keys: the hub's.

    Attributes:
        turned_away: how many were not admitted, by why.
        trouble: what is wrong with the records of workers, "" if nothing is; the others count.

    Raises:
        UsageError: a record can't be read.
    """

    def __init__(self, context: zmq.Context[Any], keys: HubKeys | None) -> None:
        self.rejected: Counter[str] = Counter()
        self.problem = ""
        self._keys = keys
        self._seen: _Seen = {}
        self._name_of: dict[str, str] = {}
        self.read_again()
        if self.problem:
            raise UsageError(self.problem, remedy="remove that file, and make the worker's keys again")
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ENDPOINT)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Have every handshake of a socket that is not bound yet come to this door."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no door, no entry
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())

    def look(self) -> None:
        """Answer who is asked for; never waits."""
        for _ in range(_ANSWERS_A_LOOK):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, number, *_ = (*request, b"", b"")
            name = self._named(request)
            told = [b"400", b"", b""] if name is None else [b"200", b"", name.encode()]
            self.socket.send_multipart([version, number, *told, b""])

    def read_again(self) -> None:
        """Read who is admitted if any record has changed."""
        if self._keys is None:
            return
        try:
            seen = _stamps(self._keys.workers)
        except OSError as error:
            self.problem = f"{self._keys.workers} can't be read, so nobody is added: {error.strerror}"
            return
        if seen == self._seen:
            return
        self._seen, self._name_of, self.problem = seen, {}, ""
        for path in sorted(seen):
            try:
                name, public = read_public_key(path)
            except UsageError as error:
                self.problem = str(error).partition("\n")[0]
            else:
                self._name_of[public] = name

    def close(self) -> None:
        """Close the door: nobody comes in any more."""
        self.socket.close(0)

    def _named(self, request: list[bytes]) -> str | None:
        """Return the name of the worker that asks to come in, None: it may not."""
        if self._keys is None:
            return ""
        self.read_again()
        mechanism, key = request[5:_REQUEST_PARTS] if len(request) == _REQUEST_PARTS else (b"", b"")
        name = self._name_of.get(z85.encode(key).decode()) if mechanism == b"CURVE" else None
        if name is None:
            self.rejected["an unknown key"] += 1
        return name


def _stamps(folder: Path) -> _Seen:
    """Return what tells whether a record has changed."""
    seen: _Seen = {}
    with os.scandir(folder) as entries:
        for each in entries:
            if each.name.endswith(".pub"):
                with contextlib.suppress(FileNotFoundError):  # it has just been removed
                    stat = each.stat()
                    seen[Path(each.path)] = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    return seen
