"""Live table of ``paceline hub``: workers, their contributions, rejected updates, network traffic."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline._core.format import format_bytes, format_count, format_seconds
from paceline.tools.console_table import make_table

if TYPE_CHECKING:
    from paceline.async_dp.hub.hub import Hub
    from paceline.transport.zmq import HubExchange

__all__ = ["HubLiveTable"]

_MAX_ROWS = 40
_REFRESH_SECONDS = 0.5
_RATE_SECONDS = 2.0
_PLAIN_LINE_SECONDS = 30.0
_COLUMNS = ("worker", "", "steps", "per s", "k, d", "updates", "stale", "score", "in", "out", "refused")


class HubLiveTable:
    """Shows a hub: on a terminal as a table that is refreshed, elsewhere as a line every 30 s.

    Args:
        hub: the hub.
        exchange: its sockets.
        folder: its folder.
    """

    def __init__(self, hub: Hub, exchange: HubExchange, folder: Path) -> None:
        self._hub, self._exchange, self._folder = hub, exchange, folder
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._refreshed = self._line_printed = -float("inf")
        self._started = time.monotonic()
        self._counted: tuple[float, int, int] | None = None  # when, bytes sent, bytes received
        self._rates = (0.0, 0.0)

    def __enter__(self) -> Self:
        hub = self._hub
        state = f"resumes at update {hub.updates}" if hub.updates else "starts"
        self._print(
            f"hub of run {hub.run} at {self._exchange.address}, folder {self._folder}: {state}; "
            f"on this machine hub={str(self._folder)!r} is enough for workers"
        )
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.update(self._render(), refresh=True)
            self._live.stop()
        self._print(self._summary())

    def refresh(self) -> None:
        """Show the current state, at most twice a second."""
        now = time.monotonic()
        if now - self._refreshed < _REFRESH_SECONDS:
            return
        self._refreshed = now
        self._measure_rates(now)
        if self._console.is_terminal:
            self._live.update(self._render(), refresh=True)
        elif now - self._line_printed >= _PLAIN_LINE_SECONDS:
            self._line_printed = now
            self._print(self._summary())

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _measure_rates(self, now: float) -> None:
        sent, received = self._exchange.sent_nbytes, self._exchange.received_nbytes
        if self._counted is not None:
            since, sent_before, received_before = self._counted
            seconds = now - since
            if seconds < _RATE_SECONDS:
                return
            self._rates = (sent - sent_before) / seconds, (received - received_before) / seconds
        self._counted = now, sent, received

    def _summary(self) -> str:
        hub = self._hub
        down, up = self._rates
        loss = f", score {hub.loss:.4f}" if hub.loss == hub.loss else ""
        address = hub.welcome_meta().get("standby")
        standby = f", standby at {address}" if address else ""
        trouble = f"; nothing is answered: {' '.join(hub.storage_error.split())}" if hub.storage_error else ""
        trouble += f"; {self._exchange.problem}" if self._exchange.problem else ""
        return (
            f"{format_seconds(time.monotonic() - self._started)}: {hub.phase}, {len(hub.members.alive)} workers, "
            f"{hub.updates} updates, {format_count(int(hub.counters.samples))} samples{loss}, "
            f"{self._refused().total()} refused, {self._merges()}"
            f"{format_bytes(int(up))}/s in, {format_bytes(int(down))}/s out{standby}{trouble}"
        )

    def _merges(self) -> str:
        """Return the number of merges by quorum and what the last one was; empty with merging on arrival."""
        merging = self._hub.merging
        if merging.latest is None:
            return ""
        last = merging.latest
        late = f", {len(last['late'])} late" if last["late"] else ""
        return (
            f"{format_count(merging.merges)} merges (last: {last['updates']} updates{late}, "
            f"{format_seconds(last['grace'])} grace), "
        )

    def _refused(self) -> Counter[str]:
        exchange = self._exchange
        return self._hub.refused + exchange.refused + exchange.rejected

    def _render(self) -> Group:
        hub = self._hub
        table = make_table(_COLUMNS, [], left=2)
        members = sorted(
            hub.members, key=lambda member: (member.number not in hub.members.alive, member.name)
        )
        for member in members[:_MAX_ROWS]:
            alive = member.number in hub.members.alive
            table.add_row(
                Text(member.name[:24]),
                Text(
                    "" if alive else "silent" if member.session_id else "left", style="" if alive else "dim"
                ),
                format_count(member.steps),
                f"{member.speed:.3g}",
                f"{member.every}, {member.delay}",
                format_count(member.updates),
                f"{member.staleness:.1f}",
                "" if member.score is None else f"{member.score:.4f}",
                format_bytes(member.received_nbytes),
                format_bytes(member.sent_nbytes),
                str(member.refused),
            )
        parts: list[Table | Text] = [table]
        if len(members) > _MAX_ROWS:
            parts.append(Text(f"… and {len(members) - _MAX_ROWS} more", style="dim"))
        parts.append(Text(self._summary(), style="dim"))
        if refused := self._refused():
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(refused.items()))
            parts.append(Text(f"refused: {reasons}", style="dim"))
        if problem := self._exchange.problem:
            parts.append(Text(problem, style="yellow"))
        return Group(*parts)
