"""Three hosts, one of which fails: which host is named and when, and when the run continues.

    python benchmarks/failover/failover.py run      (as root, on Linux: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/failover/failover.py table

Each run is `paceline run --nnodes 3 --min-ranks 2` of `bench_harness.fault_injection.saved_training`, one rank on each
host; a fourth host serves the rendezvous. In the middle of it one host is cut off, killed or stopped, or its rank
raises or runs out of memory. Measured: seconds from the fault until the ranks of the other hosts had raised the error
that names it, and until a new world made its first step; whether the run ended, with the weights of an undisturbed run
and every sample used once.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.fault_injection.saved_training import LOST, PROGRAM, logged, used_once, weight_difference
from bench_harness.lab_run import open_lab, wait_for
from bench_harness.markdown import table
from paceline.testing.netlab import Lab, LabJob
from paceline.tools.cli.shared_options import JsonOption

HOSTS, FAULTY_HOST, STEP = 3, 1, 14
FAULTY_NAME = f"host{FAULTY_HOST}"
LIMIT_SECONDS = 240.0
FAULTS = {
    "its rank raises": f"fail_at(rank={{rank}}, step={STEP}, restart=0)",
    "its rank runs out of memory": f"fail_at(rank={{rank}}, step={STEP}, how='memory', restart=0)",
    "it is killed": Lab.kill,
    "it is stopped": Lab.stop,
    "it is cut off": Lab.cut,
}
"""An injected fault of its rank, or what is done to the host."""

bench = Benchmark(__file__, docs=["failures.md"])


@bench.run
def run(
    repeats: Annotated[int, Option(min=1, help="How often each fault happens.")] = 3,
    json_file: JsonOption = None,
) -> None:
    """Time naming and continuing for every fault."""
    path = bench.output(json_file, "failover")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in FAULTS}
    with open_lab(HOSTS + 1, title="failover", turns=repeats * len(FAULTS)) as (lab, place, tick):
        server = lab.start([sys.executable, "-m", "paceline", "run", "--serve", f"host{HOSTS}"], on=HOSTS)
        undisturbed = place / "undisturbed"
        start(lab, undisturbed).wait(timeout=LIMIT_SECONDS)
        for number in range(repeats):
            for index, name in enumerate(FAULTS):
                folder = place / f"run-{number}-{index}"
                found = measure(lab, folder, name)
                difference = {"largest difference of a weight": weight_difference(folder, undisturbed)}
                rows[name].append(found | difference)
                tick()
        server.end()
    bench.write(path, "failover", {"hosts": HOSTS, "repeats": repeats, "lost": LOST}, rows=rows)


def start(lab: Lab, folder: Path, fault: str = "") -> LabJob:
    """Start a run on three hosts, with a fault injected on one of them."""
    folder.mkdir()
    options = ["--nnodes", str(HOSTS), "--min-ranks", "2", "--rendezvous", f"host{HOSTS}"]
    options += ["--name", folder.name, "--log-dir", str(folder / "logs")]
    command = [sys.executable, "-m", "paceline", "run", *options, PROGRAM, str(folder)]
    variables = {"OMP_NUM_THREADS": "1", "FAULT_ON": FAULTY_NAME if fault else "", "FAULT": fault}
    return lab.start(command, on=range(HOSTS), env=variables)


def measure(lab: Lab, folder: Path, name: str) -> dict[str, Any]:
    """Do one run with a fault; return what happened, in seconds from the fault."""
    fault = FAULTS[name]
    injected = isinstance(fault, str)
    job = start(lab, folder, fault if injected else "")

    def faulty_steps() -> list[float]:
        lines = logged(folder, f"steps-{FAULTY_NAME}-*.jsonl")
        return [line["at"] for line in lines if line["step"] >= STEP]

    began = wait_for(faulty_steps, [job], timeout=LIMIT_SECONDS, poll=0.005)[0]
    if not injected:
        began = time.monotonic()
        fault(lab, FAULTY_HOST)
    may_run = set[int]() if injected else {FAULTY_HOST}
    wait_for(lambda: set(job.running()) <= may_run, [job], timeout=LIMIT_SECONDS, poll=0.005)
    if not injected:
        lab.mend(FAULTY_HOST)
        lab.kill(FAULTY_HOST)
    codes = {result.host: result.code for result in job.wait(timeout=60, check=False)}
    named = [line for line in logged(folder, "errors-*.jsonl") if line["host"] != FAULTY_NAME]
    last = max(line["at"] for line in named)
    steps = [line for line in logged(folder, "steps-*.jsonl") if line["host"] != FAULTY_NAME]
    first = next(line for line in steps if line["at"] > last)
    return {
        "named after": [line["at"] - began for line in named],
        "rightly": [line["on"] == FAULTY_NAME for line in named],
        "kinds": [line["kind"] for line in named],
        "first step after": first["at"] - began,
        "ranks after": first["size"],
        "exit codes": [codes[host] for host in range(HOSTS) if host != FAULTY_HOST],
        "every sample once": used_once(folder),
    }


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md and docs/failures.md: a row per fault."""
    rows = []
    for name, runs in bench.read("failover")["rows"].items():
        named, rightly = ([each for run in runs for each in run[key]] for key in ("named after", "rightly"))
        rows.append(
            [
                name,
                f"{sum(rightly)} of {2 * len(runs)}",
                *(
                    f"{median(seconds):.1f} (at most {max(seconds):.1f})"
                    for seconds in (named, [run["first step after"] for run in runs])
                ),
                ", ".join(sorted({str(run["ranks after"]) for run in runs})),
                "all" if all(run["every sample once"] for run in runs) else "no",
                f"{max(run['largest difference of a weight'] for run in runs):.0e}",
            ]
        )
    columns = ["one host", "named", "named, s", "goes on, s", "on hosts", "samples once", "difference"]
    return {"failover": table(columns, rows)}


if __name__ == "__main__":
    bench.main()
