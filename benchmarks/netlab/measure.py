"""All-reduce between hosts behind a slow switch: paceline beside gloo, in time and in bytes.

    python benchmarks/netlab/measure.py

Plays the hosts with `paceline.testing.netlab` (as root, on Linux) and writes ``2x2-1Gbit.json`` beside this file.
Both backends live in the same processes and take turns ([Note: turns] in `paceline.tools.bench.turn_statistics`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from figures import ARENA, BEST, GLOO, ORDINARY, Row, contestants_at
from rich.table import Table

from bench_harness.program import run_job, run_program
from paceline._core.files import write_json
from paceline._core.format import format_count, format_seconds
from paceline._core.units import parse_bytes
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.console_table import print_wide
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
SIZES = "64kB,1MB,10MB,100MB"
LARGE_NBYTES = 100_000_000
SHOWN = {BEST: "gloo", ORDINARY: "ordinary", ARENA: "arena"}


def main(
    hosts: Annotated[int, typer.Option(help="Hosts around the switch.")] = 2,
    ranks: Annotated[int, typer.Option(help="Ranks on each host.")] = 2,
    rate: Annotated[str, typer.Option(help="Of every link, each direction.")] = "1Gbit/s",
    sizes: Annotated[str, typer.Option(help="Of the buffer, separated by commas.")] = SIZES,
    rounds: Annotated[int | None, typer.Option(help="Turns of each contestant; else 6 to 20.")] = None,
    json_file: JsonOption = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Write <hosts>x<ranks>-<rate>.json there, unless --json is given."
        ),
    ] = HERE,
) -> None:
    """Time an all-reduce of float32 between hosts, by paceline and by gloo, and count the bytes."""
    chosen = [parse_bytes(text) // 4 * 4 for text in sizes.split(",")]
    if hosts < 2 or ranks < 1 or min(chosen) < 4 or (rounds is not None and rounds < 1):
        raise UsageError(
            f"--hosts {hosts} --ranks {ranks} --sizes {sizes}: nothing to measure",
            remedy="give 2 hosts or more, a rank or more on each, and sizes that hold a float32",
        )
    path = json_file or out / f"{hosts}x{ranks}-{rate.removesuffix('/s')}.json"
    check_writable(path, make_folder=True)
    plan = [(nbytes, *rounds_and_calls(nbytes, rounds)) for nbytes in chosen]
    rows = run(hosts, ranks, rate, plan)
    result = result_head("all-reduce-between-hosts") | {
        "settings": {
            "hosts": hosts,
            "ranks_per_host": ranks,
            "rate": rate,
            "dtype": "float32",
            "threads": 1,
            "plan": [dict(zip(("nbytes", "rounds", "calls"), each, strict=True)) for each in plan],
        },
        "rows": rows,
    }
    write_json(path, result)
    show([Row.from_json(row) for row in rows])
    print(path)


def rounds_and_calls(nbytes: int, rounds: int | None) -> tuple[int, int]:
    """Return how many rounds there are at a size, and iterations in a turn."""
    if nbytes >= LARGE_NBYTES:
        return rounds or 6, 2
    return rounds or (20 if nbytes < LARGE_NBYTES // 10 else 10), min(
        10, max(3, LARGE_NBYTES // 10 // nbytes)
    )


def run(hosts: int, ranks: int, rate: str, plan: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Make the hosts, start the ranks, show how far they are, and return what rank 0 wrote."""
    turns = sum((1 + rounds) * len(contestants_at(nbytes)) for nbytes, rounds, _ in plan)
    title = f"all-reduce, {ranks} ranks a host"
    return run_job(
        HERE / "ranks.py",
        {"sizes": plan},
        hosts=hosts,
        rate=rate,
        turns=turns,
        title=title,
        ranks_per_host=ranks,
    )


def show(rows: list[Row]) -> None:
    """Print times, ratios, and how many buffers a host sends or receives."""
    table = Table(title="all-reduce between hosts", title_justify="left", box=None, pad_edge=False)
    titles = [f"gloo ÷ {SHOWN[name]}" for name in (ORDINARY, ARENA)]
    for title in ("bytes", *SHOWN.values(), *titles, "buffers: gloo", "ordinary", "arena"):
        table.add_column(title, justify="right")
    for row in rows:
        times = [format_seconds(row.times.seconds[name]) for name in SHOWN]
        ratios = [f"{row.times.ratio(BEST, name).median:.2f}" for name in (ORDINARY, ARENA)]
        passed = [f"{row.buffers(name):.3f}" for name in (GLOO, ORDINARY, ARENA)]
        table.add_row(f"{format_count(row.times.nbytes)}B", *times, *ratios, *passed)
    print_wide(table)


if __name__ == "__main__":
    run_program(main)
