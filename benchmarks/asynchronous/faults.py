"""Asynchronous training under injected faults, for ten minutes.

    python benchmarks/asynchronous/faults.py run      (as root, on Linux)
    python benchmarks/asynchronous/faults.py run --workers 2 --ranks 2 --worker-faults 40
    python benchmarks/asynchronous/faults.py table

Eight workers and a hub on hosts that `paceline.testing.netlab` plays: workers are killed, stopped, cut off, the hub is
killed five times, and 2 % of all envelopes are damaged, cut, repeated, lost or out of order, in both directions. What
the workers saw acknowledged is then compared with the hub's ledger. With several ranks per worker, half of the kills
and stops affect one rank; the others name it, and ``paceline run`` restarts them all.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

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
    ranks: Annotated[int, Option(min=1, help="Ranks of each worker.")] = 1,
    worker_faults: Annotated[int, Option(min=0, help="Faults of workers.")] = 60,
    hub_kills: Annotated[int, Option(min=0, help="Kills of the hub.")] = 5,
    rate: Annotated[str, Option(help="Rate of every link.")] = "200Mbit/s",
    seed: Annotated[int, Option(help="Seed of the fault plan.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Train under faults, and count what was lost."""
    name = "storm" if ranks == 1 else "storm-groups"
    path = bench.output(json_file, name)
    plan = draw_faults(seconds, workers, worker_faults, hub_kills, seed, ranks)
    with open_lab(workers + 1, rate, title="faults", turns=int(seconds)) as (lab, folder, tick):
        ticked = 0

        def on_poll(elapsed: float) -> None:
            nonlocal ticked
            while ticked < int(elapsed):
                ticked += 1
                tick()

        revived = run_with_faults(lab, folder, seconds, plan, on_poll, ranks=ranks)
        found = count_losses(folder, workers)
        memory = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    bench.write(
        path,
        name,
        {
            "seconds": seconds,
            "workers": workers,
            "ranks": ranks,
            "hub_kills": hub_kills,
            "rate": rate,
            "seed": seed,
        },
        mishaps=[asdict(each) for each in plan],
        found=found,
        revived=revived,
        memory=[
            {"seconds": each["t"] - memory[0]["t"], "pid": each["pid"], "rss": each["rss"]} for each in memory
        ],
        refused=memory[-1]["refused"],
    )


@bench.tables
def tables() -> dict[str, str]:
    """Return the blocks of README.md: faults, and what was lost."""
    return {name: _storm_table(result) for name, result in bench.find("storm*").items()}


def _storm_table(result: dict[str, Any]) -> str:
    found, faults = result["found"], result["mishaps"]
    kinds = [each["what"] for each in faults]
    several = result["settings"].get("ranks", 1) > 1
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
    if several:
        of_one = [each["what"] for each in faults if each["rank"] is not None]
        rows["length of the run"] = f"{result['settings']['seconds']:g} s"
        rows["faults of one rank alone: killed · stopped"] = (
            f"{of_one.count('kill')} · {of_one.count('stop')}"
        )
        rows["workers whose ranks differed in a parameter"] = str(found["diverged"])
    return table(["", ""], list(rows.items()), words=2)


if __name__ == "__main__":
    bench.main()
