"""A ring between hosts of the network lab, where a wire moves the bytes and the cores are free; needs root.

    python benchmarks/exchange/across_hosts.py --json benchmarks/exchange/ring-2-hosts.json

mpiexec runs on host 0. It is told to start nothing by itself (``-launcher manual``): it prints the command of each
host's proxy, which is then started there.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from bench_harness.program import run_program
from paceline.launch.targets.mpiexec_command import require_mpi
from paceline.testing.netlab import Lab

_LAUNCH, _LAUNCHED = "HYDRA_LAUNCH: ", "HYDRA_LAUNCH_END"


def main(
    json_file: Annotated[Path, typer.Option("--json", help="Where the result goes.")],
    hosts: Annotated[int, typer.Option(help="Hosts, with one rank each.")] = 2,
    rate: Annotated[str, typer.Option(help="Of each host's link.")] = "200Mbit/s",
    nbytes: Annotated[str, typer.Option("--bytes", help="What each rank sends in a round.")] = "20MB",
    work: Annotated[str, typer.Option(help="Computing by each rank at the same time.")] = "500ms",
    rounds: Annotated[int, typer.Option(help="How often.")] = 7,
) -> None:
    """Exchange in a ring between hosts, while work goes on."""
    options = ["--bytes", nbytes, "--work", work, "--rounds", str(rounds), "--json", str(json_file)]
    names = ",".join(f"host{host}" for host in range(hosts))
    command = [require_mpi(), "-launcher", "manual", "-hosts", names, "-n", str(hosts)]
    command += [sys.executable, "-m", "paceline", "exchange", "ring", *options]
    with Lab(hosts, rate) as lab:
        process = lab.popen(0, command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        proxies = []
        for line in process.stdout:
            if line.startswith(_LAUNCH):
                proxy = shlex.split(line.removeprefix(_LAUNCH))
                proxies.append(lab.popen(len(proxies), proxy, stdin=subprocess.DEVNULL))
            elif line.strip() != _LAUNCHED:
                print(line, end="")
        sys.exit(process.wait())


if __name__ == "__main__":
    run_program(main)
