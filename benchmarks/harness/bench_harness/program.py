"""What programs of measurements have in common: how they begin and end, and how they start their ranks."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from paceline.errors import PacelineError
from paceline.launch.process.local_ranks import run_ranks
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar

__all__ = ["run_job", "run_program"]


def run_program(main: Callable[..., Any]) -> None:
    """Run `main` with the options of this process's command line, and exit with an error's message if it raises one.

    Args:
        main: its parameters are the options, as typer reads them.

    Raises:
        SystemExit: it has ended, well or with an error of Paceline's.
    """
    try:
        typer.run(main)
    except PacelineError as error:
        sys.exit(str(error))


def run_job(
    ranks_file: Path,
    job: Mapping[str, Any],
    *,
    hosts: int,
    rate: str | None,
    turns: int,
    title: str = "",
    ranks_per_host: int = 1,
) -> Any:
    """Start the ranks of a measurement, show how far they are, and return what rank 0 wrote.

    Args:
        ranks_file: the program of a rank. Its argument is a file with `job` as JSON and, as ``"out"``, the path to
            which rank 0 writes JSON. Rank 0 prints ``tick`` after each turn
            (`paceline.tools.bench.step.step_worker.print_tick`).
        job: what is to be done.
        hosts: of the lab. rate: of their links, such as ``"1Gbit/s"``; None: so many ranks on this host.
        turns: ticks in all. title: what is shown while they come, before the network.
        ranks_per_host: in the lab.

    Raises:
        RankFailed, HostFailed: a rank failed. LabError: no lab can be made here.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        asked, found = Path(folder, "job.json"), Path(folder, "found.json")
        asked.write_text(json.dumps({**job, "out": str(found)}), encoding="utf-8")
        program = [str(ranks_file), str(asked)]
        if rate is None:
            run_ranks(program, hosts, env={"OMP_NUM_THREADS": "1"})
        else:
            shown = f"{title}{', ' if title else ''}{hosts} hosts, {rate}"
            with Lab(hosts, rate) as lab, ProgressBar(shown, turns) as tick:
                lab.start_torchrun(program, ranks_per_host=ranks_per_host).follow(tick, turns)
        return json.loads(found.read_text(encoding="utf-8"))
