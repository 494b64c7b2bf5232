"""100 SIGTERMs at random moments: whether a checkpoint of the very step is there each time.

    python benchmarks/save-on-warning/save_on_warning.py run
    python benchmarks/save-on-warning/save_on_warning.py table

Each run is `paceline run --grace 10s` of `bench_harness.fault_injection.saved_training` on two ranks, and gets up to
five SIGTERMs at random moments: to the command, to one rank, to all ranks, to every process at once, or to the command
while a checkpoint is being written. A command that has ended is started again. After each signal, the step of the
newest checkpoint is compared with the last one that the ranks have logged; at the end the weights with those of an
undisturbed run, and each step must have been done once by each rank.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.fault_injection.disturbed_run import start_run, training_pids, wait_for_moment
from bench_harness.fault_injection.saved_training import (
    EPOCHS,
    GLOBAL_BATCH,
    SAMPLES,
    logged,
    weight_difference,
)
from bench_harness.markdown import table
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.world.live_file import LEFT_EXIT_CODE

KINDS = ["the command", "one rank", "all ranks", "every process", "the command during a save"]
RANKS, SIGNALS_PER_RUN, GRACE = 2, 5, "10s"
STEPS = EPOCHS * SAMPLES // GLOBAL_BATCH

bench = Benchmark(__file__, docs=["save-on-warning.md"])


@bench.run
def run(
    signals: Annotated[int, Option(min=1, help="SIGTERMs in all.")] = 100,
    seed: Annotated[int, Option(help="Seed of kinds and moments.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Warn runs, compare each checkpoint with the step that was done, and the ends with an undisturbed run."""
    path = bench.output(json_file, "save-on-warning")
    generator = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(signals)]
    generator.shuffle(kinds)
    runs: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as place,
        ProgressBar("SIGTERMs", signals) as tick,
    ):
        undisturbed = Path(place, "undisturbed")
        undisturbed.mkdir()
        assert start_run(undisturbed, RANKS).wait() == 0, (undisturbed / "output").read_text()
        while kinds:
            folder = Path(place, f"run-{len(runs)}")
            found = disturb(folder, kinds[:SIGNALS_PER_RUN], generator, tick)
            kinds = kinds[len(found["signals"]) :]
            same = weight_difference(folder, undisturbed) == 0.0
            runs.append(found | {"same weights": same, "each step once": each_step_once(folder)})
    given = [each for one in runs for each in one["signals"]]
    facts = {
        "signals": len(given),
        "by kind": Counter(each["kind"] for each in given),
        "saved the very step": sum(each["saved"] == each["done"] for each in given),
        "runs": runs,
        "all the same": all(one["same weights"] and one["each step once"] for one in runs),
    }
    bench.write(path, "save-on-warning", {"seed": seed, "grace": GRACE}, **facts)


def disturb(folder: Path, kinds: list[str], generator: random.Random, tick: Any) -> dict[str, Any]:
    """Do one run with a SIGTERM of each of `kinds`; return what happened."""
    folder.mkdir()
    save_every = 3 if any("save" in kind for kind in kinds) else 1000
    start = {"options": ["--grace", GRACE], "save_every": save_every}
    process, again, signals = start_run(folder, RANKS, **start), 0, []
    while True:
        left = kinds[len(signals) :]
        during_save = bool(left) and "save" in left[0]
        pids = wait_for_moment(folder, RANKS, generator, process, during_save=during_save) if left else []
        if pids:
            signals.append(warn(folder, left[0], pids, process, generator))
            tick()
        elif process.wait() == 0:
            return {"save every": save_every, "signals": signals, "started again": again}
        else:
            again += 1
            process = start_run(folder, RANKS, **start)


def warn(
    folder: Path, kind: str, pids: list[int], process: subprocess.Popen[bytes], generator: random.Random
) -> dict[str, Any]:
    """Send SIGTERM, and wait until the ranks have ended; return what was done, and what was saved."""
    to_command = "command" in kind or kind == "every process"
    chosen = (
        pids
        if kind in ("all ranks", "every process")
        else [generator.choice(pids)]
        if kind == "one rank"
        else []
    )
    began = time.monotonic()
    for pid in [*chosen, *([process.pid] if to_command else [])]:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:  # the others have led it away already
            continue
    while any(pid in training_pids(folder, RANKS) for pid in pids):
        time.sleep(0.001)
    seconds = time.monotonic() - began
    code = process.wait() if to_command else None
    lines = logged(folder, "steps-*.jsonl")
    last = {
        rank: max((line["step"] for line in lines if line["rank"] == rank), default=0)
        for rank in range(RANKS)
    }
    return {
        "kind": kind,
        "done": last[0] if last[0] == last[1] else list(last.values()),
        "saved": newest(folder),
        "seconds": round(seconds, 3),
        "code": code,
    }


def newest(folder: Path) -> int:
    """Return the step of the newest complete checkpoint; 0: there is none."""
    names = (path.name[5:] for path in (folder / "checkpoint").glob("step-*"))
    return max((int(name) for name in names if name.isdecimal()), default=0)


def each_step_once(folder: Path) -> bool:
    """Return whether each rank has done each step once: none was lost or repeated."""
    done = Counter((line["rank"], line["step"]) for line in logged(folder, "steps-*.jsonl"))
    return done == Counter((rank, step) for rank in range(RANKS) for step in range(1, STEPS + 1))


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: kinds of signals, what was saved, and how the runs ended."""
    found = bench.read("save-on-warning")
    given = [each for one in found["runs"] for each in one["signals"]]
    rows = []
    for kind in KINDS:
        those = [each for each in given if each["kind"] == kind]
        seconds = [each["seconds"] for each in those]
        saved = sum(each["saved"] == each["done"] for each in those)
        rows.append(
            [kind, str(len(those)), str(saved), f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"]
        )
    exact = sum(each["saved"] == each["done"] for each in given)
    rows.append(["**in all**", f"**{len(given)}**", f"**{exact}**", "", ""])
    head = ["SIGTERM to", "times", "checkpoint of the very step", "ranks ended after, s: median", "longest"]
    same, once = (sum(one[name] for one in found["runs"]) for name in ("same weights", "each step once"))
    codes = Counter(each["code"] for each in given if each["code"] is not None)
    return {
        "signals": f"{table(head, rows)}\n\n"
        f"Of {len(found['runs'])} runs {same} ended with the same weights, {once} with each step done once. The "
        f"command, where it got the signal, ended with code {LEFT_EXIT_CODE} {codes[LEFT_EXIT_CODE]} times of "
        f"{codes.total()}."
    }


if __name__ == "__main__":
    bench.main()
