"""The table of an exchange, a row for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from paceline.exchange.measure import Measured, Row
from paceline.exchange.settings import ExchangeSettings
from paceline.units import format_count, format_seconds, format_size

__all__ = ["FOOTER", "table"]

FOOTER = (
    "Checksums: what the senders told of their messages, and what was found of those received.\n"
    "Seconds: median round without work. Overlap: part of the shorter of work and exchange that is hidden\n"
    "behind the longer (1: all of it, 0: none). Under way: share of the work done while messages were."
)


def table(settings: ExchangeSettings, measured: Measured) -> Table:
    """Return the rows as a table; a rank that did not get what was sent to it is red."""
    size = format_size(measured.rows[0].nbytes)
    rounds = f"{measured.rounds} round{'s' * (measured.rounds > 1)}"
    title = f"{settings.shape}, {len(measured.rows)} ranks, {size} each, {rounds}"
    made = Table(title=title, title_justify="left", pad_edge=False, box=None)
    for name in ("rank", "to", "from"):
        made.add_column(name, no_wrap=True)
    for name in ("bytes", "told by senders", "received", "seconds", "rate", "overlap", "under way"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in measured.rows:
        made.add_row(*_cells(row), style="" if row.right else "bold red")
    return made


def _cells(row: Row) -> list[str]:
    return [
        str(row.rank),
        _ranks(row.sent_to),
        _ranks(row.received_from),
        str(row.nbytes),
        row.told_checksum,
        row.received_checksum,
        format_seconds(row.seconds),
        f"{format_count(row.nbytes_per_second)}B/s",
        "" if row.overlap is None else f"{row.overlap:.2f}",
        "" if row.under_way is None else f"{row.under_way:.0%}",
    ]


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: one by its number, all of several as "all"."""
    return str(ranks[0]) if len(ranks) == 1 else "all"
