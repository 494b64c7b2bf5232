"""50 SIGKILLs at random moments: whether every run ends, with the same weights to the bit, every sample used once.

    python benchmarks/kills/kills.py run
    python benchmarks/kills/kills.py table

Each run is `paceline run` of `bench_harness.fault_injection.saved_training` on two ranks. It is killed up to five
times, at random moments: one rank, rank 0, all ranks, or any of these while a checkpoint is being written. A run that
gives up (the same rank died twice without progress in between) is started again by the same command. At the end its
weights are compared with those of an undisturbed run, and the samples that its steps used are counted.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.fault_injection.disturbed_run import start_run, training_pids, wait_for_moment
from bench_harness.fault_injection.saved_training import used_once, weight_difference
from bench_harness.markdown import table
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption

KINDS = ["one rank", "rank 0", "all ranks", "one rank during a save", "all ranks during a save"]
RANKS, KILLS_PER_RUN = 2, 5

bench = Benchmark(__file__)


@bench.run
def run(
    kills: Annotated[int, Option(min=1, help="Kills in all.")] = 50,
    seed: Annotated[int, Option(help="Seed of kinds and moments.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Kill runs, and compare how they end with an undisturbed run."""
    path = bench.output(json_file, "kills")
    generator = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(kills)]
    generator.shuffle(kinds)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as place, ProgressBar("kills", kills) as tick:
        undisturbed = Path(place, "undisturbed")
        undisturbed.mkdir()
        assert start_run(undisturbed, RANKS).wait() == 0, (undisturbed / "output").read_text()
        assert used_once(undisturbed)
        while kinds:
            folder = Path(place, f"run-{len(runs)}")
            found = disturb(folder, kinds[:KILLS_PER_RUN], generator)
            kinds = kinds[len(found["kills"]) :]
            same = weight_difference(folder, undisturbed) == 0.0
            runs.append(found | {"same weights": same, "every sample once": used_once(folder)})
            for _ in found["kills"]:
                tick()
    totals = Counter(kind for each in runs for kind in each["kills"])
    facts = {
        "kills": sum(totals.values()),
        "by kind": totals,
        "runs": runs,
        "all the same": all(each["same weights"] and each["every sample once"] for each in runs),
    }
    bench.write(path, "kills", {"seed": seed}, **facts)


def disturb(folder: Path, kinds: list[str], generator: random.Random) -> dict[str, Any]:
    """Do one run with a kill of each of `kinds`; return what happened."""
    folder.mkdir()
    process, again, killed = start_run(folder, RANKS), 0, []
    while True:
        left = kinds[len(killed) :]
        during_save = bool(left) and "save" in left[0]
        pids = wait_for_moment(folder, RANKS, generator, process, during_save=during_save) if left else []
        if pids:
            chosen = (
                pids if "all" in left[0] else pids[:1] if left[0] == "rank 0" else [generator.choice(pids)]
            )
            for pid in chosen:
                os.kill(pid, signal.SIGKILL)
            killed.append(left[0])
            while training_pids(folder, RANKS) and process.poll() is None:
                time.sleep(0.01)
        elif process.wait() == 0:
            return {"kills": killed, "started again": again}
        else:
            again += 1
            process = start_run(folder, RANKS)


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: kinds of kills, and how the runs ended."""
    found = bench.read("kills")
    runs = found["runs"]
    rows = [[kind, str(number)] for kind, number in Counter(found["by kind"]).most_common()]
    rows.append(["**in all**", f"**{found['kills']}**"])
    same, once, again = (
        sum(run[name] for run in runs) for name in ("same weights", "every sample once", "started again")
    )
    return {
        "kills": f"{table(['killed', 'times'], rows)}\n\n"
        f"Of {len(runs)} runs {len(runs)} ended; {same} with the same weights, {once} with every sample used once. "
        f"{again} times the command was given again."
    }


if __name__ == "__main__":
    bench.main()
