"""Sixteen hosts on slow links: one is slower than the others, one is killed and comes back, and the run ends.

    python benchmarks/slow-networks/many.py

Plays the hosts with `paceline.testing.netlab` (as root, on Linux), one more serves the rendezvous. Each host runs
`paceline run` of many_training.py with one rank. Writes ``many.json`` beside this file: how the run went on after the
failure and the return, who trained how long, the losses, and whether all hosts ended with the same parameters.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.testing.netlab import Lab, LabJob
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
SLOW, VICTIM = 3, 5
EVERY = 10
"""Local steps between two synchronisations."""

PATIENCE_SECONDS = 900.0


def noted(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of notes."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def until(folder: Path, host: int, reached: Any, job: LabJob) -> float:
    """Wait until a note of a host is as wanted; return when it was made."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        for told in noted(folder / f"steps-host{host}.jsonl"):
            if reached(told):
                return told["at"]
        for number, line in job.lines():
            print(f"host{number} | {line}", file=sys.stderr)
        if time.monotonic() > deadline or not job.running():
            raise TimeoutError("the run did not get so far")
        time.sleep(0.2)


def run(lab: Lab, hosts: int, steps: int, folder: Path) -> dict[str, Any]:
    """Do the run, with its two events; return what happened."""
    server = lab.start([sys.executable, "-m", "paceline", "run", "--serve", f"host{hosts}"], on=hosts)
    options = ["--hosts", str(hosts), "--min-ranks", str(hosts - 2), "--rendezvous", f"host{hosts}"]
    program = [str(HERE / "many_training.py"), str(folder), str(steps), str(EVERY)]
    command = [sys.executable, "-m", "paceline", "run", *options, "--log-dir", str(folder / "logs"), *program]
    env = {"OMP_NUM_THREADS": "1", "SLOW_ON": f"host{SLOW}"}
    began = time.time()
    job = lab.start(command, on=range(hosts), env=env)
    first = until(folder, 0, lambda told: True, job)
    print(f"all {hosts} hosts train after {first - began:.0f} s")
    until(folder, 0, lambda told: told["step"] >= steps // 4, job)
    killed = time.time()
    lab.kill(VICTIM)
    without = until(folder, 0, lambda told: told["at"] > killed and told["size"] == hosts - 1, job)
    print(f"host{VICTIM} killed; {hosts - 1} hosts go on after {without - killed:.1f} s")
    until(folder, 0, lambda told: told["size"] == hosts - 1 and told["step"] >= steps // 2, job)
    back = time.time()
    again = lab.start(command, on=VICTIM, env=env)
    rejoined = until(folder, VICTIM, lambda told: told["at"] > back and told["size"] == hosts, again)
    print(f"host{VICTIM} is back; {hosts} hosts go on after {rejoined - back:.1f} s")
    codes = {result.host: result.code for result in job.wait(timeout=PATIENCE_SECONDS, check=False)}
    codes |= {result.host: result.code for result in again.wait(timeout=PATIENCE_SECONDS, check=False)}
    server.end()
    ends = [
        json.loads((folder / f"end-host{host}.json").read_text(encoding="utf-8")) for host in range(hosts)
    ]
    return {
        "seconds": {
            "until all train": first - began,
            "until it goes on without": without - killed,
            "until it goes on with": rejoined - back,
            "in all": time.time() - began,
        },
        "exit codes": [codes[host] for host in range(hosts)],
        "same parameters": len({end["sum"] for end in ends}) == 1,
        "sent_nbytes": [end["sent"] for end in ends],
        "curve": [[told["step"], told["size"], told["loss"]] for told in noted(folder / "steps-host0.jsonl")],
    }


def main(
    hosts: Annotated[int, typer.Option(min=VICTIM + 1, help="Hosts around the switch.")] = 16,
    rate: Annotated[str, typer.Option(help="Of every link, each direction.")] = "100Mbit/s",
    steps: Annotated[int, typer.Option(help="Local steps of a rank.")] = 400,
    json_file: JsonOption = None,
) -> None:
    """Train on many hosts, one slow, one killed and back."""
    path = json_file or HERE / "many.json"
    check_writable(path, make_folder=True)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as place, Lab(hosts + 1, rate) as lab:
        told = run(lab, hosts, steps, Path(place))
    result = result_head("many-hosts") | {
        "settings": {
            "hosts": hosts,
            "rate": rate,
            "steps": steps,
            "every": EVERY,
            "slow": SLOW,
            "killed": VICTIM,
        },
        **told,
    }
    write_json(path, result)
    print(path)


if __name__ == "__main__":
    run_program(main)
