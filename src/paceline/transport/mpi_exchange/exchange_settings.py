"""Settings of ``paceline exchange``, and the memory that it needs (pure)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from paceline._core.format import format_bytes
from paceline.errors import UsageError, unknown
from paceline.transport.message_frames import FRAME_NBYTES, split_frames

__all__ = ["EXCHANGE_SHAPES", "ExchangeSettings", "check_memory"]

EXCHANGE_SHAPES = ("ring", "all-to-all")

_BUFFERS = 2  # one to send, one to receive
_PROCESS_NBYTES = 60 << 20  # a rank without its buffers: Python, numpy, MPI


@dataclass(frozen=True)
class ExchangeSettings:
    """A repeated exchange.

    Attributes:
        shape: one of `EXCHANGE_SHAPES`.
        nbytes: bytes that each rank sends per round: to the next rank, or shared among all.
        rounds: number of repetitions.
        work_seconds: computation by each rank during a round; 0: none.
        timeout: seconds without progress after which an error is raised.
        frame_nbytes: frame size of long messages.
        fault: fault to inject; empty: none.
        faulty_rank: rank that injects it.
    """

    shape: str
    nbytes: int
    _: KW_ONLY
    rounds: int = 3
    work_seconds: float = 0.0
    timeout: float = 60.0
    frame_nbytes: int = FRAME_NBYTES
    fault: str = ""
    faulty_rank: int = 0

    def check(self, ranks: int) -> None:
        """Raise UsageError unless `ranks` ranks can do this exchange."""
        if self.shape not in EXCHANGE_SHAPES:
            raise unknown("shape of exchange", self.shape, EXCHANGE_SHAPES)
        if ranks < 1:
            raise UsageError(
                f"--nproc-per-node {ranks}: no rank to exchange with", remedy="give 1 or more, for example 4"
            )
        if self.nbytes < 0 or self.rounds < 1:
            raise UsageError(
                f"--bytes {self.nbytes} --rounds {self.rounds}",
                remedy="give 0 bytes or more, 1 round or more",
            )
        if self.work_seconds < 0 or not self.timeout > 0:
            raise UsageError(
                f"--compute {self.work_seconds:g} --timeout {self.timeout:g}",
                remedy="give 0 seconds of work or more, and a time-out above 0",
            )
        split_frames(0, self.frame_nbytes)
        if self.fault and self.faulty_rank >= ranks:
            raise UsageError(
                f"--inject {self.fault}@{self.faulty_rank}: no such rank",
                remedy=f"ranks are 0 to {ranks - 1}",
            )

    def nbytes_of_rank(self, ranks: int) -> int:
        """Return the bytes that a rank sends: for an all-to-all, the largest multiple of `ranks` up to `nbytes`."""
        return self.nbytes if self.shape == "ring" else self.nbytes // ranks * ranks


def check_memory(nbytes: int, ranks_here: int, available: int) -> None:
    """Raise unless this host has the memory for its ranks, each with two buffers.

    Args:
        nbytes: size of one buffer.
        ranks_here: number of ranks on this host.
        available: available bytes.

    Raises:
        UsageError: it has not; the remedy says what would fit.
    """
    per_rank = _BUFFERS * nbytes + _PROCESS_NBYTES
    needed = ranks_here * per_rank
    if needed <= available:
        return
    fitting = max(0, (available // ranks_here - _PROCESS_NBYTES) // _BUFFERS)
    ranks = available // per_rank
    raise UsageError(
        f"{ranks_here} ranks that each send and receive {format_bytes(nbytes)} need about "
        f"{format_bytes(needed)}; {format_bytes(available)} are available",
        remedy=f"{format_bytes(fitting)} would fit (--bytes {fitting})"
        + (f", or --nproc-per-node {ranks}" if ranks else ""),
    )
