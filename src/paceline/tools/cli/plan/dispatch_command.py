"""``paceline dispatch``: tells what dealing data in blocks does to batches, before anything runs.

``paceline dispatch --starve``: what happens to ranks with unequal numbers of batches, shown with processes.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import JsonOption, numbers_of
from paceline.tools.console_table import print_wide
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.tools.plan.balance_report import BatchBalance
    from paceline.tools.plan.dispatch_forecast import DispatchRequest

__all__ = ["dispatch", "starve"]

_USUAL = ("round_robin", "1", "64", None, 0, False, None)
"""Scheme, block, batch size, shares, seed, drop last and draws, where nobody asks for others."""


def dispatch(
    samples: Annotated[int | None, typer.Option(help="How many there are.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--workers", "--ranks", help="How many share them; else as many as --shares."),
    ] = None,
    scheme: Annotated[str, typer.Option(help="round_robin, random or shares.")] = "round_robin",
    block: Annotated[
        str, typer.Option(help="Samples that go to one rank together; several by commas.")
    ] = "1",
    batch_size: Annotated[str, typer.Option(help="Samples of a full batch; several by commas.")] = "64",
    shares: Annotated[
        str | None, typer.Option(help="One a rank, 1 in all, by commas: .25,.25,.1,.4; else all the same.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of scheme random.")] = 0,
    drop_last: Annotated[
        bool, typer.Option("--drop-last", help="Loaders without a policy leave out the short last batch.")
    ] = False,
    draws: Annotated[
        int | None,
        typer.Option(
            help="Draws at random beside the closed forms; else 400, fewer for more than 500 ranks."
        ),
    ] = None,
    starve: Annotated[
        bool,
        typer.Option("--starve", help="Have real processes run dry, under torch and under Paceline."),
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Of --starve: the process group's, in seconds; else 10.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Of --starve: the process group's, gloo or paceline; else gloo.")
    ] = None,
    json_file: JsonOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write JSON, the table as CSV, and two charts there."),
    ] = None,
) -> None:
    """Tell who gets what, who starves, what each policy costs and which sizes are safe, before anything runs.

    Examples: paceline dispatch --samples 50000 --workers 7 --block 2,10,100,1000 --batch-size 64

    paceline dispatch --samples 50000 --shares .25,.25,.1,.4 --scheme shares --out results/

    paceline dispatch --starve
    """
    from paceline.tools.cli.plan.dispatch_output import plan_files, show
    from paceline.tools.plan.dispatch_forecast import forecast_dispatch

    settings = (scheme, block, batch_size, shares, seed, drop_last, draws)
    if starve:
        example = samples is None and ranks is None and shares is None
        if example and settings != _USUAL:
            raise UsageError(
                "--starve without --samples plays an example of its own, which other options don't change",
                remedy="give --samples and --workers too",
            )
        _starve(None if example else _asked(samples, ranks, *settings), timeout, backend, json_file, out)
        return
    for option, value in (("--timeout", timeout), ("--backend", backend)):
        if value is not None:
            raise UsageError(f"{option} is of --starve", remedy="leave it out, or add --starve")
    asked = _asked(samples, ranks, *settings)
    writer_of = plan_files(json_file, out)
    found = forecast_dispatch(asked)
    show(asked, found)
    command = shlex.join(["paceline", *sys.argv[1:]])
    for paths, write in writer_of.items():
        write(paths, asked, found, command)
        typer.echo("\n".join(map(str, paths)))


def _starve(
    asked: DispatchRequest | None,
    timeout: float | None,
    backend: str | None,
    json_file: Path | None,
    out: Path | None,
) -> None:
    """Show starvation with real processes: of what is asked for, or of an example."""
    pass  # moved
    from paceline.tools.plan.balance_report import BatchBalance

    if out is not None:
        raise UsageError("--starve has no charts for --out", remedy="name a file by --json")
    balance = None
    if asked is not None:
        if asked.blocks[1:] or asked.batch_sizes[1:]:
            raise UsageError("--starve plays one block size and one batch size", remedy="name one of each")
        balance = BatchBalance(asked.dispatch(asked.blocks[0]), asked.batch_sizes[0], asked.drop_last)
    group = {"timeout": 10.0 if timeout is None else timeout, "backend": backend or "gloo"}
    starve(balance, **group, json_file=json_file)


def _asked(
    samples: int | None,
    ranks: int | None,
    scheme: str,
    block: str,
    batch_size: str,
    shares: str | None,
    seed: int,
    drop_last: bool,
    draws: int | None,
) -> DispatchRequest:
    """Return what the options ask for.

    Raises:
        UsageError: one that makes no sense, or two that don't fit.
    """
    from paceline.data.sampling.block_dispatch import Scheme
    from paceline.data.sampling.rank_shares import RankShares
    from paceline.tools.plan.dispatch_forecast import DispatchRequest

    if samples is None:
        raise UsageError("how many samples are there?", remedy="pass for example --samples 50000")
    given = None if shares is None else numbers_of("--shares", shares, float, ".25,.25,.1,.4")
    if ranks is None and given is None:
        raise UsageError(
            "how many ranks are there? Neither --workers nor --shares says it", remedy="pass --workers 7"
        )
    if ranks is not None and ranks < 1:
        raise UsageError(f"--workers {ranks}", remedy="pass 1 or more")
    if scheme == "shares" and given is None:
        raise UsageError("--scheme shares without --shares", remedy="pass for example --shares .25,.25,.1,.4")
    return DispatchRequest(
        samples,
        RankShares.of(given, len(given or ()) if ranks is None else ranks),
        cast(Scheme, scheme.replace("-", "_")),
        seed,
        tuple(dict.fromkeys(numbers_of("--block", block, int, "2,10,100"))),
        tuple(dict.fromkeys(numbers_of("--batch-size", batch_size, int, "64,4096"))),
        drop_last,
        draws,
    )


def starve(
    balance: BatchBalance | None = None,
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
    from paceline.launch.process.local_ranks import run_ranks
    from paceline.tools.bench.starvation.scene_setup import EXAMPLE, Setup
    from paceline.tools.bench.starvation.starvation_scenes import measure, result, scenes_named

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

    from paceline.tools.bench.starvation.starvation_table import FOOTER

    print_wide(table(found))
    Console(highlight=False, soft_wrap=True).print(FOOTER, style="dim")


def table(found: Mapping[str, Any]) -> Table:
    """Return the scenes as a table; those in which every sample counted as it must are bold."""
    from rich.table import Table
    from rich.text import Text

    from paceline.tools.bench.starvation.starvation_table import COLUMNS, cells, is_exact, title

    made = Table(title=title(found["settings"]), title_justify="left", pad_edge=False, box=None)
    for number, name in enumerate(COLUMNS):
        made.add_column(name, justify="left" if number < 4 else "right", no_wrap=True)
    for scene in found["scenes"]:
        made.add_row(*map(Text, cells(scene)), style="bold" if is_exact(scene) else "")
    return made
