"""What being watched costs a training step: blocks of steps with and without a Watch, in turns.

    python benchmarks/watch/overhead.py

Two ranks of the mini GPT of ``paceline train`` take blocks of steps with and without a Watch in the same processes
(A B B A), in several pairs of processes one after another. Writes ``overhead.json`` beside this file.
"""

from __future__ import annotations

import json
import tempfile
import timeit
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from steps import BATCH, CONTEXT, STEPS

from bench_harness.program import run_program
from bench_harness.turns import ratio_of
from paceline._core.files import write_json
from paceline._core.step_state import StepState
from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
RANKS = 2


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of each kind in a pair of processes.")] = 30,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of processes, one after another.")] = 4,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the result there.")] = HERE
    / "overhead.json",
) -> None:
    """Time steps with and without a Watch."""
    check_writable(out, make_folder=True)
    found: list[dict[str, Any]] = []
    with ProgressBar("overhead", pairs) as tick:
        for _ in range(pairs):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "seconds.json")
                run_ranks([str(HERE / "steps.py"), str(rounds), str(path)], RANKS)
                found.append(json.loads(path.read_text()))
            tick()
    all_of = {kind: [each for one in found for each in one["seconds"][kind]] for kind in ("with", "without")}
    ratio = ratio_of(all_of["with"], all_of["without"])
    here = StepState()
    result = result_head("watch-overhead") | {
        "settings": {"ranks": RANKS, "model": "mini", "batch": BATCH, "context": CONTEXT, "steps": STEPS},
        "step_seconds": {kind: median(each) for kind, each in all_of.items()},
        "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        "core_share": median(each["core_share"] for each in found),
        "begin_seconds": min(timeit.repeat(lambda: here.begin(1, "forward"), number=1000, repeat=50)) / 1000,
        "pairs": found,
    }
    write_json(out, result)
    print(json.dumps({key: result[key] for key in ("step_seconds", "ratio", "core_share", "begin_seconds")}))


if __name__ == "__main__":
    run_program(main)
