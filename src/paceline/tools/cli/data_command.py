"""``paceline data``: batches per rank of data dispatched in blocks, and processes that run out of data."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from paceline._core.files import write_json
from paceline._core.units import parse_list, parse_seconds
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import own, shared
from paceline.tools.console_table import print_wide
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.data.sampling.block_dispatch import DispatchScheme
    from paceline.tools.plan.dispatch_forecast import DispatchRequest
    from paceline.tools.plan.uneven_batch_outcomes import BatchBalance

__all__ = ["data", "starve"]

_OF_EPOCH = ("scheme", "block", "micro_batch_size", "seed", "drop_last", "draws")
"""Options that change nothing about the built-in example of ``--starve``."""


def data(
    context: typer.Context,
    samples: Annotated[int | None, own("N", "Samples of the data set.")] = None,
    world_size: Annotated[int | None, shared("world-size", "; default: one per --shares")] = None,
    scheme: Annotated[str, own("NAME", "Scheme: round_robin, random or shares.")] = "round_robin",
    block: Annotated[str, own("N,…", "Samples that go to one rank together.")] = "1",
    micro_batch_size: Annotated[str, shared("micro-batch-size", several=True)] = "64",
    shares: Annotated[
        str | None, own("X,…", "Shares of ranks, adding up to 1: .25,.25,.1,.4; default: equal.")
    ] = None,
    seed: Annotated[int, shared("seed", ", of scheme random")] = 0,
    drop_last: Annotated[
        bool, own(None, "Loaders without a policy drop the short last batch.", "--drop-last")
    ] = False,
    draws: Annotated[
        int | None,
        own("N", "Random draws to check the closed forms; default: 400, fewer for more than 500 ranks."),
    ] = None,
    starve: Annotated[
        bool, own(None, "Run real processes out of data, under torch and under Paceline.", "--starve")
    ] = False,
    timeout: Annotated[
        str | None, shared("timeout", " of the process group, with --starve; default: 10s")
    ] = None,
    backend: Annotated[
        str | None, shared("backend", " of the process group, with --starve: gloo (default) or paceline")
    ] = None,
    json_file: JsonOption = None,
    out: Annotated[Path | None, shared("out", ": JSON, the table as CSV, and two charts")] = None,
) -> None:
    """Forecast the samples and batches of every rank, the cost of each policy, and the safe sizes.

    Examples: paceline data --samples 50000 --world-size 7 --block 2,10,100,1000 --micro-batch-size 64

    paceline data --samples 50000 --shares .25,.25,.1,.4 --scheme shares --out results/

    paceline data --starve
    """
    example = starve and samples is None and world_size is None and shares is None
    if example and any(_is_given(context, name) for name in _OF_EPOCH):
        raise UsageError(
            "--starve without --samples runs a built-in example, which other options don't change",
            remedy="give --samples and --world-size too",
        )
    request = None
    if not example:
        sizes = (
            _sizes("--block", block, "2,10,100"),
            _sizes("--micro-batch-size", micro_batch_size, "64,4096"),
        )
        request = _request(
            samples, world_size, scheme, shares, *sizes, seed=seed, drop_last=drop_last, draws=draws
        )
    if starve:
        if out is not None:
            raise UsageError("--starve has no charts for --out", remedy="name a file with --json")
        _starve(request, 10.0 if timeout is None else parse_seconds(timeout), backend or "gloo", json_file)
        return
    for option, value in (("--timeout", timeout), ("--backend", backend)):
        if value is not None:
            raise UsageError(f"{option} needs --starve", remedy="leave it out, or add --starve")
    assert request is not None
    _forecast(request, json_file, out)


def _is_given(context: typer.Context, name: str) -> bool:
    parameter = next(each for each in context.command.params if each.name == name)
    return context.params[name] != parameter.get_default(context)


def _sizes(option: str, text: str, example: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(parse_list(option, text, int, example=example)))


def _request(
    samples: int | None,
    ranks: int | None,
    scheme: str,
    shares: str | None,
    blocks: tuple[int, ...],
    batch_sizes: tuple[int, ...],
    *,
    seed: int,
    drop_last: bool,
    draws: int | None,
) -> DispatchRequest:
    """Return the request for a forecast.

    Raises:
        UsageError: an option is not valid, or two contradict each other.
    """
    from paceline.data.sampling.rank_shares import RankShares
    from paceline.tools.plan.dispatch_forecast import DispatchRequest

    if samples is None:
        raise UsageError("no number of samples is given", remedy="pass for example --samples 50000")
    given = None if shares is None else parse_list("--shares", shares, float, example=".25,.25,.1,.4")
    if ranks is None and given is None:
        raise UsageError(
            "neither --world-size nor --shares is given", remedy="pass for example --world-size 7"
        )
    if ranks is not None and ranks < 1:
        raise UsageError(f"--world-size {ranks}", remedy="pass 1 or more")
    if scheme == "shares" and given is None:
        raise UsageError("--scheme shares without --shares", remedy="pass for example --shares .25,.25,.1,.4")
    return DispatchRequest(
        samples=samples,
        shares=RankShares.of(given, len(given or ()) if ranks is None else ranks),
        scheme=cast("DispatchScheme", scheme.replace("-", "_")),
        seed=seed,
        blocks=blocks,
        batch_sizes=batch_sizes,
        drop_last=drop_last,
        draws=draws,
    )


def _forecast(request: DispatchRequest, json_file: Path | None, out: Path | None) -> None:
    """Print the forecast, and write the files."""
    from paceline.tools.cli.data_output import dispatch_files, show_forecasts
    from paceline.tools.plan.dispatch_forecast import forecast_dispatch

    writer_of = dispatch_files(json_file, out)
    forecasts = forecast_dispatch(request)
    show_forecasts(request, forecasts)
    for path, write in writer_of.items():
        write(path, request, forecasts)
        typer.echo(path)


def _starve(request: DispatchRequest | None, timeout: float, backend: str, json_file: Path | None) -> None:
    """Run the starvation scenes with the requested data, or with the built-in example."""
    from paceline.tools.plan.uneven_batch_outcomes import BatchBalance

    balance = None
    if request is not None:
        if request.blocks[1:] or request.batch_sizes[1:]:
            raise UsageError("--starve takes one block size and one batch size", remedy="give one of each")
        balance = BatchBalance(request.dispatch(request.blocks[0]), request.batch_sizes[0], request.drop_last)
    starve(balance, timeout=timeout, backend=backend, json_file=json_file)


def starve(
    balance: BatchBalance | None = None,
    *,
    timeout: float = 10.0,
    backend: str = "gloo",
    scenes: Sequence[str] = (),
    json_file: Path | None = None,
) -> dict[str, Any]:
    """Run real processes out of data under torch and under Paceline, print a table, and return the result.

    Args:
        balance: batches per rank; None: an example of two ranks.
        timeout: of the process group, in seconds; a few scenes wait for it.
        backend: of the process group: ``"gloo"`` or ``"paceline"``.
        scenes: names of the scenes to run; empty: all.
        json_file: where to write the result; None: nowhere.

    Raises:
        UsageError: no rank starves, there is too much to run, a scene is unknown, or the file can't be written.
        RankFailed: the process that runs the scenes ended with an error.
    """
    from paceline.launch.process.local_ranks import run_ranks
    from paceline.tools.bench.starvation.starvation_cases import (
        find_cases,
        measure_starvation,
        starvation_result,
    )
    from paceline.tools.bench.starvation.starvation_settings import EXAMPLE_BALANCE, StarvationSettings

    setup = StarvationSettings(EXAMPLE_BALANCE if balance is None else balance, timeout, backend)
    wanted = find_cases(scenes)
    if json_file is not None:
        check_writable(json_file, "--json", make_folder=True)
    found = starvation_result(
        setup, measure_starvation(setup, wanted, run_ranks), shlex.join(["paceline", *sys.argv[1:]])
    )
    _show_scenes(found)
    if json_file is not None:
        write_json(json_file, found)
        typer.echo(json_file)
    return found


def _show_scenes(found: Mapping[str, Any]) -> None:
    from rich.console import Console

    from paceline.tools.bench.starvation.starvation_table import STARVATION_FOOTER

    print_wide(_scene_table(found))
    Console(highlight=False, soft_wrap=True).print(STARVATION_FOOTER, style="dim")


def _scene_table(found: Mapping[str, Any]) -> Table:
    """Return the scenes as a table; those in which every sample counted exactly are bold."""
    from rich.text import Text

    from paceline.tools.bench.starvation.starvation_table import (
        STARVATION_COLUMNS,
        is_exact,
        row_cells,
        table_title,
    )
    from paceline.tools.console_table import make_table

    table = make_table(STARVATION_COLUMNS, (), left=4, title=table_title(found["settings"]))
    table.title_style = ""
    for scene in found["scenes"]:
        table.add_row(*map(Text, row_cells(scene)), style="bold" if is_exact(scene) else "")
    return table
