"""``paceline report``: writes an HTML report of a run."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.tools.result_files import check_writable

__all__ = ["report"]


def report(
    run: Annotated[
        Path,
        Argument(
            help="Folder of a run: of `paceline train --out`, `paceline.Profiler` or `paceline hub serve --out`."
        ),
    ],
    profile: Annotated[
        Path | None,
        Option(
            metavar="FILE", help="Profile by `paceline bench parts`: compare with the step that it predicts."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        Option(
            "--trace",
            metavar="FILE",
            help="Also write the timeline as JSON for Perfetto or chrome://tracing.",
        ),
    ] = None,
    open_page: Annotated[
        bool, Option("--open/--no-open", help="Open the report in the web browser.")
    ] = False,
) -> None:
    """Write report.html into the folder of a run: time, bottlenecks, loss, traffic, settings.

    For the folder of a hub: contributions of workers, staleness, rejected updates, scores and traffic over time; also
    while the hub is running.
    """
    from paceline.tools.report.hub import hub_page
    from paceline.tools.report.hub.hub_records import is_hub_folder
    from paceline.tools.report.run import run_page

    if trace is not None:
        _write_trace(run, trace)
    path = hub_page.write_hub_report(run) if is_hub_folder(run) else run_page.write_run_report(run, profile)
    typer.echo(path)
    if open_page and not webbrowser.open(path.resolve().as_uri()):
        typer.echo("no web browser found: open the file manually", err=True)


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
    if not any(timeline.steps for timeline in timelines.values()):
        raise UsageError(
            f"{run} has no timeline",
            remedy="record one: paceline train, or paceline.Profiler in your own loop",
        )
    write_json(file, trace_events(timelines), indent=None)
    typer.echo(file)
