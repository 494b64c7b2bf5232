"""Tables in Markdown files that are filled from results, so that no figure is ever typed (pure).

A file marks the place of a generated block with comments that no reader sees::

    <!-- figures: begin -->
    | …
    <!-- figures: end -->
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import UsageError

__all__ = ["fill", "table"]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Return a Markdown table.

    Args:
        columns: their titles.
        rows: the cells of each row.
        words: how many columns, from the left, hold words; numbers are set to the right.

    Example:
        >>> print(table(["size", "ms"], [["4 kB", "0.06"]]))
        | size | ms |
        |---|--:|
        | 4 kB | 0.06 |
    """
    rule = ["---"] * words + ["--:"] * (len(columns) - words)
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def fill(text: str, name: str, block: str) -> str:
    """Return `text` with what stands between the marks of `name` replaced by `block`.

    Raises:
        UsageError: the marks are not there, once each and in order.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed or begin in rest or end in after:
        raise UsageError(f"no place for {name!r}", remedy=f"put {begin} and {end} around it, once")
    return f"{before}{begin}\n{block}\n{end}{after}"
