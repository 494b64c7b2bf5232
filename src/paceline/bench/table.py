"""Rows as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from paceline.bench.entries import TITLES
from paceline.bench.results import LARGEST_DRIFT, Row

__all__ = ["FOOTER", "table"]

FOOTER = (
    "Milliseconds are medians over rounds in which all contestants took turns; the slowest rank counts.\n"
    "÷ DDP: against torch DDP's best row (*), round by round. ÷ peer: against torch doing the same kind of work.\n"
    "Forward and backward are computing, as without synchronisation; exposed is what they take beyond that, and\n"
    "waiting in the optimizer's step. Calls, milliseconds per call and MiB: one rank, one step.\n"
    "Peak: memory of model, optimizer and training, beyond what the process held before."
)


def table(rows: Sequence[Row]) -> Table:
    """Return the rows of one model as a table; the fastest synchronised row is bold, a wrong one red."""
    first = rows[0]
    made = Table(title=f"{first.model}, {first.ranks} ranks", title_justify="left", pad_edge=False, box=None)
    made.add_column("strategy", no_wrap=True)
    for name in ("bucket", "step", "÷ DDP", "÷ peer", "forward", "backward", "exposed", "optimizer"):
        made.add_column(name, justify="right", no_wrap=True)
    for name in ("calls", "ms/call", "MiB", "peak MiB"):
        made.add_column(name, justify="right", no_wrap=True)
    fastest = min((row for row in rows if row.entry.synchronises), key=lambda row: row.step_ms)
    for row in rows:
        wrong = row.exact is False
        style = "red" if wrong else "bold" if row is fastest else ""
        made.add_row(*_cells(row), style=style)
        if wrong:
            made.add_row(f"  WRONG: {row.drift:.1e} > {LARGEST_DRIFT:g}", style="red")
    return made


def _cells(row: Row) -> list[str]:
    split = row.split_ms
    times = [f"{value:.1f}" for value in (split.forward, split.backward, split.exposed, split.optimizer)]
    return [
        TITLES[row.entry.strategy] + (" *" if row.best_ddp else ""),
        row.entry.bucket,
        f"{row.step_ms:.1f}",
        f"{row.ratio_to_ddp:.2f}",
        "" if row.ratio_to_peer is None else f"{row.ratio_to_peer:.2f}",
        *times,
        f"{row.calls:g}",
        "" if row.ms_per_call is None else f"{row.ms_per_call:.2f}",
        f"{row.mib:.2f}",
        "" if row.peak_mib is None else f"{row.peak_mib:.1f}",
    ]
