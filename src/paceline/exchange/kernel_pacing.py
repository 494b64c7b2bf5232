"""Having the kernel spread what one connection sends: SO_MAX_PACING_RATE, a smoother beside the bucket.

A bucket lets frames go; when the network has stalled, several of them leave at once as soon as it moves again. The
kernel keeps one connection to its rate at all times, what it sends again included (socket(7), since Linux 4.13 for
TCP without a queueing discipline for it).
"""

from __future__ import annotations

import os
import socket
import sys

from paceline.errors import UsageError

__all__ = ["kernel_pacing"]

_SO_MAX_PACING_RATE = 47  # <asm-generic/socket.h>; SPARC and PA-RISC have another
_MOST = 2**32 - 2  # above it the kernel takes a rate for none


def kernel_pacing(fd: int, rate: float, *, port: int | None = None) -> bool:
    """Have the kernel hold a TCP connection to a rate, and return whether it does.

    Args:
        fd: of its socket; it stays open.
        rate: bytes per second, without the headers of the network.
        port: that one of its ends must have: the number of a socket that was closed may be another one's by now.

    Raises:
        UsageError: `rate` is not above 0.
    """
    if not rate > 0:
        raise UsageError(f"rate={rate!r} is no rate", remedy="give bytes per second > 0")
    if not sys.platform.startswith("linux"):
        return False
    try:
        own = os.dup(fd)
    except OSError:
        return False  # it is closed
    try:
        connection = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        return False  # it is no socket
    with connection:
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if connection.type != socket.SOCK_STREAM or not _has_end(connection, port):
                return False
            asked = min(_MOST, max(1, round(min(rate, _MOST))))
            connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, asked.to_bytes(4, sys.byteorder))
            told = connection.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 4)
        except OSError:
            return False  # an older kernel, or the connection has ended
    return int.from_bytes(told, sys.byteorder) == asked


def _has_end(connection: socket.socket, port: int | None) -> bool:
    return port is None or port in (connection.getsockname()[1], connection.getpeername()[1])
