"""``paceline bench compare``: two results of ``bench collectives`` beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["compare", "compare_results"]


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="What to compare with.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="What is compared.")],
) -> None:
    """Compare two results of bench collectives: the ratio of times, case by case, and what else differs."""
    compare_results(first, second)


def compare_results(first: Path, second: Path) -> None:
    """Print the comparison of two result files.

    Raises:
        UsageError: one can't be read, or holds something else.
    """
    from paceline.bench.collectives.compare import compare as compared
    from paceline.bench.collectives.compare import in_words, table
    from paceline.bench.collectives.results import read_result
    from paceline.cli.wide_table import print_wide

    found = compared(read_result(first), read_result(second))
    for line in found.differing:
        typer.echo(f"differs: {line}")
    for name, rows in ((first, found.only_first), (second, found.only_second)):
        for row in rows:
            typer.echo(f"only in {name}: {in_words(row)}")
    if found.pairs:
        print_wide(table(found.pairs))
    else:
        typer.echo("no case is in both")
