"""``paceline bench fit``: a cost model of collectives, fitted to measured times and kept in a profile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.format import format_percent, format_seconds, format_size
from paceline.errors import UsageError
from paceline.tools.cli.bench.profile_file import load_or_new_profile, measurement_source
from paceline.tools.command_options import shared
from paceline.tools.result_files import check_writable, require_matplotlib

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.cost_model.collective_prediction import CheckedPrediction, CollectiveFit, PredictionError
    from paceline.cost_model.piecewise_fit import FitSegment
    from paceline.cost_model.profile import Profile
    from paceline.tools.bench.bench_result_reader import CollectiveMeasurement, CollectiveTimes

__all__ = ["fit"]

_LARGE_NBYTES = 1_000_000
_FOOTER = (
    "α: per message. 1/β: per link of the algorithm, not bus bandwidth. ±: standard errors; none where a parameter\n"
    "is at its bound 0, or a line has no more points than parameters. n½: size at which half of the largest bandwidth\n"
    "is reached. Errors are medians of |predicted / measured − 1| (at most …). Sizes: every second one predicted from\n"
    "the others. Ranks: each number predicted from the others, over all sizes and over those of 1 MB and more.\n"
    "N ranks alone: their own α and β; the common ones, above them, are for other numbers of ranks.\n"
    "αP + βn: one line that knows the number of messages only. (assumed): one number of ranks can't identify it."
)


@dataclass(frozen=True)
class _FittedGroup:
    """One group of times with its fit and its predictions of held-out measurements.

    Attributes:
        group: the times.
        fit: of all of them.
        sizes: every second size, predicted from the others.
        ranks: each number of ranks, predicted from the others.
        plain: error of αP + βn on held-out sizes.
    """

    group: CollectiveTimes
    fit: CollectiveFit
    sizes: Sequence[CheckedPrediction]
    ranks: Sequence[CheckedPrediction]
    plain: PredictionError | None

    @property
    def name(self) -> str:
        """Backend and operation."""
        return f"{self.group.backend} {self.group.op}"


def fit(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULT...",
            help="Files that paceline bench collectives wrote with --json; those of one network are joined.",
        ),
    ],
    profile_file: Annotated[Path | None, shared("profile", " to add the fits to, or to create")] = None,
    out: Annotated[Path | None, shared("out", ": charts; the profile too if --profile is not given")] = None,
) -> None:
    """Fit latency and bandwidth to measured times, and show how well they predict held-out measurements."""
    from paceline.tools.bench.bench_result_reader import load_measured_collectives, pool_by_network

    measurements = pool_by_network(load_measured_collectives(path) for path in results)
    path = profile_file or (None if out is None else out / "profile.json")
    profile = None if path is None else load_or_new_profile(path)
    chart_of = {} if out is None else _plan_charts(measurements, out)
    for measurement in measurements:
        fitted = _fit_groups(measurement)
        _show(measurement, fitted)
        for each in fitted:
            if out is not None:
                typer.echo(_draw(each, chart_of[measurement.network, each.group], measurement.network))
        profile = None if profile is None else _add_fits(profile, measurement, fitted)
    typer.echo(_FOOTER)
    if profile is not None and path is not None:
        profile.save(path)
        typer.echo(path)


def _fit_groups(measurement: CollectiveMeasurement) -> list[_FittedGroup]:
    """Return the fits; report groups that can't be fitted.

    Raises:
        UsageError: no operation has enough sizes.
    """
    from paceline.cost_model.collective_prediction import PredictionError
    from paceline.cost_model.cost_forms import MESSAGES_FORM
    from paceline.cost_model.fit_measurements import fit_points, held_out_ranks, held_out_sizes

    found, refused = [], []
    for group in measurement.groups:
        name = f"{group.backend} {group.op}"
        if group.wrong:
            typer.echo(f"{name}: {group.wrong} rows left out, their results were wrong", err=True)
        try:
            fit = fit_points(group.points, group.op, forms=group.forms)
        except UsageError as error:
            typer.echo(f"{name} left out: {error}", err=True)
            refused.append(name)
            continue
        sizes = held_out_sizes(group.points, group.op, forms=group.forms)
        ranks = held_out_ranks(group.points, group.op, forms=group.forms)
        plain = held_out_sizes(group.points, group.op, forms=[MESSAGES_FORM], max_segments=1, per_ranks=False)
        found.append(_FittedGroup(group, fit, sizes, ranks, PredictionError.of(plain)))
    if not found:
        raise UsageError(
            f"nothing to fit: {', '.join(refused) or 'the file has no rows'}",
            remedy="measure three sizes or more of each operation, such as --bytes 64KiB,256KiB,1MiB,4MiB",
        )
    return found


def _add_fits(
    profile: Profile, measurement: CollectiveMeasurement, fitted: Sequence[_FittedGroup]
) -> Profile:
    """Return the profile with the fits, and the costs of calls, of one network."""
    from paceline.cost_model.profile_entries import CollectiveCost

    source = measurement_source(measurement.command, measurement.machine)
    costs = [CollectiveCost(each.group.backend, measurement.network, each.fit, source) for each in fitted]
    return profile.with_entries(collectives=costs, calls=measurement.calls(source))


def _show(measurement: CollectiveMeasurement, fitted: Sequence[_FittedGroup]) -> None:
    """Print the fits of one network, and the algorithms that they resemble."""
    from paceline.tools.console_table import print_wide

    typer.echo(f"{measurement.network}: {measurement.command}")
    print_wide(_fit_table(fitted))
    for each in fitted:
        typer.echo(_algorithm_line(each))
    typer.echo()


def _algorithm_line(each: _FittedGroup) -> str:
    """Return the algorithm that the times look like, and the next best ones, as text."""
    fit = each.fit
    if not fit.error_of_form:
        how = (
            "as it is known"
            if fit.identified
            else "assumed: measure two numbers of ranks or more to identify it"
        )
        return f"{each.name}: {fit.form}, {how}"
    errors = sorted(fit.error_of_form.items(), key=lambda item: item[1])
    own = fit.error_of_form[str(fit.form)]
    others = [f"{other} {format_percent(error)}" for other, error in errors if other != str(fit.form)][:2]
    then = f", next: {'; '.join(others)}" if others else ""
    return f"{each.name} looks like {fit.form}: {format_percent(own)} off from one number of ranks to another{then}"


def _fit_table(fitted: Sequence[_FittedGroup]) -> Table:
    """Return one row per segment of each fit: α, β and the errors of its predictions."""
    from paceline.cost_model.collective_prediction import PredictionError
    from paceline.tools.console_table import make_table

    columns = ("backend", "operation", "algorithm", "sizes", "α", "1/β", "n½")
    table = make_table((*columns, "error, sizes", "ranks", "ranks, ≥ 1 MB", "αP + βn, sizes"), left=4)
    for each in fitted:
        fit = each.fit
        errors = [
            format_size(fit.half_bandwidth_size(fit.ranks[-1])) if fit.segments[-1].beta else "",
            _format_error(fit.sizes_error),
            _format_error(fit.ranks_error),
            _format_error(PredictionError.of(each.ranks, least_nbytes=_LARGE_NBYTES)),
            _format_error(each.plain),
        ]
        algorithm = f"{fit.form}{'' if fit.identified else ' (assumed)'}"
        for at, segment in enumerate(fit.segments):
            names = [each.group.backend, fit.op, algorithm] if at == 0 else [""] * 3
            table.add_row(*names, *_segment_cells(segment), *(errors if at == 0 else [""] * 5))
        for each_ranks in fit.segments_of_ranks:
            for at, segment in enumerate(each_ranks.segments):
                alone = f"  {each_ranks.ranks} ranks alone" if at == 0 else ""
                table.add_row("", "", alone, *_segment_cells(segment), *[""] * 5)
    return table


def _segment_cells(segment: FitSegment) -> list[str]:
    """Return the range of sizes, α and 1/β with their standard errors."""
    alpha = format_seconds(segment.alpha) if segment.alpha else "0"
    if segment.alpha_error is not None:
        alpha += f" ± {format_seconds(segment.alpha_error)}"
    rate = "" if not segment.beta else f"{1e-9 / segment.beta:.3g}"
    if segment.beta and segment.beta_error is not None:
        rate += f" ± {1e-9 * segment.beta_error / segment.beta**2:.2g}"
    sizes = f"{format_size(segment.low)} … {format_size(segment.high)}"
    return [sizes, alpha, f"{rate} GB/s" if rate else "∞"]


def _format_error(error: PredictionError | None) -> str:
    return "" if error is None else f"{format_percent(error.median)} ({format_percent(error.maximum)})"


def _plan_charts(
    measurements: Sequence[CollectiveMeasurement], out: Path
) -> dict[tuple[str, CollectiveTimes], Path]:
    """Return the file of each network's and group's chart, after checking that it can be drawn.

    Raises:
        UsageError: matplotlib is not installed, or a file can't be written.
    """
    require_matplotlib()
    paths = {}
    for measurement in measurements:
        for group in measurement.groups:
            parts = ["fit", group.op, group.backend]
            parts += [measurement.network] if len(measurements) > 1 else []
            name = re.sub(r"[^A-Za-z0-9.-]+", "-", "-".join(parts))
            paths[measurement.network, group] = out / f"{name}.png"
    for path in paths.values():
        check_writable(path, "--out", make_folder=True)
    return paths


def _draw(each: _FittedGroup, path: Path, network: str) -> Path:
    """Draw one fit with its points, for at most one number of ranks per colour."""
    from paceline.tools.report.charts.collective_charts import MAX_FIT_SERIES, FitSeries, fit_chart

    series = []
    for ranks in each.fit.ranks[:MAX_FIT_SERIES]:
        points = [point for point in each.group.points if point.ranks == ranks]
        checked = [found for found in each.sizes if found.ranks == ranks]
        series.append(FitSeries(f"{ranks} ranks", each.fit, points, checked))
    title = f"{each.fit.op} on {each.group.backend}, {network}, as {each.fit.form}; hollow: held out and predicted"
    return fit_chart(series, title).save(path)
