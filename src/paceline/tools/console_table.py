"""Tables for the terminal, printed whole however narrow it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["make_table", "print_wide"]


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, title: str | None = None
) -> Table:
    """Return a table without a frame: the first `left` columns are flush left, the others flush right.

    Args:
        columns: their heads.
        rows: a text for each column.
        left: how many columns hold names rather than numbers.
        title: above the table, bold, flush left.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_wide(table: Table) -> None:
    """Print a table, as wide as it needs to be, and an empty line."""
    from rich.console import Console

    console = Console(highlight=False)
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table, "")
