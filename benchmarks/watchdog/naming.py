"""How long it takes until every other rank names the rank that failed: three hosts, each fault several times.

    python benchmarks/watchdog/naming.py run      (as root, on Linux: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/watchdog/naming.py table

A time is that from the fault to the moment at which a rank's loop raised PeerFailed, on each rank of the other hosts.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.lab_run import open_lab, read_json, wait_for
from bench_harness.markdown import table
from paceline.testing.netlab import Lab
from paceline.tools.cli.shared_options import JsonOption

HOSTS, RANKS, FAULTY_HOST, FAULTY_RANK = 3, 2, 1, 3
STEP = 40
STALL, LOST = 5.0, 3.0
BACKENDS = ("gloo", "paceline")
FAULTY = list(range(FAULTY_HOST * RANKS, (FAULTY_HOST + 1) * RANKS))
OTHERS = [rank for rank in range(HOSTS * RANKS) if rank not in FAULTY]
KILLED, STOPPED = (
    "fail_at(rank={rank}, step={step}, how='kill')",
    "stall_at(rank={rank}, step={step}, how='stop')",
)
FAULTS = {
    "a rank raises": "fail_at(rank={rank}, step={step})",
    "a rank runs out of memory": "fail_at(rank={rank}, step={step}, how='memory')",
    "a rank exits": "fail_at(rank={rank}, step={step}, how='exit')",
    "a rank is killed": KILLED,
    "a host's ranks are killed": KILLED,
    "a rank is stopped": STOPPED,
    "a host's ranks are stopped": STOPPED,
    "a host is cut off": "",
    "a rank stands still": "stall_at(rank={rank}, step={step})",
    "a rank holds Python's lock": "stall_at(rank={rank}, step={step}, how='gil')",
}

bench = Benchmark(__file__)


def faulty_ranks(name: str) -> list[int]:
    """Return the ranks that a fault affects."""
    return FAULTY if "host" in name else [FAULTY_RANK]


@bench.run
def run(
    repeats: Annotated[int, Option(min=1, help="How often each fault happens on each backend.")] = 5,
    json_file: JsonOption = None,
) -> None:
    """Time the naming of every fault."""
    path = bench.output(json_file, "naming")
    cases = [(name, backend) for name in FAULTS for backend in BACKENDS for _ in range(repeats)]
    settings_of_case = [
        {
            "backend": backend,
            "faults": "; ".join(
                FAULTS[name].format(rank=rank, step=STEP) for rank in faulty_ranks(name) if FAULTS[name]
            ),
            "stall": STALL,
            "lost": LOST,
        }
        for name, backend in cases
    ]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {case: [] for case in cases}
    with open_lab(HOSTS, title="faults", turns=len(cases)) as (lab, folder, tick):
        (folder / "cases.json").write_text(json.dumps(settings_of_case), encoding="utf-8")
        program = ["-m", "bench_harness.fault_injection.watchdog_program", str(folder)]
        jobs = [lab.start([*program, *map(str, (host, HOSTS, RANKS))], on=host) for host in range(HOSTS)]

        def read(name: str, number: int, rank: int) -> Any:
            path = folder / f"{name}-{number}-{rank}"
            wait_for(path.exists, jobs)
            return read_json(path)

        for number, case in enumerate(cases):
            rows[case].append(measure(lab, folder, number, case[0], read))
            tick()
    bench.write(
        path,
        "watch-naming",
        {"hosts": HOSTS, "ranks_per_host": RANKS, "stall": STALL, "lost": LOST},
        rows=[{"fault": name, "backend": backend, "runs": runs} for (name, backend), runs in rows.items()],
    )


def measure(
    lab: Lab, folder: Path, number: int, name: str, read: Callable[[str, int, int], Any]
) -> dict[str, Any]:
    """Return the seconds until each rank of other hosts had named a faulty rank, and what it reported."""
    faulty = faulty_ranks(name)
    if FAULTS[name]:
        began = min(read("fault", number, rank) for rank in faulty)
    else:
        for rank in range(HOSTS * RANKS):
            read("training", number, rank)
        began = time.monotonic()
        lab.cut(FAULTY_HOST)
    errors = [read("error", number, rank) for rank in OTHERS]
    (folder / f"end-{number}").touch()
    if not FAULTS[name]:
        lab.mend(FAULTY_HOST)
    return {
        "seconds": [each["at"] - began for each in errors],
        "kinds": [each["kind"] for each in errors],
        "named": [each["error"] == "PeerFailed" and each["rank"] in faulty for each in errors],
        "freed": [each["freed"] for each in errors],
    }


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: a row per fault and backend."""
    rows = []
    for row in bench.read("naming")["rows"]:
        seconds, kinds, named, freed = (
            [each for run in row["runs"] for each in run[column]]
            for column in ("seconds", "kinds", "named", "freed")
        )
        counts = [f"{sum(each)} of {len(each)}" for each in (named, freed)]
        times = [f"{median(seconds):.2f}", f"{max(seconds):.2f}"]
        rows.append([row["fault"], row["backend"], ", ".join(map(str, Counter(kinds))), *counts, *times])
    columns = ["fault", "backend", "named as", "rightly named", "freed", "median, s", "longest, s"]
    return {"naming": table(columns, rows, words=3)}


if __name__ == "__main__":
    bench.main()
