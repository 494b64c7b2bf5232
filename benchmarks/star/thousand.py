"""How long a thousand workers in virtual time take: a star of 1000 workers and 1000 rounds each, least squares.

    python benchmarks/star/thousand.py

Every worker sends 1000 updates through the hub's own code, after every step or after every fourth, and takes in as many
centres. Writes ``thousand.json`` beside this file: seconds of the processor and of the wall, messages, and a digest of
the centre, which is the same everywhere that computes alike.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.result_files import check_writable, result_head
from paceline.tools.simulate.async_settings import AsyncPlan, SimulatedMachine
from paceline.tools.simulate.async_simulation import simulate_async
from paceline.tools.simulate.learning_tasks import LinearTask

HERE = Path(__file__).parent
MACHINE = SimulatedMachine(step_seconds=1.0, jitter=0.1, up=1e7, down=1e7)
CADENCES = (SyncSchedule(1), SyncSchedule(4, 1, 1))


def run(workers: int, rounds: int, cadence: SyncSchedule) -> dict[str, Any]:
    """Simulate a large star; return what it took and what came out."""
    plan = AsyncPlan(
        machines=[MACHINE] * workers, steps=cadence.every * rounds, cadence=cadence, compression=None
    )
    begun, used = time.perf_counter(), _processor_seconds()
    found = simulate_async(plan, LinearTask())
    return {
        "every": cadence.every,
        "delay": cadence.delay,
        "seconds": time.perf_counter() - begun,
        "processor_seconds": _processor_seconds() - used,
        "virtual_seconds": found.trained_seconds,
        "steps": found.steps,
        "updates": found.updates,
        "messages": found.messages,
        "refused": dict(found.refused),
        "loss": found.loss,
        "digest": found.digest,
    }


def main(
    workers: Annotated[int, typer.Option(help="How many.")] = 1000,
    rounds: Annotated[int, typer.Option(help="Of each.")] = 1000,
    json_file: JsonOption = None,
) -> None:
    """Simulate a large star, and tell how long that takes."""
    path = json_file or HERE / "thousand.json"
    check_writable(path, make_folder=True)
    run(1, 1, CADENCES[0])  # imports
    rows = []
    for cadence in CADENCES:
        rows.append(run(workers, rounds, cadence))
        print("k {every}, d {delay}: {seconds:.1f} s, {updates} updates; centre {digest}".format(**rows[-1]))
    result = result_head("asynchronous-thousand", ("paceline", "torch", "numpy")) | {
        "settings": {"workers": workers, "rounds": rounds},
        "rows": rows,
    }
    write_json(path, result)
    print(path)


def _processor_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


if __name__ == "__main__":
    run_program(main)
