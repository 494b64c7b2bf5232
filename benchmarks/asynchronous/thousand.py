"""How long a thousand workers take in virtual time: 1000 rounds each, least squares.

    python benchmarks/asynchronous/thousand.py run
    python benchmarks/asynchronous/thousand.py table

Every worker sends 1000 updates through the hub's own code, after every step or after every fourth, and receives as many
parameters. The result has a digest of the hub's parameters, which is the same on every machine that computes alike.
"""

from __future__ import annotations

import resource
import time
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.async_simulation import simulate_async
from paceline.tools.simulate.learning_tasks import LinearTask
from paceline.tools.simulate.simulated_machines import SimulatedMachine

SCHEDULES = (SyncSchedule(1), SyncSchedule(4, 1, 1))

bench = Benchmark(__file__)


@bench.run
def run(
    workers: Annotated[int, Option(min=1, help="Number of workers.")] = 1000,
    rounds: Annotated[int, Option(min=1, help="Rounds of each.")] = 1000,
    json_file: JsonOption = None,
) -> None:
    """Simulate many workers, and measure how long that takes."""
    path = bench.output(json_file, "thousand")
    simulate(1, 1, SCHEDULES[0])  # imports
    rows = []
    with ProgressBar(f"{workers} workers in virtual time", len(SCHEDULES)) as tick:
        for schedule in SCHEDULES:
            rows.append(simulate(workers, rounds, schedule))
            tick()
    packages, settings = ("paceline", "torch", "numpy"), {"workers": workers, "rounds": rounds}
    bench.write(path, "asynchronous-thousand", settings, packages=packages, rows=rows)


def simulate(workers: int, rounds: int, schedule: SyncSchedule) -> dict[str, Any]:
    """Simulate; return what it took and its result."""
    machine = SimulatedMachine(step_seconds=1.0, jitter=0.1, up=1e7, down=1e7)
    plan = AsyncPlan(
        machines=[machine] * workers, steps=schedule.every * rounds, cadence=schedule, compression=None
    )
    began, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    found = simulate_async(plan, LinearTask())
    return {
        "every": schedule.every,
        "delay": schedule.delay,
        "seconds": time.perf_counter() - began,
        "processor_seconds": resource.getrusage(resource.RUSAGE_SELF).ru_utime - used,
        "virtual_seconds": found.trained_seconds,
        "steps": found.steps,
        "updates": found.updates,
        "messages": found.messages,
        "refused": dict(found.refused),
        "loss": found.loss,
        "digest": found.digest,
    }


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: a row per schedule."""
    titles = ["k, d", "local steps", "updates", "messages", "virtual time, s", "it took, s"]
    rows = [
        [
            f"{row['every']}, {row['delay']}",
            *(f"{row[name]:,}" for name in ("steps", "updates", "messages")),
            *(f"{row[name]:.0f}" for name in ("virtual_seconds", "seconds", "processor_seconds")),
        ]
        for row in bench.read("thousand")["rows"]
    ]
    return {"thousand": table([*titles, "of a processor, s"], rows)}


if __name__ == "__main__":
    bench.main()
