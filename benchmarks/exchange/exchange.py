"""A ring between hosts of the network lab, where the link moves the bytes and the cores are free.

    python benchmarks/exchange/exchange.py run       (as root: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/exchange/exchange.py table

mpiexec runs on host 0 with ``-launcher manual``: it starts nothing but prints the command of each host's proxy, which
is then started there.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from statistics import median
from typing import Annotated

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline._core.format import format_count
from paceline.launch.targets.mpiexec_command import require_mpi
from paceline.testing.netlab import Lab
from paceline.tools.cli.shared_options import JsonOption

WHERE = {"ranks": "one machine", "hosts": "two hosts, 200 Mbit/s"}
"""By the last word of a result's name."""

bench = Benchmark(__file__)


@bench.run
def run(
    hosts: Annotated[int, Option(help="Hosts, with one rank each.")] = 2,
    rate: Annotated[str, Option(help="Of each host's link.")] = "200Mbit/s",
    nbytes: Annotated[str, Option("--bytes", help="Sent by each rank in a round.")] = "20MB",
    work: Annotated[str, Option(help="Computing by each rank at the same time.")] = "500ms",
    rounds: Annotated[int, Option(help="Number of rounds.")] = 7,
    json_file: JsonOption = None,
) -> None:
    """Exchange in a ring between hosts during computation."""
    path = bench.output(json_file, f"ring-{hosts}-hosts")
    names = ",".join(f"host{host}" for host in range(hosts))
    command = [require_mpi(), "-launcher", "manual", "-hosts", names, "-n", str(hosts)]
    command += [sys.executable, "-m", "paceline", "exchange", "ring", "--bytes", nbytes]
    command += ["--compute", work, "--rounds", str(rounds), "--json", str(path)]
    with Lab(hosts, rate) as lab:
        process = lab.popen(0, command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        proxies = []
        for line in process.stdout:
            if line.startswith("HYDRA_LAUNCH: "):
                proxy = shlex.split(line.removeprefix("HYDRA_LAUNCH: "))
                proxies.append(lab.popen(len(proxies), proxy, stdin=subprocess.DEVNULL))
            elif line.strip() != "HYDRA_LAUNCH_END":
                print(line, end="")
        sys.exit(process.wait())


@bench.tables
def tables() -> dict[str, str]:
    """Return the table of all results: medians over ranks."""
    cells = []
    for name, result in bench.find().items():
        rows = result["rows"]
        middle = {
            key: median(row[key] for row in rows)
            for key in ("seconds", "both_seconds", "work_seconds", "overlap")
        }
        overlap = middle.pop("overlap")
        cells.append(
            [
                result["settings"]["shape"],
                WHERE[name.rpartition("-")[2]],
                str(len(rows)),
                f"{format_count(rows[0]['nbytes'])}B",
                *(f"{1e3 * seconds:.0f}" for seconds in middle.values()),
                f"{overlap:.2f}",
                f"{sum(row['right'] for row in rows)} of {len(rows)}",
            ]
        )
    titles = ["exchange", "ranks on", "ranks", "bytes a rank", "round, ms", "with work, ms", "work, ms"]
    return {"figures": table([*titles, "overlap", "checksums right"], cells, words=2)}


if __name__ == "__main__":
    bench.main()
