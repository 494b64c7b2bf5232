"""How long it takes until every other rank names a culprit: three hosts, each fault several times.

    python benchmarks/watch/naming.py

Plays the hosts with `paceline.testing.netlab` (as root, on Linux) and writes ``naming.json`` beside this file. A
time is that from the fault to the moment at which a rank's loop raised PeerFailed, on each rank of the other hosts.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.testing.netlab import Lab, LabJob
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
HOSTS, RANKS, VICTIM = 3, 2, 1
STEP = 40
STALL, LOST = 5.0, 3.0
PATIENCE_SECONDS = 120.0
BACKENDS = ("gloo", "paceline")
MINE = range(VICTIM * RANKS, (VICTIM + 1) * RANKS)
OTHERS = [rank for rank in range(HOSTS * RANKS) if rank not in MINE]


def on_all(call: str) -> str:
    """Return the fault on every rank of the victim."""
    return "; ".join(call.format(rank=rank) for rank in MINE)


FAULTS = {
    "a rank raises": f"fail_at(rank=3, step={STEP})",
    "a rank runs out of memory": f"fail_at(rank=3, step={STEP}, how='memory')",
    "a rank exits": f"fail_at(rank=3, step={STEP}, how='exit')",
    "a rank is killed": f"fail_at(rank=3, step={STEP}, how='kill')",
    "a host's ranks are killed": on_all(f"fail_at(rank={{rank}}, step={STEP}, how='kill')"),
    "a rank is stopped": f"stall_at(rank=3, step={STEP}, how='stop')",
    "a host's ranks are stopped": on_all(f"stall_at(rank={{rank}}, step={STEP}, how='stop')"),
    "a host is cut off": "",
    "a rank stands still": f"stall_at(rank=3, step={STEP})",
    "a rank holds Python's lock": f"stall_at(rank=3, step={STEP}, how='gil')",
}


def main(
    repeats: Annotated[int, typer.Option(min=1, help="How often each fault happens on each backend.")] = 5,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the result there.")] = HERE / "naming.json",
) -> None:
    """Time the naming of every fault."""
    check_writable(out, make_folder=True)
    cases = [(name, backend) for name in FAULTS for backend in BACKENDS for _ in range(repeats)]
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    drills = [{"backend": b, "faults": FAULTS[name], "stall": STALL, "lost": LOST} for name, b in cases]
    with tempfile.TemporaryDirectory() as folder, Lab(hosts=HOSTS) as lab:
        Path(folder, "drills.json").write_text(json.dumps(drills))
        jobs = []
        for host in range(HOSTS):
            arguments = [folder, *map(str, (host, HOSTS, RANKS))]
            jobs.append(lab.start([sys.executable, "-m", "bench_harness.fire_drill", *arguments], on=host))
        with ProgressBar("faults", len(cases)) as tick:
            for number, (name, backend) in enumerate(cases):
                rows.setdefault((name, backend), []).append(one(lab, Path(folder), number, name, jobs))
                tick()
    result = result_head("watch-naming") | {
        "settings": {"hosts": HOSTS, "ranks_per_host": RANKS, "stall": STALL, "lost": LOST},
        "rows": [{"fault": name, "backend": b, "runs": runs} for (name, b), runs in rows.items()],
    }
    write_json(out, result)


def one(lab: Lab, folder: Path, number: int, name: str, jobs: Sequence[LabJob]) -> dict[str, Any]:
    """Return the seconds until each rank of other hosts had named a rank of the victim, and what they said."""
    if FAULTS[name]:
        began = min(wait_for(folder, f"fault-{number}-{rank}", jobs) for rank in culprits(name))
    else:
        for rank in range(HOSTS * RANKS):
            wait_for(folder, f"training-{number}-{rank}", jobs)
        began = time.monotonic()
        lab.cut(VICTIM)
    told = [wait_for(folder, f"told-{number}-{rank}", jobs) for rank in OTHERS]
    (folder / f"over-{number}").touch()
    if not FAULTS[name]:
        lab.mend(VICTIM)
    return {
        "seconds": [each["at"] - began for each in told],
        "kinds": [each["kind"] for each in told],
        "named": [each["error"] == "PeerFailed" and each["rank"] in culprits(name) for each in told],
        "freed": [each["freed"] for each in told],
    }


def culprits(name: str) -> list[int]:
    """Return the ranks that the fault befalls."""
    return list(MINE) if "host" in name else [3]


def wait_for(folder: Path, name: str, jobs: Sequence[LabJob]) -> Any:
    """Return what a rank has written down."""
    path, deadline = folder / name, time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            said = "\n".join(line for job in jobs for _, line in job.lines())
            raise TimeoutError(f"{name} was not written:\n{said}")
        time.sleep(0.01)
    return json.loads(path.read_text())


if __name__ == "__main__":
    run_program(main)
