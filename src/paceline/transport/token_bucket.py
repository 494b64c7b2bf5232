"""Token bucket that paces outgoing frames, and pacing of single TCP connections by the kernel.

[Note: rate limit] Over any one-second window at most 1.1 times the requested rate is sent, network headers included. A
bucket lets out at most the tokens that accrue during that second plus those it holds at its start. The margin of 0.1
is spent as follows:

    headers    a full Ethernet frame has 1514 bytes, of which TCP carries 1448 over IPv4 (÷ 1.046) and 1428 over
               IPv6 (÷ 1.060), as interfaces count them; so tokens accrue at the rate ÷ 1.06
    burst      the bucket holds 0.07 s of the rate: a thread may be that late without losing throughput
    rest       0.03: acknowledgements of incoming data (66 bytes per two frames) take 0.023 if as much is received

A frame must fit into the bucket, so frames are shorter at low rates (`max_frame_nbytes`). Below 40 kB/s even the
shortest frames don't fit, and only the mean rate is kept.

The bucket releases whole frames, and after a network stall several leave at once. SO_MAX_PACING_RATE smooths that:
the kernel keeps a connection at its rate at all times, retransmissions included (socket(7); since Linux 4.13 for TCP
without a pacing queueing discipline).
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
    "make_token_bucket",
    "max_frame_nbytes",
    "parse_share",
    "set_kernel_pacing",
]

ENVELOPE_OVERHEAD_NBYTES = 512
"""Bytes charged per envelope besides payload and meta: head, tail, framing, and a packet that is not full."""

_HEADER_FACTOR, _BURST_SECONDS = 1.06, 0.07  # see [Note: rate limit]
_MIN_FRAME_NBYTES, _MAX_FRAME_NBYTES = 1 << 10, 256 << 10
_CLOCK_SECONDS, _ROUNDING_NBYTES = 1e-8, 1e-3  # tolerances, since times and tokens are floats
_SO_MAX_PACING_RATE = 47  # <asm-generic/socket.h>; other values on SPARC and PA-RISC
_MAX_PACING_RATE = 2**32 - 2  # the kernel takes larger values for "unlimited"


class TokenBucket:
    """Token bucket: over any interval T at most rate × T + burst bytes may be sent.

    Something longer than the burst may be sent once the bucket is full, and leaves it in debt.

    Args:
        rate: bytes per second.
        burst: capacity in bytes.
        now: time in seconds on any clock; the bucket starts full. It keeps its tokens if the clock is set back, and
            fills up to its capacity if the clock jumps ahead.

    Raises:
        UsageError: rate or burst is not positive and finite.

    Example:
        >>> bucket = TokenBucket(rate=1000, burst=100, now=0.0)
        >>> bucket.take(100, now=0.0)
        >>> bucket.available(now=0.05), bucket.seconds_until(80, now=0.05)
        (50, 0.03)
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        for name, value in (("rate", rate), ("burst", burst)):
            if not 0 < value < math.inf:
                raise UsageError(
                    f"{name}={value!r} of a token bucket is not positive and finite",
                    remedy=f"give {name} > 0",
                )
        self.rate, self.burst = float(rate), float(burst)
        self._tokens, self._updated_at = self.burst, now

    def available(self, now: float) -> int:
        """Return the number of bytes that may be sent now."""
        self._refill(now)
        return max(0, math.floor(self._tokens + _ROUNDING_NBYTES))

    def take(self, nbytes: float, now: float) -> None:
        """Charge bytes that are sent now."""
        self._refill(now)
        self._tokens -= nbytes

    def seconds_until(self, nbytes: float, now: float) -> float:
        """Return the seconds until this many bytes may be sent; 0: now."""
        self._refill(now)
        missing = min(nbytes, self.burst) - self._tokens
        tolerance = _ROUNDING_NBYTES + self.rate * _CLOCK_SECONDS
        return missing / self.rate if missing > tolerance else 0.0

    def _refill(self, now: float) -> None:
        if now > self._updated_at:
            self._tokens = min(self.burst, self._tokens + (now - self._updated_at) * self.rate)
        self._updated_at = now


def make_token_bucket(rate: float, now: float) -> TokenBucket:
    """Return a bucket that keeps to a rate on the wire, see [Note: rate limit].

    Args:
        rate: bytes per second, network headers included; see `parse_share`.
        now: time in seconds.

    Raises:
        UsageError: `rate` is not positive.
    """
    return TokenBucket(rate / _HEADER_FACTOR, rate / _HEADER_FACTOR * _BURST_SECONDS, now)


def max_frame_nbytes(rate: float | None) -> int:
    """Return the largest frame payload that fits into the bucket of a rate, at most 256 KiB.

    Example:
        >>> max_frame_nbytes(7.5e6), max_frame_nbytes(375e3)
        (262144, 24252)
    """
    if rate is None:
        return _MAX_FRAME_NBYTES
    fits = int(rate / _HEADER_FACTOR * _BURST_SECONDS) - ENVELOPE_OVERHEAD_NBYTES
    return max(_MIN_FRAME_NBYTES, min(_MAX_FRAME_NBYTES, fits))


def parse_share(text: str, link: float | None = None) -> float:
    """Return the rate on the wire, in bytes per second, that a text specifies.

    Args:
        text: a rate (``"40MB/s"``, ``"300Mbit/s"``), a share of the link (``"30%"``), or a share of a given rate
            (``"30% of 200Mbit/s"``).
        link: rate of the link in bytes per second; None: unknown.

    Raises:
        UsageError: the rate is zero, exceeds the link, or is a share of an unknown rate.

    Example:
        >>> parse_share("30% of 200Mbit/s"), parse_share("30%", link=1e9)
        (7500000.0, 300000000.0)
    """
    share, of, base = (each.strip() for each in text.partition(" of "))
    whole = _parse_positive_rate(text, base) if of else link
    if share.endswith("%"):
        fraction = _parse_fraction(text, share)
        if whole is None:
            raise UsageError(
                f"{text!r} is a share of a link whose rate is not known",
                remedy=f"write {share} of 200Mbit/s",
            )
        rate = fraction * whole
    elif of:
        raise UsageError(f"{text!r}: {share!r} is not a share", remedy="write 30% of 200Mbit/s")
    else:
        rate = _parse_positive_rate(text, share)
    if link is not None and rate > link * (1 + 1e-9):
        raise UsageError(
            f"{text!r} is {format_decimal(rate)}/s, more than the link's {format_decimal(link)}/s",
            remedy="give 100% or less",
        )
    return rate


def _parse_positive_rate(text: str, rate: str) -> float:
    value = parse_rate(rate)
    if not value > 0:
        raise UsageError(f"{text!r}: the rate {rate} is zero", remedy="give a rate such as 40MB/s")
    return value


def _parse_fraction(text: str, share: str) -> float:
    try:
        value = float(share[:-1])
    except ValueError as error:
        raise UsageError(f"{text!r} is not a share", remedy="write 30%, or 40MB/s") from error
    if not 0 < value <= 100:
        raise UsageError(f"{text!r}: a share is more than 0 % and at most 100 %", remedy="write 30%")
    return value / 100


def set_kernel_pacing(fd: int, rate: float, *, port: int | None = None) -> bool:
    """Have the kernel pace a TCP connection, and return whether it does.

    Args:
        fd: descriptor of the socket; it stays open.
        rate: bytes per second, without network headers.
        port: required port of either end, since the descriptor of a closed socket may have been reused.

    Raises:
        UsageError: `rate` is not positive.
    """
    if not rate > 0:
        raise UsageError(f"rate={rate!r} is not positive", remedy="give bytes per second > 0")
    if not sys.platform.startswith("linux"):
        return False
    try:
        duplicate = os.dup(fd)
    except OSError:
        return False  # closed
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return False  # not a socket
    with connection:
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if connection.type != socket.SOCK_STREAM or not _has_port(connection, port):
                return False
            wanted = min(_MAX_PACING_RATE, max(1, round(min(rate, _MAX_PACING_RATE))))
            connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, wanted.to_bytes(4, sys.byteorder))
            actual = connection.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 4)
        except OSError:
            return False  # not supported by the kernel, or the connection is closed
    return int.from_bytes(actual, sys.byteorder) == wanted


def _has_port(connection: socket.socket, port: int | None) -> bool:
    return port is None or port in (connection.getsockname()[1], connection.getpeername()[1])
