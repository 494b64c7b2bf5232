"""Time per training step on a slow network: torch DDP and its fp16 hook, beside what Paceline sends instead.

    python benchmarks/slow-networks/step.py

Plays the hosts with `paceline.testing.netlab` (as root, on Linux), one rank on each, and writes
``step-4x200Mbit.json`` beside this file. All contestants live in the same processes and take turns ([Note: turns] in
`paceline.tools.bench.turn_statistics`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from contestants import CONTESTANTS
from figures import NO_SYNC, StepResult
from rich.table import Table
from workload import BATCH, EVERY, SIZE

from bench_harness.program import run_job, run_program
from paceline._core.files import write_json
from paceline.errors import UsageError, unknown
from paceline.tools.console_table import print_wide
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent


def main(
    hosts: Annotated[int, typer.Option(help="Hosts around the switch, a rank on each.")] = 4,
    rate: Annotated[str, typer.Option(help="Of every link, each direction.")] = "200Mbit/s",
    rounds: Annotated[int, typer.Option(help="Turns of each contestant.")] = 5,
    steps: Annotated[int, typer.Option(help="Steps of a turn, at least.")] = 2,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="This contestant, and others so named; else all.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write there; else step-<hosts>x<rate>.json."),
    ] = None,
) -> None:
    """Time training steps of the reference GPT on slow links, by contestant, and count the bytes."""
    for name in only or []:
        if name not in CONTESTANTS:
            raise unknown("contestant", name, CONTESTANTS)
    if hosts < 2 or rounds < 1 or steps < 1:
        raise UsageError(
            f"--hosts {hosts} --rounds {rounds} --steps {steps}: nothing to measure",
            remedy="give 2 hosts or more, a round or more and a step or more",
        )
    path = json_file or HERE / f"step-{hosts}x{rate.removesuffix('/s')}.json"
    check_writable(path, make_folder=True)
    names = [name for name in CONTESTANTS if not only or name in only]
    settings = {"hosts": hosts, "rate": rate, "rounds": rounds, "steps": steps, "threads": 1, "batch": BATCH}
    result = result_head("step-on-slow-network") | {
        "settings": settings | {"model": vars(SIZE), "parameters": SIZE.parameters(), "every": EVERY},
        "rows": run(hosts, rate, {"names": names, "rounds": rounds, "steps": steps}),
    }
    write_json(path, result)
    show(StepResult.load(path))
    print(path)


def run(hosts: int, rate: str, job: dict[str, Any]) -> dict[str, Any]:
    """Make the hosts, start the ranks, show how far they are, and return what rank 0 wrote."""
    turns = (1 + job["rounds"]) * len(job["names"])
    return run_job(HERE / "step_ranks.py", job, hosts=hosts, rate=rate, turns=turns, title="steps")


def show(result: StepResult) -> None:
    """Print times, how many times faster than DDP at its best, and bytes beside what was expected."""
    table = Table(title="a training step", title_justify="left", box=None, pad_edge=False)
    table.add_column("contestant", no_wrap=True)
    for title in ("seconds", "DDP's best ÷", "MB sent", "expected", "÷ expected"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in result.rows:
        times = [f"{row.median:.3f}", str(result.speedup(row) or "")]
        sent = [f"{row.sent / 1e6:.3f}", f"{row.expected_sent / 1e6:.3f}"]
        table.add_row(row.name, *times, *sent, "" if row.name == NO_SYNC else f"{row.sent_ratio:.3f}")
    print_wide(table)


if __name__ == "__main__":
    run_program(main)
