"""Loss against bytes: many ways to synchronise, each at the same number of steps.

    python benchmarks/slow-networks/tradeoff.py

Trains the reference model `mini` in four processes of this machine, once for each of `ways.TRADEOFF`, and writes
``tradeoff.json`` beside this file. What is learnt does not depend on the network, and what is sent is told by the
library; `step.py` and the tests hold that against interfaces.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from loss import BATCH, SIZE, Stage
from ways import TRADEOFF

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.errors import unknown
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
RANKS, EVERY = 4, 100


def main(
    only: Annotated[list[str] | None, typer.Option(help="Names of ways; else all.")] = None,
    seed: Annotated[int, typer.Option(help="Of parameters and data.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Train in many ways, and tell what each reached and sent."""
    known = [way.name for way in TRADEOFF]
    for name in only or []:
        if name not in known:
            raise unknown("way", name, known)
    path = json_file or HERE / "tradeoff.json"
    check_writable(path, make_folder=True)
    ways = [way for way in TRADEOFF if not only or way.name in only]
    rows = []
    turns = sum(way.steps // EVERY for way in ways)
    with ProgressBar("loss against bytes", turns) as tick, closing(Stage(RANKS, None, tick)) as here:
        for way in ways:
            curve = here.run(way, seed=seed, every=EVERY)
            rows.append({"way": asdict(way), "curve": curve})
            last = curve[-1]
            print(f"{way.name}: loss {last['loss']:.4f}, {last['foretold'] / 1e6:.0f} MB", flush=True)
    result = result_head("loss-against-bytes") | {
        "settings": {
            "ranks": RANKS,
            "size": SIZE,
            "batch": BATCH,
            "threads": 1,
            "seed": seed,
            "parameters": gpt_size(SIZE).parameters(),
        },
        "rows": rows,
    }
    write_json(path, result)
    print(path)


if __name__ == "__main__":
    run_program(main)
