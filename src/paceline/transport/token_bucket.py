"""How fast something may leave: a bucket of tokens, and a share of a link (pure).

[Note: the promise] Over any window of one second no more than 1.1 times the asked share of a link goes out, with the
headers of the network. A bucket lets go at most what comes in during that second and what it holds at its start.
The tenth is spent as follows:

    headers    a full frame has 1514 bytes on Ethernet, of which TCP carries 1448 over IPv4 (÷ 1.046) and 1428 over
               IPv6 (÷ 1.060), as interfaces count them; so tokens come at the rate ÷ 1.06
    burst      0.07 s of the rate is what a bucket holds: as much as a thread may be late without losing any
    rest       0.03: acknowledgements of what comes in, 66 bytes for two frames, are 0.023 where as much comes in

A frame must fit into the bucket, so it is shorter where the rate is low: see `max_frame_nbytes`. Below 40 kB/s even the
shortest frames don't fit, and only the mean is kept.

Having the kernel spread what one connection sends: SO_MAX_PACING_RATE, a smoother beside the bucket.

A bucket lets frames go; when the network has stalled, several of them leave at once as soon as it moves again. The
kernel keeps one connection to its rate at all times, what it sends again included (socket(7), since Linux 4.13 for
TCP without a queueing discipline for it).
"""

from __future__ import annotations

import math
import os
import socket
import sys

from paceline._core.format import format_decimal
from paceline._core.units import parse_rate
from paceline.errors import UsageError

__all__ = [
    "ENVELOPE_OVERHEAD_NBYTES",
    "TokenBucket",
    "max_frame_nbytes",
    "set_kernel_pacing",
    "make_token_bucket",
    "parse_share",
]

ENVELOPE_OVERHEAD_NBYTES = 512
"""What an envelope is counted as besides its payload and meta: head, tail, framing, and a packet that is not full."""


_HEADERS = 1.06


_BURST_SECONDS = 0.07


_LEAST_FRAME_NBYTES, _MOST_FRAME_NBYTES = 1 << 10, 256 << 10


_CLOCK_SECONDS, _ROUNDING_NBYTES = 1e-8, 1e-3  # times and tokens are floats


class TokenBucket:
    """Says how many bytes may leave now, so that over any time T no more than rate × T + burst do.

    Something longer than the burst leaves when the bucket is full, and what it took too much is paid back first.

    Args:
        rate: bytes per second.
        burst: most bytes that it holds.
        now: time in seconds, of any clock; the bucket is full. If the clock is put back, the bucket goes on from
            there; if it leaps ahead, the bucket is full and no more.

    Raises:
        UsageError: a rate or burst that can't be.

    Example:
        >>> bucket = TokenBucket(rate=1000, burst=100, now=0.0)
        >>> bucket.take(100, now=0.0)
        >>> bucket.room(now=0.05), bucket.wait(80, now=0.05)
        (50, 0.03)
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        for name, value in (("rate", rate), ("burst", burst)):
            if not 0 < value < math.inf:
                raise UsageError(
                    f"{name}={value!r}: a bucket needs more than nothing, and an end",
                    remedy=f"give {name} > 0",
                )
        self.rate, self.burst = float(rate), float(burst)
        self._tokens, self._at = self.burst, now

    def room(self, now: float) -> int:
        """Return how many bytes may leave now."""
        self._fill(now)
        return max(0, math.floor(self._tokens + _ROUNDING_NBYTES))

    def take(self, nbytes: float, now: float) -> None:
        """Note that so many bytes leave."""
        self._fill(now)
        self._tokens -= nbytes

    def wait(self, nbytes: float, now: float) -> float:
        """Return the seconds until so many bytes may leave, 0: now."""
        self._fill(now)
        missing = min(nbytes, self.burst) - self._tokens
        near_enough = _ROUNDING_NBYTES + self.rate * _CLOCK_SECONDS
        return missing / self.rate if missing > near_enough else 0.0

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self.burst, self._tokens + (now - self._at) * self.rate)
        self._at = now


def make_token_bucket(rate: float, now: float) -> TokenBucket:
    """Return the bucket that keeps to a rate on the wire, see [Note: the promise].

    Args:
        rate: bytes per second, headers of the network included; see `parse_share`.
        now: time in seconds.

    Raises:
        UsageError: `rate` is not above 0.
    """
    return TokenBucket(rate / _HEADERS, rate / _HEADERS * _BURST_SECONDS, now)


def max_frame_nbytes(rate: float | None) -> int:
    """Return the longest payload of a frame that fits into the bucket of a rate, at most 256 KiB.

    Example:
        >>> frame_nbytes(7.5e6), frame_nbytes(375e3)
        (262144, 24252)
    """
    if rate is None:
        return _MOST_FRAME_NBYTES
    fits = int(rate / _HEADERS * _BURST_SECONDS) - ENVELOPE_OVERHEAD_NBYTES
    return max(_LEAST_FRAME_NBYTES, min(_MOST_FRAME_NBYTES, fits))


def parse_share(text: str, link: float | None = None) -> float:
    """Return the rate in bytes per second that a text asks for, on the wire.

    Args:
        text: a rate (``"40MB/s"``, ``"300Mbit/s"``), a share of the link (``"30%"``), or one of a rate that is told
            (``"30% of 200Mbit/s"``).
        link: the link's rate in bytes per second, None if it is not known.

    Raises:
        UsageError: it asks for nothing, for more than there is, or for a share of nobody knows what.

    Example:
        >>> parse_share("30% of 200Mbit/s"), parse_share("30%", link=1e9)
        (7500000.0, 300000000.0)
    """
    share, of, told = (each.strip() for each in text.partition(" of "))
    whole = _rate(text, told) if of else link
    if share.endswith("%"):
        part = _part(text, share)
        if whole is None:
            raise UsageError(
                f"{text!r} is a share of a link whose rate is not known",
                remedy=f"write {share} of 200Mbit/s",
            )
        rate = part * whole
    elif of:
        raise UsageError(f"{text!r}: {share!r} is no share", remedy="write 30% of 200Mbit/s")
    else:
        rate = _rate(text, share)
    if link is not None and rate > link * (1 + 1e-9):
        raise UsageError(
            f"{text!r} is {format_decimal(rate)}/s, more than the link's {format_decimal(link)}/s",
            remedy="ask for 100% or less",
        )
    return rate


def _rate(text: str, rate: str) -> float:
    value = parse_rate(rate)
    if not value > 0:
        raise UsageError(f"{text!r}: nothing goes at {rate}", remedy="give a rate such as 40MB/s")
    return value


def _part(text: str, share: str) -> float:
    try:
        value = float(share[:-1])
    except ValueError as error:
        raise UsageError(f"{text!r} is no share", remedy="write 30%, or 40MB/s") from error
    if not 0 < value <= 100:
        raise UsageError(f"{text!r}: a share is more than 0 % and at most 100 %", remedy="write 30%")
    return value / 100


_SO_MAX_PACING_RATE = 47  # <asm-generic/socket.h>; SPARC and PA-RISC have another


_MOST = 2**32 - 2  # above it the kernel takes a rate for none


def set_kernel_pacing(fd: int, rate: float, *, port: int | None = None) -> bool:
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
