"""Sixteen hosts on slow links: one is slower than the others, one is killed and comes back, and the run ends.

    python benchmarks/slow-networks/many.py run      (as root, on Linux: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/slow-networks/many.py table

Each host runs `paceline run` of many_training.py with one rank; one more host serves the rendezvous. The result says
how the run went on after the failure and the return, the losses, and whether all hosts ended with the same parameters.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.testing.netlab import Lab, LabJob
from paceline.tools.cli.shared_options import JsonOption

SLOW, KILLED = 3, 5  # hosts
EVERY = 10  # local steps between two synchronisations
TIMEOUT_SECONDS = 900.0

bench = Benchmark(__file__)


@bench.run
def run(
    hosts: Annotated[int, Option(min=KILLED + 1, help="Hosts around the switch.")] = 16,
    rate: Annotated[str, Option(help="Rate of every link, each direction.")] = "100Mbit/s",
    steps: Annotated[int, Option(help="Local steps of a rank.")] = 400,
    json_file: JsonOption = None,
) -> None:
    """Train on many hosts, one slow, one killed and back."""
    path = bench.output(json_file, "many")
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, Lab(hosts + 1, rate) as lab:
        found = train(lab, hosts, steps, Path(folder))
    settings = {"hosts": hosts, "rate": rate, "steps": steps, "every": EVERY, "slow": SLOW, "killed": KILLED}
    bench.write(path, "many-hosts", settings, **found)


def train(lab: Lab, hosts: int, steps: int, folder: Path) -> dict[str, Any]:
    """Run the training with its two events, and return what happened."""
    paceline = [sys.executable, "-m", "paceline", "run"]
    server = lab.start([*paceline, "--serve", f"host{hosts}"], on=hosts)
    options = ["--nnodes", str(hosts), "--min-ranks", str(hosts - 2), "--rendezvous", f"host{hosts}"]
    program = [str(bench.folder / "many_training.py"), str(folder), str(steps), str(EVERY)]
    command = [*paceline, *options, "--log-dir", str(folder / "logs"), *program]
    env = {"OMP_NUM_THREADS": "1", "SLOW_ON": f"host{SLOW}"}
    began = time.time()
    job = lab.start(command, on=range(hosts), env=env)
    first = wait_for(folder, 0, lambda step: True, job)
    print(f"all {hosts} hosts train after {first - began:.0f} s")
    wait_for(folder, 0, lambda step: step["step"] >= steps // 4, job)
    killed = time.time()
    lab.kill(KILLED)
    without = wait_for(folder, 0, lambda step: step["at"] > killed and step["size"] == hosts - 1, job)
    print(f"host{KILLED} killed; {hosts - 1} hosts go on after {without - killed:.1f} s")
    wait_for(folder, 0, lambda step: step["size"] == hosts - 1 and step["step"] >= steps // 2, job)
    back = time.time()
    again = lab.start(command, on=KILLED, env=env)
    rejoined = wait_for(folder, KILLED, lambda step: step["at"] > back and step["size"] == hosts, again)
    print(f"host{KILLED} is back; {hosts} hosts go on after {rejoined - back:.1f} s")
    ended = [result for each in (job, again) for result in each.wait(timeout=TIMEOUT_SECONDS, check=False)]
    codes = {result.host: result.code for result in ended}
    server.end()
    ends = [json.loads((folder / f"end-host{host}.json").read_text()) for host in range(hosts)]
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
        "curve": [[step["step"], step["size"], step["loss"]] for step in steps_of(folder, 0)],
    }


def steps_of(folder: Path, host: int) -> list[dict[str, Any]]:
    """Return the steps that a host has recorded in whole lines."""
    path = folder / f"steps-host{host}.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for(folder: Path, host: int, reached: Callable[[dict[str, Any]], bool], job: LabJob) -> float:
    """Wait until a host has recorded a step as wanted; return when that was."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        for step in steps_of(folder, host):
            if reached(step):
                return step["at"]
        for number, line in job.lines():
            print(f"host{number} | {line}", file=sys.stderr)
        if time.monotonic() > deadline or not job.running():
            raise TimeoutError("the run did not get so far")
        time.sleep(0.2)


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: what happened, and when the run went on."""
    result = bench.read("many")
    seconds, curve = result["seconds"], result["curve"]
    rows = [
        ["all hosts train", f"{seconds['until all train']:.0f} s after the start"],
        ["one is killed, the others go on", f"after {seconds['until it goes on without']:.1f} s"],
        ["it comes back, all go on", f"after {seconds['until it goes on with']:.1f} s"],
        ["the run ends", f"after {seconds['in all']:.0f} s, exit codes {sorted(set(result['exit codes']))}"],
        ["parameters of all hosts", "the same" if result["same parameters"] else "differ"],
        ["loss of host 0", f"{curve[0][2]:.2f} → {curve[-1][2]:.2f}"],
    ]
    return {"many": table(["", ""], rows, words=2)}


if __name__ == "__main__":
    bench.main()
