"""Three hosts, one of which fails: who is named and when, and when the run goes on.

python benchmarks/failover/failover.py [--repeats 3]

Plays the hosts with `paceline.testing.netlab` (as root, on Linux), a fourth one serves the rendezvous. Each run is
`paceline run --hosts 3 --min-ranks 2` of ../kills/training.py, one rank on each host. In the middle of it one host is
cut off, killed or stopped, or its rank raises or runs out of memory. Writes failover.json beside this file: seconds
from the fault until the ranks of the other hosts had raised the error that names it, and until a new world made its
first step; whether the run ended, with the weights of one that nobody disturbed and every sample used once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline._core.files import write_json
from paceline.checkpoint.weights_export import read_weights
from paceline.testing.netlab import Lab, LabJob
from paceline.tools.result_files import result_head

HERE = Path(__file__).parent
TRAINING = HERE.parent / "kills" / "training.py"
sys.path.insert(0, str(TRAINING.parent))
from training import noted, used_once  # noqa: E402 — the training that kills.py runs too

VICTIM, AT_STEP = 1, 14
PATIENCE_SECONDS = 240.0
FAULTS = {
    "its rank raises": f"fail_at(rank={{rank}}, step={AT_STEP}, restart=0)",
    "its rank runs out of memory": f"fail_at(rank={{rank}}, step={AT_STEP}, how='memory', restart=0)",
    "it is killed": "",
    "it is stopped": "",
    "it is cut off": "",
}


def start(lab: Lab, folder: Path, fault: str = "") -> LabJob:
    """Start a run on three hosts, of which the victim's rank has a fault."""
    folder.mkdir()
    options = ["--hosts", "3", "--min-ranks", "2", "--rendezvous", "host3", "--name", folder.name]
    command = [sys.executable, "-m", "paceline", "run", *options, "--log-dir", str(folder / "logs")]
    variables = {"OMP_NUM_THREADS": "1", "FAULT_ON": f"host{VICTIM}" if fault else "", "FAULT": fault}
    return lab.start([*command, str(TRAINING), str(folder)], on=[0, 1, 2], env=variables)


def until(condition: Any, job: LabJob) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("\n".join(line for _, line in job.lines()))
        time.sleep(0.005)


def one(lab: Lab, folder: Path, name: str) -> dict[str, Any]:
    """Do one run with a fault; return what happened, in seconds from the fault."""
    victim = f"host{VICTIM}"
    job = start(lab, folder, FAULTS[name])
    until(lambda: any(told["step"] >= AT_STEP for told in noted(folder, f"steps-{victim}-*.jsonl")), job)
    began = next(told["at"] for told in noted(folder, f"steps-{victim}-*.jsonl") if told["step"] == AT_STEP)
    if not FAULTS[name]:
        began = time.monotonic()
        {"killed": lab.kill, "stopped": lab.stop, "off": lab.cut}[name.split()[-1]](VICTIM)
    until(lambda: set(job.running()) <= ({VICTIM} if not FAULTS[name] else set()), job)
    if not FAULTS[name]:
        lab.mend(VICTIM)
        lab.kill(VICTIM)
    codes = {result.host: result.code for result in job.wait(timeout=60, check=False)}
    named = [told for told in noted(folder, "told-*.jsonl") if told["host"] != victim]
    last = max(told["at"] for told in named)
    later = [told for told in noted(folder, "steps-*.jsonl") if told["at"] > last and told["host"] != victim]
    return {
        "named after": [told["at"] - began for told in named],
        "rightly": [told["on"] == victim for told in named],
        "kinds": [told["kind"] for told in named],
        "first step after": later[0]["at"] - began,
        "ranks after": later[0]["size"],
        "exit codes": [codes[host] for host in (0, 2)],
        "every sample once": used_once(folder),
    }


def difference(folder: Path, calm: Path) -> float:
    """Return the largest difference of a weight between two runs."""
    ours, theirs = read_weights(folder / "checkpoint"), read_weights(calm / "checkpoint")
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def main() -> None:
    """Measure, print a line for each run, and write failover.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: give 1 or more")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in FAULTS}
    with tempfile.TemporaryDirectory(prefix="paceline-failover-") as place, Lab(hosts=4) as lab:
        server = lab.start([sys.executable, "-m", "paceline", "run", "--serve", "host3"], on=3)
        calm = Path(place, "calm")
        assert [result.code for result in start(lab, calm).wait(timeout=PATIENCE_SECONDS)] == [0, 0, 0]
        for number in range(options.repeats):
            for index, name in enumerate(FAULTS):
                folder = Path(place, f"run-{number}-{index}")
                told = one(lab, folder, name) | {"largest difference of a weight": difference(folder, calm)}
                rows[name].append(told)
                print(f"{name}: {told}", flush=True)
        server.end()
    write_json(HERE / "failover.json", result_head("failover") | {"rows": rows})


if __name__ == "__main__":
    main()
