"""Tables for the terminal, never truncated to its width."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["make_table", "print_wide"]


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    left: int | Collection[int] = 1,
    title: str | None = None,
) -> Table:
    """Return a table without a frame.

    Args:
        columns: their headings.
        rows: one text per column; rows with a style can be added with ``add_row``.
        left: left-aligned columns, as their indices or as the number of leading ones; the others are right-aligned.
        title: bold, left-aligned, above the table.
    """
    from rich.table import Table

    aligned_left = range(left) if isinstance(left, int) else left
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index in aligned_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def print_wide(table: Table) -> None:
    """Print a table at its full width, followed by an empty line."""
    from rich.console import Console

    console = Console(highlight=False)
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table, "")
