"""``paceline report``: writes an HTML report of a run, or a comparison of two."""

from __future__ import annotations

import webbrowser
from collections.abc import Mapping, Sequence
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
    other: Annotated[Path | None, Argument(help="Folder of another run: compare it with the first.")] = None,
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
    torch_traces: Annotated[
        list[Path] | None,
        Option(
            "--torch-trace",
            metavar="FILE",
            help="With --trace: add a trace of torch.profiler; once per rank.",
        ),
    ] = None,
    open_page: Annotated[
        bool, Option("--open/--no-open", help="Open the report in the web browser.")
    ] = False,
) -> None:
    """Write report.html into the folder of a run: time, bottlenecks, loss, traffic, settings.

    For the folder of a hub: contributions of workers, staleness, rejected updates, scores and traffic over time; also
    while the hub is running.

    With two folders, write compare-RUN.html into the second one: which run is faster and by how much, where the time
    goes, the losses, and the settings that differ.
    """
    from paceline.tools.report.hub import hub_page
    from paceline.tools.report.hub.hub_records import is_hub_folder
    from paceline.tools.report.run import run_page

    if torch_traces and trace is None:
        raise UsageError("--torch-trace adds to a timeline", remedy="name its file: --trace timeline.json")
    if other is not None:
        path = _compare(run, other, alone={"--profile": profile, "--trace": trace})
    else:
        if trace is not None:
            _write_trace(run, trace, torch_traces or [])
        hub = is_hub_folder(run)
        path = hub_page.write_hub_report(run) if hub else run_page.write_run_report(run, profile)
    typer.echo(path)
    if open_page and not webbrowser.open(path.resolve().as_uri()):
        typer.echo("no web browser found: open the file manually", err=True)


def _compare(run: Path, other: Path, alone: Mapping[str, Path | None]) -> Path:
    """Write the comparison of two runs and return its path.

    Args:
        run: folder of the first run.
        other: folder of the second run.
        alone: options that apply to one run only.

    Raises:
        UsageError: a folder is a hub's, the same twice, or holds no run; or an option of `alone` was given.
    """
    from paceline.tools.report.compare.comparison_page import write_comparison
    from paceline.tools.report.hub.hub_records import is_hub_folder

    for option, value in alone.items():
        if value is not None:
            raise UsageError(f"{option} is for one run", remedy=f"paceline report {other} {option} {value}")
    for folder in (run, other):
        if is_hub_folder(folder):
            raise UsageError(
                f"{folder} is of a hub; only synchronous runs are compared",
                remedy=f"paceline report {folder}",
            )
    if run.resolve() == other.resolve():
        raise UsageError(f"{run} and {other} are the same run", remedy="name two runs")
    return write_comparison(run, other)


def _write_trace(run: Path, file: Path, torch_traces: Sequence[Path]) -> None:
    """Write the timeline of a run for Perfetto, with traces of ``torch.profiler`` if there are any.

    Raises:
        UsageError: the file can't be written, the run has no timeline, or a trace of torch does not fit it.
    """
    from paceline.tools.report.run.perfetto_export import trace_events
    from paceline.tools.report.run.run_records import read_run
    from paceline.tools.report.run.torch_trace import merge_torch_traces
    from paceline.tools.report.run.trace_reader import read_timeline

    check_writable(file, "--trace", make_folder=True)
    timelines = {rank: read_timeline(spans) for rank, spans in read_run(run).spans_of_rank.items()}
    if not any(timeline.steps for timeline in timelines.values()):
        raise UsageError(
            f"{run} has no timeline",
            remedy="record one: paceline train, or paceline.Profiler in your own loop",
        )
    events = merge_torch_traces(trace_events(timelines), timelines, torch_traces)
    write_json(file, events, indent=None)
    typer.echo(file)
