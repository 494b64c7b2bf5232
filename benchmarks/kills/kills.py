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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.fault_injection.saved_training import PROGRAM, used_once, weight_difference
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
        assert start(undisturbed).wait() == 0, (undisturbed / "output").read_text()
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


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start a run, for the first time or again."""
    options = ["--nproc-per-node", str(RANKS), "--max-restarts", "1000", "--log-dir", str(folder / "logs")]
    command = [sys.executable, "-m", "paceline", "run", *options, PROGRAM, str(folder)]
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def training_pids(folder: Path) -> list[int]:
    """Return the process ids of the ranks that are in their loop now, none while a world begins."""
    pids = []
    for rank in range(RANKS):
        try:
            pid = int((folder / f"pid-{rank}").read_text())
            if PROGRAM.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(pid)
        except (OSError, ValueError):
            return []
    return pids if len(pids) == RANKS else []


def wait_for_moment(
    folder: Path, kind: str, generator: random.Random, process: subprocess.Popen[bytes]
) -> list[int]:
    """Wait for a random moment of the kind; return the ranks' process ids, none if the run ended before."""
    seconds, since = generator.uniform(0.0, 1.5), None
    while process.poll() is None:
        pids = training_pids(folder)
        since = (since or time.monotonic()) if pids else None
        saving = "save" not in kind or any((folder / "checkpoint").glob("step-*.tmp-*"))
        if since is not None and time.monotonic() - since >= seconds and saving:
            time.sleep(generator.uniform(0.0, 0.02))
            return pids
        time.sleep(0.001)
    return []


def disturb(folder: Path, kinds: list[str], generator: random.Random) -> dict[str, Any]:
    """Do one run with a kill of each of `kinds`; return what happened."""
    folder.mkdir()
    process, again, killed = start(folder), 0, []
    while True:
        left = kinds[len(killed) :]
        pids = wait_for_moment(folder, left[0], generator, process) if left else []
        if pids:
            chosen = (
                pids if "all" in left[0] else pids[:1] if left[0] == "rank 0" else [generator.choice(pids)]
            )
            for pid in chosen:
                os.kill(pid, signal.SIGKILL)
            killed.append(left[0])
            while training_pids(folder) and process.poll() is None:
                time.sleep(0.01)
        elif process.wait() == 0:
            return {"kills": killed, "started again": again}
        else:
            again += 1
            process = start(folder)


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
