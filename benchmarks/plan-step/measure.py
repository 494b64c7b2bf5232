"""Profiles, and steps of all contestants, on hosts around a slow switch and on one host.

    python benchmarks/plan-step/measure.py

Plays the hosts with `paceline.testing.netlab` (as root, on Linux), one rank on each. For every number of hosts and
every rate the same ranks first measure the parts of a step into ``profile-….json``, then whole steps, which go to
``steps-….json`` in the form of ``paceline bench step --json``. ``table.py`` holds one against the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from bench_harness.program import run_job, run_program
from paceline._core.files import write_json
from paceline.errors import UsageError
from paceline.tools.bench.step.step_strategies import NO_SYNC, StrategyVariant
from paceline.tools.bench.step_parts.parts_settings import PartsSettings
from paceline.tools.bench.turn_statistics import round_times, step_breakdown
from paceline.tools.cli.bench.profile_file import load_or_new_profile, measurement_source
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
SIZE = GptSize("11m", 384, 1536, 6, 6, vocabulary=1000, context=128)
BATCH = 2
CONTESTANTS = [
    StrategyVariant(NO_SYNC),
    StrategyVariant("naive"),
    StrategyVariant("flat"),
    StrategyVariant("overlap"),
    *(StrategyVariant("bucketed", size) for size in (1.0, 5.0, 25.0, 100.0)),
    *(StrategyVariant("sharded", size) for size in (1.0, 5.0, 25.0)),
    StrategyVariant("full-shard"),
    StrategyVariant("ddp"),
    StrategyVariant("ddp", 1.0),
    StrategyVariant("ddp", 5.0),
]
ONE_HOST = "one host"


def main(
    hosts: Annotated[str, typer.Option(help="Numbers of hosts, a rank on each.")] = "2,4",
    rates: Annotated[str, typer.Option(help="Of every link, each direction.")] = "200Mbit/s,1Gbit/s",
    local: Annotated[
        str, typer.Option(help="Backends of two ranks on one host; empty: none.")
    ] = "paceline,gloo",
    backend: Annotated[str, typer.Option(help="Of Paceline's exchanges between hosts.")] = "paceline",
    rounds: Annotated[int, typer.Option(help="Turns of each contestant.")] = 3,
    steps: Annotated[int, typer.Option(help="Steps of a turn, of which the median counts.")] = 3,
    seconds: Annotated[float, typer.Option(help="Time for an exchange of one size, at most about.")] = 3.0,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the files go.")] = HERE,
) -> None:
    """Measure parts and steps in every setting; files of other settings stay."""
    if rounds < 1 or steps < 1:
        raise UsageError(f"--rounds {rounds} --steps {steps}: nothing to measure", remedy="give 1 or more")
    places = [(int(number), rate, backend) for rate in _names(rates) for number in _names(hosts)]
    places += [(2, ONE_HOST, name) for name in _names(local)]
    for number, rate, over in places:
        network = ONE_HOST if rate == ONE_HOST else f"lab, {rate}"
        parts = PartsSettings(
            ranks=number,
            size="mini",  # the job has the real one
            batch_size=BATCH,
            context=SIZE.context,
            backend=over,
            network=network,
            steps=12,
            seconds=1.0 if rate == ONE_HOST else seconds,
        )
        place = _place(number, rate, over)
        path, profile = out / f"steps-{place}.json", out / f"profile-{place}.json"
        check_writable(path, make_folder=True)
        load_or_new_profile(profile)
        found = run(number, None if rate == ONE_HOST else rate, parts, profile, rounds, steps)
        settings = {
            "hosts": 1 if rate == ONE_HOST else number,
            "ranks": number,
            "network": network,
            "backend": over,
        }
        settings |= {"rounds": rounds, "steps": steps, "threads": 1, "batch": BATCH, "model": vars(SIZE)}
        write_json(path, result_head("bench-step") | {"settings": settings, "rows": rows_of(found, number)})
        print(path)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _place(hosts: int, rate: str, backend: str) -> str:
    return f"{hosts}-{backend}" if rate == ONE_HOST else f"{hosts}x{rate.removesuffix('/s')}"


def run(
    ranks: int, rate: str | None, parts: PartsSettings, profile: Path, rounds: int, steps: int
) -> list[list[list[list[list[float]]]]]:
    """Start the ranks, on hosts if there is a rate, and return the seconds that rank 0 wrote."""
    turns = 1 + (1 + rounds) * len(CONTESTANTS)
    source = measurement_source(result_head("plan-step")["command"])
    job = {
        "parts": asdict(parts),
        "size": asdict(SIZE),
        "profile": str(profile.absolute()),
        "source": vars(source),
        "entries": [asdict(entry) for entry in CONTESTANTS],
        "rounds": rounds,
        "steps": steps,
    }
    return run_job(HERE / "ranks.py", job, hosts=ranks, rate=rate, turns=turns)


def rows_of(seconds: Sequence[Any], ranks: int) -> list[dict[str, Any]]:
    """Return the rows of a result from ``[entry][round][step][rank]`` of (forward, backward, optimizer, waited)."""
    rounds_of = {
        entry: [round_times(turn) for turn in turns]
        for entry, turns in zip(CONTESTANTS, seconds, strict=True)
    }
    rows = []
    for entry, rounds in rounds_of.items():
        parts = step_breakdown(rounds, rounds_of[StrategyVariant(NO_SYNC)])
        rows.append(
            {
                "model": SIZE.name,
                **entry.to_json(),
                "ranks": ranks,
                "step_ms": 1e3 * median(each.step for each in rounds),
                **{f"{name}_ms": 1e3 * value for name, value in vars(parts).items()},
                "rounds": [1e3 * each.step for each in rounds],
            }
        )
    return rows


if __name__ == "__main__":
    run_program(main)
