"""What `paceline exchange` is asked for, and the memory that it needs (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from paceline._core.format import format_bytes
from paceline.errors import UsageError, unknown
from paceline.transport.message_frames import FRAME_NBYTES, split_frames

__all__ = ["EXCHANGE_SHAPES", "ExchangeSettings", "check_memory"]

EXCHANGE_SHAPES = ("ring", "all-to-all")


_BUFFERS = 2
"""What is sent, and what is received."""


_PROCESS_NBYTES = 60 << 20
"""A rank without its buffers: Python, numpy, MPI."""


@dataclass(frozen=True)
class ExchangeSettings:
    """An exchange, repeated.

    Attributes:
        shape: one of `EXCHANGE_SHAPES`.
        nbytes: what each rank sends in a round: to the next rank, or shared among all.
        rounds: how often.
        work_seconds: of computing by each rank at the same time, 0 for none.
        timeout: seconds in which nothing moves before that is an error.
        frame_nbytes: long messages go in frames of so many bytes.
        fault, faulty_rank: what to do wrong, by whom; empty for nothing.
    """

    shape: str
    nbytes: int
    rounds: int = 3
    work_seconds: float = 0.0
    timeout: float = 60.0
    frame_nbytes: int = FRAME_NBYTES
    fault: str = ""
    faulty_rank: int = 0

    def check(self, ranks: int) -> None:
        """Raise unless it can be done by so many ranks.

        Raises:
            UsageError: some value is not valid.
        """
        if self.shape not in EXCHANGE_SHAPES:
            raise unknown("shape of exchange", self.shape, EXCHANGE_SHAPES)
        if ranks < 1:
            raise UsageError(f"--ranks {ranks}: nobody to exchange", remedy="give 1 or more, for example 4")
        if self.nbytes < 0 or self.rounds < 1:
            raise UsageError(
                f"--bytes {self.nbytes} --rounds {self.rounds}",
                remedy="give 0 bytes or more, 1 round or more",
            )
        if self.work_seconds < 0 or not self.timeout > 0:
            raise UsageError(
                f"--work {self.work_seconds:g} --timeout {self.timeout:g}",
                remedy="give 0 seconds of work or more, and a time-out above 0",
            )
        split_frames(0, self.frame_nbytes)
        if self.fault and self.faulty_rank >= ranks:
            raise UsageError(
                f"--inject {self.fault}@{self.faulty_rank}: there is no such rank",
                remedy=f"ranks are 0 to {ranks - 1}",
            )

    def nbytes_of_rank(self, ranks: int) -> int:
        """Return what each rank really sends: for an all-to-all, the largest multiple of `ranks` in `nbytes`."""
        return self.nbytes if self.shape == "ring" else self.nbytes // ranks * ranks


def check_memory(nbytes: int, ranks_here: int, available: int) -> None:
    """Raise unless this host has the memory for its ranks, each with two buffers.

    Args:
        nbytes: of one buffer.
        ranks_here: ranks on this host.
        available: bytes that they can get.

    Raises:
        UsageError: it has not; the message says what would fit.
    """
    needed = ranks_here * (_BUFFERS * nbytes + _PROCESS_NBYTES)
    if needed <= available:
        return
    fitting = max(0, (available // ranks_here - _PROCESS_NBYTES) // _BUFFERS)
    room = available // (_BUFFERS * nbytes + _PROCESS_NBYTES)
    raise UsageError(
        f"{ranks_here} ranks that each send {format_bytes(nbytes)} and receive as much need about "
        f"{format_bytes(needed)}; {format_bytes(available)} are available",
        remedy=f"{format_bytes(fitting)} would fit (--bytes {fitting})"
        + (f", or --ranks {room}" if room else ""),
    )
