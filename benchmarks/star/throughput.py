"""What a star costs its workers: steps a second beside it ÷ alone, in turns.

    python benchmarks/star/throughput.py

The machines, speeds, links and model of `loss.py`; every turn is the four workers without a hub, then with one, for the
same time. Writes ``throughput.json`` beside this file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from loss import Stage, StarSettings
from loss_figures import alone_share
from training import SPEEDS

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent


def main(
    rate: Annotated[str, typer.Option(help="Of every link, each direction.")] = "200Mbit/s",
    fastest: Annotated[float, typer.Option(help="Seconds of a step of the fastest machine.")] = 0.15,
    turns: Annotated[int, typer.Option(help="Alone, then with the star.")] = 3,
    seconds: Annotated[float, typer.Option(help="Of each.")] = 60.0,
    json_file: JsonOption = None,
) -> None:
    """Compare the workers' speeds."""
    path = json_file or HERE / "throughput.json"
    check_writable(path, make_folder=True)
    settings, found = StarSettings(seconds=seconds), []
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        Lab(len(SPEEDS), rate) as lab,
        ProgressBar("throughput", 2 * turns) as tick,
    ):
        stage = Stage(lab, Path(folder), fastest)
        for _ in range(turns):
            alone = stage.workers(settings, 0, alone=True)
            tick()
            found.append({"alone": alone, "star": stage.workers(settings, 0)})
            tick()
    result = result_head("asynchronous-throughput") | {
        "settings": {"rate": rate, "fastest_step": fastest, "seconds": seconds, "speeds": list(SPEEDS)},
        "turns": found,
    }
    write_json(path, result)
    print([round(each, 3) for each in alone_share(found)])
    print(path)


if __name__ == "__main__":
    run_program(main)
