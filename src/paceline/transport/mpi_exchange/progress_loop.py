"""Moving a round's messages while work goes on, until all are through or nothing moves any more (pure)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from paceline._core.backoff import Backoff
from paceline.errors import MissingEnvelope
from paceline.transport.mpi_exchange.incoming_messages import IncomingMessage
from paceline.transport.mpi_exchange.outgoing_messages import OutgoingMessage

__all__ = ["WorkSlice", "drive_exchange"]

WorkSlice = Callable[[], bool]
"""Does a slice of work and returns whether there was any left to do."""


def drive_exchange(
    outgoing: Sequence[OutgoingMessage],
    incoming: Sequence[IncomingMessage],
    timeout: float,
    work: WorkSlice | None = None,
) -> int:
    """Return when all messages are through and all work is done.

    Args:
        outgoing, incoming: the messages.
        timeout: seconds in which nothing moved before that counts as an error.
        work: called between looks at the messages, and on after the last, until it returns False.

    Returns:
        slices of work that were done while messages were under way.

    Raises:
        MissingEnvelope: nothing moved for `timeout` seconds; the message names who did not send or take what.
    """
    idle, moved_at, under_way = Backoff(), time.monotonic(), 0
    while not all(each.done for each in (*outgoing, *incoming)):
        moved = False
        for each in (*incoming, *outgoing):
            moved = each.advance() or moved
        if moved:
            moved_at = time.monotonic()
            idle.reset()
        if work is not None:
            if work():
                under_way += 1
                continue
            work = None
        if not moved:
            if time.monotonic() - moved_at > timeout:
                raise _stuck(outgoing, incoming, timeout)
            idle.wait()
    while work is not None and work():
        pass
    return under_way


def _stuck(
    outgoing: Sequence[OutgoingMessage], incoming: Sequence[IncomingMessage], timeout: float
) -> MissingEnvelope:
    """Return the error that names what did not come, and what was not taken."""
    missing = [each for each in incoming if not each.done]
    untaken = [each for each in outgoing if each.untaken]
    if missing:
        source = missing[0].source
        what = "; ".join(f"rank {each.source} did not send {each.next_missing}" for each in missing)
    elif untaken:
        source = untaken[0].target
        what = "; ".join(f"rank {each.target} did not take all before {each.next_frame}" for each in untaken)
    else:
        source, what = outgoing[0].source, "it sends no more itself"
    return MissingEnvelope(
        f"nothing moved for {timeout:g} s: {what}",
        source=source,
        remedy="see whether that rank still runs; raise the time-out if it may be silent for so long",
    )
