"""The live table of ``paceline hub``: workers, what each contributes, what was refused, what the network carries."""

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

if TYPE_CHECKING:
    from paceline.async_dp.hub.hub import Hub
    from paceline.transport.zmq import HubExchange

__all__ = ["HubTable"]

_MOST_ROWS = 40
_LINE_SECONDS = 30.0


class HubTable:
    """Shows a hub: on a terminal a table that is kept up to date, else a line from time to time.

    Args:
        hub: that is shown. exchange: its carrier. folder: of the hub.
    """

    def __init__(self, hub: Hub, exchange: HubExchange, folder: Path) -> None:
        self._hub, self._exchange, self._folder = hub, exchange, folder
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._looked = self._lined = -float("inf")
        self._began = time.monotonic()
        self._bytes = (0.0, 0, 0)
        self._rates = (0.0, 0.0)

    def __enter__(self) -> Self:
        hub = self._hub
        state = f"goes on at update {hub.updates}" if hub.updates else "begins"
        self._console.print(
            f"hub of run {hub.run} at {self._exchange.address}, folder {self._folder}: {state}",
            highlight=False,
            soft_wrap=True,
        )
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.update(self._picture(), refresh=True)
            self._live.stop()
        self._console.print(self._line(), highlight=False, soft_wrap=True)

    def look(self) -> None:
        """Show how things are, at most twice a second."""
        now = time.monotonic()
        if now - self._looked < 0.5:
            return
        self._looked = now
        self._measure(now)
        if self._console.is_terminal:
            self._live.update(self._picture(), refresh=True)
        elif now - self._lined >= _LINE_SECONDS:
            self._lined = now
            self._console.print(self._line(), highlight=False, soft_wrap=True)

    def _measure(self, now: float) -> None:
        """Note what passes in a second."""
        since, sent, received = self._bytes
        if now - since >= 2.0:
            if since:
                seconds = now - since
                self._rates = (
                    (self._exchange.sent_nbytes - sent) / seconds,
                    (self._exchange.received_nbytes - received) / seconds,
                )
            self._bytes = now, self._exchange.sent_nbytes, self._exchange.received_nbytes

    def _line(self) -> str:
        hub = self._hub
        down, up = self._rates
        loss = f", score {hub.loss:.4f}" if hub.loss == hub.loss else ""
        trouble = f"; nothing is answered: {' '.join(hub.storage_error.split())}" if hub.storage_error else ""
        return (
            f"{format_seconds(time.monotonic() - self._began)}: {hub.phase}, {len(hub.members.alive)} workers, "
            f"{hub.updates} updates, {format_count(int(hub.counters.samples))} samples{loss}, "
            f"{self._refused().total()} refused, "
            f"{format_bytes(int(up))}/s in, {format_bytes(int(down))}/s out{trouble}"
        )

    def _refused(self) -> Counter[str]:
        exchange = self._exchange
        return self._hub.refused + exchange.refused + exchange.turned_away

    def _picture(self) -> Group:
        hub = self._hub
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in (
            "worker",
            "",
            "steps",
            "per s",
            "k, d",
            "updates",
            "stale",
            "score",
            "in",
            "out",
            "refused",
        ):
            table.add_column(name, justify="left" if name in ("worker", "") else "right", no_wrap=True)
        members = sorted(hub.members, key=lambda each: (each.number not in hub.members.alive, each.name))
        for each in members[:_MOST_ROWS]:
            alive = each.number in hub.members.alive
            table.add_row(
                Text(each.name[:24]),
                Text(
                    "" if alive else "silent" if each.session_id else "left", style="dim" if not alive else ""
                ),
                format_count(each.steps),
                f"{each.speed:.3g}",
                f"{each.every}, {each.delay}",
                format_count(each.updates),
                f"{each.staleness:.1f}",
                "" if each.score is None else f"{each.score:.4f}",
                format_bytes(each.received_nbytes),
                format_bytes(each.sent_nbytes),
                str(each.refused),
            )
        rest = len(members) - _MOST_ROWS
        parts = [table, Text(self._line(), style="dim")]
        if rest > 0:
            parts.insert(1, Text(f"… and {rest} more", style="dim"))
        refused = self._refused()
        if refused:
            told = ", ".join(f"{why} {count}" for why, count in sorted(refused.items()))
            parts.append(Text(f"refused: {told}", style="dim"))
        return Group(*parts)
