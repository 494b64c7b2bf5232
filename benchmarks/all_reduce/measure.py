"""All-reduce between processes of one machine: paceline beside gloo, MPICH and a plain copy.

    python benchmarks/all_reduce/measure.py --ranks 2

Starts the ranks itself and writes ``2-ranks.json`` beside this file. All contestants live in the same processes, which
are ranks of MPI and of torch at once, and take turns ([Note: turns] in `paceline.tools.bench.turn_statistics`). It
needs the extra ``mpi``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import mpich
import psutil
import typer
from figures import ARENA, BEST, COPY, MPICH, ORDINARY, contestants_at
from rich.table import Table

from bench_harness.program import run_program
from bench_harness.turns import InterleavedTimes
from paceline._core.cpu_cores import usable_cores
from paceline._core.files import write_json
from paceline._core.format import format_bytes, format_count, format_seconds
from paceline._core.units import parse_bytes
from paceline.errors import UsageError
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.console_table import print_wide
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
SIZES = "4kB,16kB,64kB,256kB,1MB,4MB,16MB,100MB,1GB"
LARGE_NBYTES = (
    100_000_000  # beyond, fewer rounds; and none at all where ranks share cores, which takes minutes
)
BUFFERS = 4  # two of our own, and what gloo and MPICH work in
SHOWN = {BEST: "gloo", ORDINARY: "ordinary", ARENA: "arena", MPICH: "MPICH", COPY: "copy_"}


def main(
    ranks: Annotated[int, typer.Option(help="Processes on this machine, 2 or more.")] = 2,
    sizes: Annotated[
        str | None, typer.Option(help="Of the buffer, separated by commas; else 4 kB to 1 GB, or to 100 MB.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Turns of each contestant; else 6 to 20.")] = None,
    settings: Annotated[
        bool, typer.Option(help="Try MPICH's settings first and use the best; else its defaults.")
    ] = True,
    json_file: JsonOption = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Write <ranks>-ranks.json there, unless --json is given.")
    ] = HERE,
) -> None:
    """Time an all-reduce of float32 at each size, by paceline, gloo and MPICH, and a copy of as many bytes."""
    crowded = ranks > usable_cores()
    chosen = [parse_bytes(text) // 4 * 4 for text in (sizes or SIZES).split(",")]
    if sizes is None and crowded:
        chosen = [nbytes for nbytes in chosen if nbytes <= LARGE_NBYTES]
    check(ranks, chosen, rounds)
    path = json_file or out / f"{ranks}-ranks.json"
    check_writable(path, make_folder=True)
    plan = [(nbytes, *rounds_and_calls(nbytes, rounds, crowded)) for nbytes in chosen]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    threads = max(1, int(usable_cores() / ranks))
    level = mpich.thread_level(crowded)
    env |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(threads), "MPI4PY_RC_THREAD_LEVEL": level}
    tried = try_settings(ranks, crowded, env) if settings else []
    variables = tried[0]["variables"] if tried else {}
    rows = run(ranks, plan, {**env, **variables}, threads)
    result = result_head("all-reduce", ["paceline", "torch", "mpi4py", "mpich", "numpy"]) | {
        "settings": {
            "ranks": ranks,
            "dtype": "float32",
            "threads": threads,
            "barrier": "the contestant's own",
            "gloo_interface": env["GLOO_SOCKET_IFNAME"],
            "mpi_threads": level,
            "mpich": variables,
            "plan": [dict(zip(("nbytes", "rounds", "calls"), each, strict=True)) for each in plan],
        },
        "mpich_settings_tried": tried,
        "rows": rows,
    }
    write_json(path, result)
    show(ranks, [InterleavedTimes(**row) for row in rows])
    print(path)


def check(ranks: int, sizes: list[int], rounds: int | None) -> None:
    """Refuse what can't be measured, before anything is started."""
    if ranks < 2:
        raise UsageError(f"--ranks {ranks}: one rank has nobody to reduce with", remedy="give 2 or more")
    if rounds is not None and rounds < 1:
        raise UsageError(f"--rounds {rounds}", remedy="give 1 or more")
    if min(sizes) < 4:
        raise UsageError(f"--sizes: {min(sizes)} bytes hold no float32", remedy="give 4 bytes or more")
    needed, there = BUFFERS * ranks * max(sizes), psutil.virtual_memory().available
    if needed > there:
        raise UsageError(
            f"{ranks} ranks with buffers of {format_bytes(max(sizes))} need about {format_bytes(needed)}; "
            f"{format_bytes(there)} are available",
            remedy="give smaller --sizes",
        )


def rounds_and_calls(nbytes: int, rounds: int | None, crowded: bool) -> tuple[int, int]:
    """Return how many rounds there are at a size, and iterations in a turn."""
    if nbytes > LARGE_NBYTES:
        return rounds or 6, 2
    return rounds or (16 if crowded else 20), min(20, max(3, LARGE_NBYTES // nbytes))


def try_settings(ranks: int, crowded: bool, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return MPICH's settings with what they achieve here, the best first."""
    with ProgressBar(f"MPICH's settings, {ranks} ranks", mpich.turns(crowded)) as tick:
        return mpich.tries(ranks, crowded, env, tick)


def run(
    ranks: int, plan: list[tuple[int, int, int]], env: Mapping[str, str], threads: int
) -> list[dict[str, Any]]:
    """Start the ranks, show how far they are, and return what rank 0 wrote."""
    turns = sum((1 + rounds) * len(contestants_at(nbytes)) for nbytes, rounds, _ in plan)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        job, found = Path(folder, "job.json"), Path(folder, "found.json")
        described = {"sizes": plan, "threads": threads, "out": str(found)}
        job.write_text(json.dumps(described | {"rendezvous": f"{folder}/rendezvous"}), encoding="utf-8")
        command = mpich.command(ranks, [str(HERE / "ranks.py"), str(job)])
        with (
            ProgressBar(f"all-reduce, {ranks} ranks", turns) as tick,
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process,
        ):
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.strip() == "tick":
                        tick()
                    else:
                        print(line, end="")
            finally:
                process.terminate()  # where it has ended, this does nothing; else mpiexec ends its ranks
        if process.returncode != 0:
            raise UsageError(f"mpiexec ended with {process.returncode}", remedy="see what it wrote above")
        return json.loads(found.read_text(encoding="utf-8"))


def show(ranks: int, rows: list[InterleavedTimes]) -> None:
    """Print times, and by what factor the arena beats the others."""
    table = Table(title=f"all-reduce, {ranks} ranks", title_justify="left", box=None, pad_edge=False)
    ratios = [(BEST, ARENA), (BEST, ORDINARY), (MPICH, ARENA), (ARENA, COPY)]
    for title in ("bytes", *SHOWN.values(), *(f"{SHOWN[own]} ÷ {SHOWN[other]}" for own, other in ratios)):
        table.add_column(title, justify="right")
    for row in rows:
        times = [format_seconds(row.seconds[name]) for name in SHOWN]
        factors = [f"{row.ratio(own, other).median:.2f}" for own, other in ratios]
        table.add_row(f"{format_count(row.nbytes)}B", *times, *factors)
    print_wide(table)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # mpiexec has to end too
    run_program(main)
