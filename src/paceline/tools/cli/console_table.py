"""Tables that are printed whole, however narrow the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["print_wide"]


def print_wide(table: Table) -> None:
    """Print a table, as wide as it needs to be, and an empty line."""
    from rich.console import Console

    console = Console(highlight=False)
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table, "")
