"""Asynchronous training under injected faults, for ten minutes.

    python benchmarks/asynchronous/faults.py run      (as root, on Linux)
    python benchmarks/asynchronous/faults.py table

Eight workers and a hub on hosts that `paceline.testing.netlab` plays: workers are killed, stopped, cut off, the hub is
killed five times, and 2 % of all envelopes are damaged, cut, repeated, lost or out of order, in both directions. What
the workers saw acknowledged is then compared with the hub's ledger.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.fault_injection.fault_plan import draw_faults
from bench_harness.fault_injection.hub_run import count_losses, run_with_faults
from bench_harness.lab_run import open_lab
from bench_harness.markdown import table
from paceline.tools.cli.shared_options import JsonOption

bench = Benchmark(__file__)


@bench.run
def run(
    seconds: Annotated[float, Option(help="Length of the run.")] = 600.0,
    workers: Annotated[int, Option(min=1, help="Hosts with one worker each.")] = 8,
    worker_faults: Annotated[int, Option(min=0, help="Faults of workers.")] = 60,
    hub_kills: Annotated[int, Option(min=0, help="Kills of the hub.")] = 5,
    rate: Annotated[str, Option(help="Rate of every link.")] = "200Mbit/s",
    seed: Annotated[int, Option(help="Seed of the fault plan.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Train under faults, and count what was lost."""
    path = bench.output(json_file, "storm")
    plan = draw_faults(seconds, workers, worker_faults, hub_kills, seed)
    with open_lab(workers + 1, rate, title="faults", turns=int(seconds)) as (lab, folder, tick):
        ticked = 0

        def on_poll(elapsed: float) -> None:
            nonlocal ticked
            while ticked < int(elapsed):
                ticked += 1
                tick()

        run_with_faults(lab, folder, seconds, plan, on_poll)
        found = count_losses(folder, workers)
        memory = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    bench.write(
        path,
        "storm",
        {"seconds": seconds, "workers": workers, "hub_kills": hub_kills, "rate": rate, "seed": seed},
        mishaps=[asdict(each) for each in plan],
        found=found,
        memory=[
            {"seconds": each["t"] - memory[0]["t"], "pid": each["pid"], "rss": each["rss"]} for each in memory
        ],
        refused=memory[-1]["refused"],
    )


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: faults, and what was lost."""
    result = bench.read("storm")
    found, kinds = result["found"], [each["what"] for each in result["mishaps"]]
    of_pid: dict[int, list[float]] = {}
    for each in result["memory"]:
        of_pid.setdefault(each["pid"], []).append(each["rss"] / 2**20)
    longest = max(of_pid.values(), key=len)
    rows = {
        "workers killed · stopped · cut off": " · ".join(
            str(kinds.count(each)) for each in ("kill", "stop", "cut")
        ),
        "hub killed": str(kinds.count("hub")),
        "updates taken in · rounds acknowledged": f"{found['updates']} · {found['acknowledged']}",
        "acknowledged and lost · taken in twice": f"{found['lost']} · {found['twice']}",
        "score of the global model, first → last": f"{found['first_score']:.3f} → {found['last_score']:.3f}",
        "workers that ended in order · with the global model": (
            f"{found['ended']} · {found['ended_with_global_params']}"
        ),
        "memory of the hub that lived longest: at a fifth · at its end": (
            f"{longest[len(longest) // 5]:.0f} · {longest[-1]:.0f} MiB"
        ),
        "refused": ", ".join(f"{why} {count}" for why, count in sorted(result["refused"].items())),
    }
    return {"storm": table(["", ""], list(rows.items()), words=2)}


if __name__ == "__main__":
    bench.main()
