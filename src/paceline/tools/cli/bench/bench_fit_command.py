"""``paceline bench fit``: from measured times of collectives to a cost model in a profile.

What ``paceline bench fit`` prints: for each operation the algorithm, its segments, and how well they predict.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from paceline._core.format import format_seconds, format_size
from paceline.cost_model.collective_fit import CollectiveFit
from paceline.cost_model.piecewise_fit import FitSegment
from paceline.cost_model.prediction_error import CheckedPrediction, PredictionError
from paceline.errors import UsageError
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from paceline.cost_model.collective_fit import CollectiveFit
    from paceline.cost_model.measured_times import Measured, Measurement
    from paceline.cost_model.prediction_error import CheckedPrediction, PredictionError
    from paceline.cost_model.profile import Profile

__all__ = ["FOOTER", "LARGE_NBYTES", "fit", "fit_table"]


@dataclass(frozen=True)
class _Fitted:
    """One group of times, its fit, and what was predicted of what was held out."""

    group: Measured
    fit: CollectiveFit
    sizes: Sequence[CheckedPrediction]
    ranks: Sequence[CheckedPrediction]
    plain: PredictionError | None


def fit(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT...",
            help="What paceline bench collectives wrote with --json; files of one network are joined.",
        ),
    ],
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Add the fits to this profile, or make it."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Draw charts there; the profile too if --profile is not given."),
    ] = None,
) -> None:
    """Fit latency and bandwidth to measured times, and say how well they predict what was held out."""
    pass  # moved
    from paceline.cost_model.measured_times import load_measured_times, pooled
    from paceline.tools.cli.bench.profile_file import load_or_new

    measurements = pooled(load_measured_times(path) for path in results)
    path = profile_file or (None if out is None else out / "profile.json")
    profile = None if path is None else load_or_new(path)
    charts = {} if out is None else _charts(measurements, out)
    for measurement in measurements:
        fitted = _fitted(measurement)
        _show(measurement, fitted)
        for each in fitted:
            if out is not None:
                chart = charts[measurement.network, each.group]
                typer.echo(_draw(each, chart, measurement.network))
        profile = None if profile is None else _with(profile, measurement, fitted)
    typer.echo(FOOTER)
    if profile is not None and path is not None:
        profile.save(path)
        typer.echo(path)


def _show(measurement: Measurement, fitted: Sequence[_Fitted]) -> None:
    """Print the fits of one network, and which algorithms they look like."""
    pass  # moved
    from paceline.tools.console_table import print_wide

    typer.echo(f"{measurement.network}: {measurement.command}")
    print_wide(fit_table([(each.group.backend, each.fit, each.ranks, each.plain) for each in fitted]))
    for each in fitted:
        typer.echo(_looks_like(each))
    typer.echo()


def _with(profile: Profile, measurement: Measurement, fitted: Sequence[_Fitted]) -> Profile:
    """Return the profile with the fits of one network, and what its calls cost."""
    from paceline.cost_model.profile_entries import CollectiveCost, Source
    from paceline.tools.cli.bench.profile_file import now
    from paceline.tools.result_files import versions

    source = Source(measurement.command, now(), measurement.machine, versions(["paceline", "torch"]))
    costs = [CollectiveCost(each.group.backend, measurement.network, each.fit, source) for each in fitted]
    return profile.with_entries(collectives=costs, calls=measurement.calls(source))


def _fitted(measurement: Measurement) -> list[_Fitted]:
    """Return the fits; what can't be fitted is told, and is an error only if nothing can.

    Raises:
        UsageError: no operation has enough sizes.
    """
    from paceline.cost_model.algorithm_terms import MESSAGES
    from paceline.cost_model.fit_measurements import fit_points, held_out_ranks, held_out_sizes
    from paceline.cost_model.prediction_error import PredictionError

    found, refused = [], []
    for group in measurement.groups:
        name = f"{group.backend} {group.op}"
        if group.wrong:
            typer.echo(f"{name}: {group.wrong} rows left out, their results were wrong", err=True)
        try:
            made = fit_points(group.points, group.op, forms=group.forms)
        except UsageError as error:
            typer.echo(f"{name} left out: {error}", err=True)
            refused.append(name)
            continue
        sizes = held_out_sizes(group.points, group.op, forms=group.forms)
        ranks = held_out_ranks(group.points, group.op, forms=group.forms)
        plain = held_out_sizes(group.points, group.op, forms=[MESSAGES], most_segments=1, own=False)
        found.append(_Fitted(group, made, sizes, ranks, PredictionError.of(plain)))
    if not found:
        raise UsageError(
            f"nothing to fit: {', '.join(refused) or 'the file has no rows'}",
            remedy="measure three sizes or more of each operation, such as --sizes 64KiB,256KiB,1MiB,4MiB",
        )
    return found


def _looks_like(each: _Fitted) -> str:
    """Return in words which algorithm the times look like, and which come next."""
    fit, name = each.fit, f"{each.group.backend} {each.group.op}"
    if not fit.error_of_form:
        how = "as it is known" if fit.told else "assumed: measure two numbers of ranks or more to tell"
        return f"{name}: {fit.form}, {how}"
    errors = sorted(fit.error_of_form.items(), key=lambda item: item[1])
    own = fit.error_of_form[str(fit.form)]
    others = [f"{other} {100 * error:.0f} %" for other, error in errors if other != str(fit.form)][:2]
    told = f", next: {'; '.join(others)}" if others else ""
    return f"{name} looks like {fit.form}: {100 * own:.0f} % off from one number of ranks to another{told}"


def _charts(measurements: Sequence[Measurement], out: Path) -> dict[tuple[str, Measured], Path]:
    """Return where the chart of each network's operations will be drawn, once it is clear that it can be.

    Raises:
        UsageError: matplotlib is not installed, or a file can't be written.
    """
    from paceline.tools.result_files import require_matplotlib

    require_matplotlib()
    paths = {}
    for measurement in measurements:
        for group in measurement.groups:
            words = [
                "fit",
                group.op,
                group.backend,
                *([measurement.network] if len(measurements) > 1 else []),
            ]
            name = re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(words))
            paths[measurement.network, group] = out / f"{name}.png"
    for path in paths.values():
        check_writable(path, "--out", make_folder=True)
    return paths


def _draw(each: _Fitted, path: Path, network: str) -> Path:
    """Draw one fit beside its points, with as many numbers of ranks as there are colours."""
    from paceline.tools.report.charts.collective_charts import MAX_FIT_SERIES, FitSeries, fit_chart

    series = []
    for ranks in each.fit.ranks[:MAX_FIT_SERIES]:
        points = [point for point in each.group.points if point.ranks == ranks]
        checked = [found for found in each.sizes if found.ranks == ranks]
        series.append(FitSeries(f"{ranks} ranks", each.fit, points, checked))
    title = f"{each.fit.op} on {each.group.backend}, {network}, as {each.fit.form}; hollow: held out and predicted"
    return fit_chart(series, title).save(path)


LARGE_NBYTES = 1_000_000


FOOTER = (
    "α: per message. 1/β: per link of the algorithm, not bus bandwidth. ±: standard errors; none where a parameter\n"
    "is at its bound 0, or a line has no more points than parameters. n½: where half of the largest bandwidth is\n"
    "reached. Errors are medians of |predicted / measured − 1| (at most …). Sizes: every second one predicted from\n"
    "the others. Ranks: each number predicted from the others, over all sizes and over those of 1 MB and more.\n"
    "N ranks alone: their own α and β; the common ones, above them, are for other numbers of ranks.\n"
    "αP + βn: one line that knows the number of messages only. (assumed): one number of ranks can't tell."
)


def fit_table(
    rows: Sequence[tuple[str, CollectiveFit, Sequence[CheckedPrediction], PredictionError | None]],
) -> Table:
    """Return the table.

    Args:
        rows: backend, its fit, the predictions of numbers of ranks that were held out, and the error of αP + βn on
            sizes that were held out.
    """
    table = Table(box=None, pad_edge=False)
    for name in ("backend", "operation", "algorithm", "sizes"):
        table.add_column(name, no_wrap=True)
    for name in ("α", "1/β", "n½", "error, sizes", "ranks", "ranks, ≥ 1 MB", "αP + βn, sizes"):
        table.add_column(name, justify="right", no_wrap=True)
    for backend, fit, held_out, plain in rows:
        told = [
            format_size(fit.half_size(fit.ranks[-1])) if fit.segments[-1].line.beta else "",
            _share(fit.sizes_error),
            _share(fit.ranks_error),
            _share(PredictionError.of(held_out, least_nbytes=LARGE_NBYTES)),
            _share(plain),
        ]
        algorithm = f"{fit.form}{'' if fit.told else ' (assumed)'}"
        for at, segment in enumerate(fit.segments):
            names = [backend, fit.op, algorithm] if at == 0 else [""] * 3
            table.add_row(*names, *_cells(segment), *(told if at == 0 else [""] * 5))
        for ranks, segments in fit.own.items():
            for at, segment in enumerate(segments):
                alone = f"  {ranks} ranks alone" if at == 0 else ""
                table.add_row("", "", alone, *_cells(segment), *[""] * 5)
    return table


def _cells(segment: FitSegment) -> list[str]:
    """Return range of sizes, α and 1/β with their standard errors."""
    line = segment.line
    alpha = format_seconds(line.alpha) if line.alpha else "0"
    if line.alpha_error is not None:
        alpha += f" ± {format_seconds(line.alpha_error)}"
    rate = "" if not line.beta else f"{1e-9 / line.beta:.3g}"
    if line.beta and line.beta_error is not None:
        rate += f" ± {1e-9 * line.beta_error / line.beta**2:.2g}"
    return [
        f"{format_size(segment.low)} … {format_size(segment.high)}",
        alpha,
        f"{rate} GB/s" if rate else "∞",
    ]


def _share(accuracy: PredictionError | None) -> str:
    if accuracy is None:
        return ""
    return f"{100 * accuracy.median:.1f} % ({100 * accuracy.maximum:.0f} %)"
