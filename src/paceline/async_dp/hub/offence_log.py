"""Messages that no correct worker sends: who sent them, and what follows."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.async_dp.hub.membership import HubMember
from paceline.async_dp.hub.update_screening import UpdateScreen
from paceline.transport.header_layout import Header

__all__ = ["OffenceLog"]

log = logging.getLogger("paceline.async_dp")

_REPEAT_SECONDS = 60.0


class OffenceLog:
    """Names the workers that send such messages, in the log and the ledger, each at most once a minute.

    Each message counts as a refused update: enough of them put the worker in quarantine.

    Args:
        record: writes a decision to the journal.
        screen: of updates.
    """

    def __init__(self, record: Callable[..., object], screen: UpdateScreen) -> None:
        self._record, self._screen = record, screen
        self._named: dict[int, tuple[float, int]] = {}  # when it was named last, and offences since

    def add(
        self, member: HubMember | None, header: Header, why: str, now: float, *, exc_info: bool = False
    ) -> None:
        """Record a message of a worker that must not send it.

        Args:
            member: the worker; None if it is not known.
            header: of the message.
            why: what is wrong with it.
            now: seconds of a monotonic clock.
            exc_info: log the traceback of the exception that is being handled.
        """
        if member is None:
            return
        member.refused += 1
        self._screen.strike(member.number, now)
        named_at, count = self._named.get(member.number, (-_REPEAT_SECONDS, 0))
        if now - named_at < _REPEAT_SECONDS:
            self._named[member.number] = named_at, count + 1
            return
        self._named[member.number] = now, 0
        more = f" (and {count} more since it was named last)" if count else ""
        text = f"{header.kind[:40]!r}: {why[:200]}{more}"
        left = self._screen.quarantine_left(member.number, now)
        log.warning(
            "worker %s (%d) sent an invalid message: %s", member.name, member.number, text, exc_info=exc_info
        )
        self._record("offence", worker=member.number, why=text, until=round(left, 1))
