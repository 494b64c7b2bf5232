"""``paceline report``: one HTML page about a run."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.tools.result_files import check_writable

__all__ = ["report"]


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run: of `paceline train --out`, `paceline.Profiler` or `paceline hub --folder`."
        ),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Set the step that this predicts beside: of `paceline bench parts`."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Write the timeline too, as JSON for Perfetto or chrome://tracing.",
        ),
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Show the page in the web browser.")
    ] = False,
) -> None:
    """Write report.html into a run's folder: where the time went, what limits, loss, traffic, settings.

    Of a hub's folder: who gave what, how old it was, what was refused, scores and traffic over time; also while the
    hub is running.
    """
    from paceline.tools.report.hub import hub_page
    from paceline.tools.report.hub.hub_records import is_hub_folder
    from paceline.tools.report.run import run_page

    if trace is not None:
        _write_trace(run, trace)
    path = hub_page.write_hub_report(run) if is_hub_folder(run) else run_page.write_run_report(run, profile)
    typer.echo(path)
    if open_page and not webbrowser.open(path.resolve().as_uri()):
        typer.echo("no web browser found: open the file by hand", err=True)


def _write_trace(run: Path, file: Path) -> None:
    """Write the timeline of a run for Perfetto.

    Raises:
        UsageError: the file can't be written, or the run has no timeline.
    """
    from paceline.tools.report.run.perfetto_export import trace_events
    from paceline.tools.report.run.run_records import read_run
    from paceline.tools.report.run.trace_reader import read_timeline

    check_writable(file, "--trace", make_folder=True)
    timelines = {rank: read_timeline(spans) for rank, spans in read_run(run).spans_of_rank.items()}
    if not any(each.steps for each in timelines.values()):
        raise UsageError(
            f"{run} has no timeline",
            remedy="record one: paceline train, or paceline.Profiler in your own loop",
        )
    write_json(file, trace_events(timelines), indent=None)
    typer.echo(file)
