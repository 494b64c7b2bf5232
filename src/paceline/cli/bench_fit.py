"""``paceline bench fit``: from measured times of collectives to a cost model in a profile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.writable import check_writable
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.plan.accuracy import Accuracy, Checked
    from paceline.plan.fit import Fit
    from paceline.plan.measured import Measured, Measurement
    from paceline.plan.profile import Profile

__all__ = ["fit"]


@dataclass(frozen=True)
class _Fitted:
    """One group of times, its fit, and what was predicted of what was held out."""

    group: Measured
    fit: Fit
    sizes: Sequence[Checked]
    ranks: Sequence[Checked]
    plain: Accuracy | None


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
    from paceline.cli.fit_table import FOOTER
    from paceline.cli.profiles import load_or_new
    from paceline.plan.measured import load, pooled

    measurements = pooled(load(path) for path in results)
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
    from paceline.cli.fit_table import fit_table
    from paceline.cli.wide_table import print_wide

    typer.echo(f"{measurement.network}: {measurement.command}")
    print_wide(fit_table([(each.group.backend, each.fit, each.ranks, each.plain) for each in fitted]))
    for each in fitted:
        typer.echo(_looks_like(each))
    typer.echo()


def _with(profile: Profile, measurement: Measurement, fitted: Sequence[_Fitted]) -> Profile:
    """Return the profile with the fits of one network, and what its calls cost."""
    from paceline.bench.facts import versions
    from paceline.cli.profiles import now
    from paceline.plan.entries import CollectiveCost, Source

    source = Source(measurement.command, now(), measurement.machine, versions(["paceline", "torch"]))
    costs = [CollectiveCost(each.group.backend, measurement.network, each.fit, source) for each in fitted]
    return profile.with_entries(collectives=costs, calls=measurement.calls(source))


def _fitted(measurement: Measurement) -> list[_Fitted]:
    """Return the fits; what can't be fitted is told, and is an error only if nothing can.

    Raises:
        UsageError: no operation has enough sizes.
    """
    from paceline.plan.accuracy import Accuracy
    from paceline.plan.fitting import fit_points, held_out_ranks, held_out_sizes
    from paceline.plan.forms import MESSAGES

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
        found.append(_Fitted(group, made, sizes, ranks, Accuracy.of(plain)))
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
    from paceline.report.canvas import require_matplotlib

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
    from paceline.report.fit_chart import MOST_SERIES, Series, fit_chart

    series = []
    for ranks in each.fit.ranks[:MOST_SERIES]:
        points = [point for point in each.group.points if point.ranks == ranks]
        checked = [found for found in each.sizes if found.ranks == ranks]
        series.append(Series(f"{ranks} ranks", each.fit, points, checked))
    title = f"{each.fit.op} on {each.group.backend}, {network}, as {each.fit.form}; hollow: held out and predicted"
    return fit_chart(series, title).save(path)
