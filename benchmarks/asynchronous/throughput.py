"""What exchanging with a hub costs the workers: steps a second with a hub ÷ without one, in turns.

    python benchmarks/asynchronous/throughput.py run      (as root, on Linux)
    python benchmarks/asynchronous/throughput.py table

The machines, speeds, links and model of `loss.py`. A turn is the four workers without a hub, then with one, for the
same time.
"""

from __future__ import annotations

from statistics import median
from typing import Annotated

from hub_training import SETTINGS, train
from training import SPEEDS
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.lab_run import open_lab
from bench_harness.markdown import table
from paceline.tools.cli.shared_options import JsonOption

bench = Benchmark(__file__)


@bench.run
def run(
    rate: Annotated[str, Option(help="Rate of every link, each direction.")] = "200Mbit/s",
    fastest: Annotated[float, Option(help="Seconds of a step of the fastest machine.")] = 0.15,
    turns: Annotated[int, Option(min=1, help="Turns: without a hub, then with one.")] = 3,
    seconds: Annotated[float, Option(help="Length of each training.")] = 60.0,
    json_file: JsonOption = None,
) -> None:
    """Compare the workers' speeds with and without a hub."""
    path = bench.output(json_file, "throughput")
    settings, found = SETTINGS | {"seconds": seconds}, []
    with open_lab(len(SPEEDS), rate, title="throughput", turns=2 * turns) as (lab, folder, tick):
        for _ in range(turns):
            workers = {}
            for name in ("alone", "async"):
                workers[name] = train(lab, folder, fastest, settings, 0, alone=name == "alone")["workers"]
                tick()
            found.append(workers)
    heading = {"rate": rate, "fastest_step": fastest, "seconds": seconds, "speeds": list(SPEEDS)}
    bench.write(path, "asynchronous-throughput", heading, turns=found)


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: a row per worker and step time."""
    rows = []
    for result in (bench.read(name) for name in ("throughput", "throughput-slower")):
        for rank, speed in enumerate(result["settings"]["speeds"]):
            alone, training = (
                [turn[name][rank]["steps"] / turn[name][rank]["seconds"] for turn in result["turns"]]
                for name in ("alone", "async")
            )
            share = median(mine / other for mine, other in zip(training, alone, strict=True))
            fastest = f"{result['settings']['fastest_step']:g}"
            rows.append([fastest, str(rank), str(speed), f"{median(alone):.2f}", f"{share:.3f}"])
    titles = ["fastest step, s", "worker", "speed", "steps a second alone", "with a hub ÷ alone"]
    return {"throughput": table(titles, rows)}


if __name__ == "__main__":
    bench.main()
