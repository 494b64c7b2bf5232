"""Messages between a `RequestServer` and its clients: what a handler of requests is, and the answers that it returns.

A request is two frames, the name of a service and a JSON object with an ``id``; every request gets one reply with the
same ``id``, at once or later. Time limits are relative, so the clocks of hosts need not agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

__all__ = ["MAX_REQUEST_NBYTES", "RequestHandler", "SentReply", "ServerReply", "encode_reply", "refuse"]

MAX_REQUEST_NBYTES = 1 << 20
"""Largest request."""

SentReply = tuple[bytes, bytes]
"""A client and the bytes for it."""


class ServerReply(msgspec.Struct, omit_defaults=True):
    """Reply to a request: a result, or an error message.

    Attributes:
        id: of the request.
        result: depends on the request.
        error: why it failed; empty: it did not.
        timeout: whether it failed because its time was up.
    """

    id: int
    result: Any = None
    error: str = ""
    timeout: bool = False


class RequestHandler(Protocol):
    """State of a server: it reads no clock and has no sockets.

    `now` is in seconds, from any start. Every method returns the replies to send.
    """

    def receive(self, client: bytes, body: bytes, now: float) -> Iterable[SentReply]:
        """Handle a request of a client."""
        ...

    def disconnected(self, client: bytes, now: float) -> Iterable[SentReply]:
        """Handle the loss of the connection to a client."""
        ...

    def advance(self, now: float) -> Iterable[SentReply]:
        """Handle what is due by `now`."""
        ...

    def next_due(self) -> float:
        """Return when `advance` has to be called; infinity: never."""
        ...


def encode_reply(id: int, result: object = None) -> bytes:
    """Return the reply with the result of a request."""
    return msgspec.json.encode(ServerReply(id, result))


def refuse(id: int, error: str, *, timeout: bool = False) -> bytes:
    """Return the reply to a request that failed."""
    return msgspec.json.encode(ServerReply(id, error=error, timeout=timeout))
