"""A star in a storm, for ten minutes.

    python benchmarks/star/storm.py

Eight workers and a hub on hosts that `paceline.testing.netlab` plays (as root, on Linux): workers are killed,
stopped, cut off, the hub is killed five times, and 2 % of all envelopes are damaged, cut, repeated, lost or out of
order, in both directions. What workers were told is then held against the hub's ledger.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bench_harness.program import run_program
from bench_harness.storm.fault_plan import draw_faults
from bench_harness.storm.storm_run import Storm, count_losses
from paceline._core.files import write_json
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent


def main(
    seconds: Annotated[float, typer.Option(help="Of the storm.")] = 600.0,
    workers: Annotated[int, typer.Option(help="Hosts with one worker each.")] = 8,
    mishaps: Annotated[int, typer.Option(help="Of workers.")] = 60,
    hub_kills: Annotated[int, typer.Option(help="Of the hub.")] = 5,
    rate: Annotated[str, typer.Option(help="Of every link.")] = "200Mbit/s",
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Play a storm, and count what was lost."""
    path = json_file or HERE / "storm.json"
    check_writable(path, make_folder=True)
    plan = draw_faults(seconds, workers, mishaps, hub_kills, seed)
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        Lab(workers + 1, rate) as lab,
        ProgressBar("storm", int(seconds)) as tick,
    ):
        ticked = 0

        def passed(past: float) -> None:
            nonlocal ticked
            while ticked < int(past):
                ticked += 1
                tick()

        Storm(lab, Path(folder), seconds).play(plan, passed)
        found = count_losses(Path(folder), workers)
        lines = Path(folder, "memory.jsonl").read_text(encoding="utf-8").splitlines()
        memory = [json.loads(line) for line in lines]
    began = memory[0]["t"]
    result = result_head("storm") | {
        "settings": {
            "seconds": seconds,
            "workers": workers,
            "hub_kills": hub_kills,
            "rate": rate,
            "seed": seed,
        },
        "mishaps": [asdict(each) for each in plan],
        "found": asdict(found),
        "memory": [{"seconds": each["t"] - began, "pid": each["pid"], "rss": each["rss"]} for each in memory],
        "refused": memory[-1]["refused"],
    }
    write_json(path, result)
    print(found)
    print(path)


if __name__ == "__main__":
    run_program(main)
