"""``paceline report``: one HTML page about a run."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    run: Annotated[
        Path,
        typer.Argument(help="Folder of a run: of `paceline train --out`, or of `paceline hub --folder`."),
    ],
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Show the page in the web browser.")
    ] = False,
) -> None:
    """Write report.html into a run's folder: where the time went, what limits, loss, traffic, settings.

    Of a hub's folder: who gave what, how old it was, what was refused, scores and traffic over time; also while the
    hub is running.
    """
    from paceline.report import hub_page, page
    from paceline.report.hub_records import holds_hub

    path = hub_page.write_report(run) if holds_hub(run) else page.write_report(run)
    typer.echo(path)
    if open_page and not webbrowser.open(path.resolve().as_uri()):
        typer.echo("no web browser found: open the file by hand", err=True)
