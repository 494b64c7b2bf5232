"""``paceline dispatch --starve``: what happens to ranks with unequal numbers of batches, shown with processes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.wide_table import print_wide
from paceline.cli.writable import check_writable
from paceline.durable import write_json

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.data.balance import Balance

__all__ = ["starve"]


def starve(
    balance: Balance | None = None,
    *,
    timeout: float = 10.0,
    backend: str = "gloo",
    scenes: Sequence[str] = (),
    json_file: Path | None = None,
) -> dict[str, Any]:
    """Have real processes run dry under torch and under Paceline, print a table, and return the result.

    Args:
        balance: who has how many batches; None: an example of two ranks.
        timeout: of the process group, in seconds; a few scenes wait for it.
        backend: of the process group: ``"gloo"`` or ``"paceline"``.
        scenes: names of those to show; none: all.
        json_file: where to write the result; None: nowhere.

    Raises:
        UsageError: nobody starves, there is too much to run, an unknown scene, or a file that can't be written.
        RankFailed: the process that plays the scenes ended with an error.
    """
    from paceline.bench.starvation.measure import measure, result
    from paceline.bench.starvation.scenes import scenes_named
    from paceline.bench.starvation.setup import EXAMPLE, Setup
    from paceline.launch.local import run_ranks

    setup = Setup(EXAMPLE if balance is None else balance, timeout, backend)
    wanted = scenes_named(scenes)
    if json_file is not None:
        check_writable(json_file, "--json", make_folder=True)
    found = result(setup, measure(setup, wanted, run_ranks), shlex.join(["paceline", *sys.argv[1:]]))
    _show(found)
    if json_file is not None:
        write_json(json_file, found)
        typer.echo(json_file)
    return found


def _show(found: Mapping[str, Any]) -> None:
    from rich.console import Console

    from paceline.bench.starvation.table import FOOTER

    print_wide(table(found))
    Console(highlight=False, soft_wrap=True).print(FOOTER, style="dim")


def table(found: Mapping[str, Any]) -> Table:
    """Return the scenes as a table; those in which every sample counted as it must are bold."""
    from rich.table import Table
    from rich.text import Text

    from paceline.bench.starvation.table import COLUMNS, cells, is_exact, title

    made = Table(title=title(found["settings"]), title_justify="left", pad_edge=False, box=None)
    for number, name in enumerate(COLUMNS):
        made.add_column(name, justify="left" if number < 4 else "right", no_wrap=True)
    for scene in found["scenes"]:
        made.add_row(*map(Text, cells(scene)), style="bold" if is_exact(scene) else "")
    return made
