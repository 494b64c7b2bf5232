"""``paceline report``: one HTML page about a run."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run, as `paceline train --out` wrote it.")],
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Show the page in the web browser.")
    ] = False,
) -> None:
    """Write report.html into a run's folder: where the time went, what limits, loss, traffic, settings."""
    from paceline.report.page import write_report

    path = write_report(run)
    typer.echo(path)
    if open_page and not webbrowser.open(path.resolve().as_uri()):
        typer.echo("no web browser found: open the file by hand", err=True)
