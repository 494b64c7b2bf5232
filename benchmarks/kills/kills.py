"""50 SIGKILLs at random moments: does every run end, with the same parameters to the bit, every sample used once?

python benchmarks/kills/kills.py [--kills 50] [--seed 0]

Each run is `paceline run` of training.py on two ranks. It is killed up to five times, at random moments: one rank,
rank 0, all ranks, or any of these while a checkpoint is being written. A run that gives up (the same rank died twice
without progress in between) is started again by the same command. At the end its weights are compared with those of a
run that nobody disturbed, and the samples that its steps used are counted. Writes kills.json beside this file.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from training import used_once

from paceline._core.files import write_json
from paceline.checkpoint.weights_export import read_weights
from paceline.tools.result_files import result_head

HERE = Path(__file__).parent
KINDS = ["one rank", "rank 0", "all ranks", "one rank during a save", "all ranks during a save"]
RANKS, KILLS_A_RUN = 2, 5


def command(folder: Path) -> list[str]:
    """Return the command of a run."""
    options = ["--ranks", str(RANKS), "--max-restarts", "1000", "--log-dir", str(folder / "logs")]
    return [sys.executable, "-m", "paceline", "run", *options, str(HERE / "training.py"), str(folder)]


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start a run, or start it again."""
    with (folder / "output").open("ab") as output:
        return subprocess.Popen(
            command(folder), stdout=output, stderr=output, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def living(folder: Path) -> list[int]:
    """Return the process ids of the ranks that are in their loop now, none while a world begins."""
    pids = []
    for rank in range(RANKS):
        try:
            pid = int((folder / f"pid-{rank}").read_text())
            if b"training.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(pid)
        except (OSError, ValueError):
            return []
    return pids if len(pids) == RANKS else []


def saving(folder: Path) -> bool:
    """Tell whether a checkpoint is being written."""
    return any((folder / "checkpoint").glob("step-*.tmp-*"))


def await_moment(
    folder: Path, kind: str, chance: random.Random, process: subprocess.Popen[bytes]
) -> list[int]:
    """Wait for a random moment of the kind; return the ranks' process ids, none if the run ended before."""
    waited = chance.uniform(0.0, 1.5)
    since = None
    while process.poll() is None:
        pids = living(folder)
        since = (since or time.monotonic()) if pids else None
        if (
            since is not None
            and time.monotonic() - since >= waited
            and ("save" not in kind or saving(folder))
        ):
            time.sleep(chance.uniform(0.0, 0.02))
            return pids
        time.sleep(0.001)
    return []


def disturb(folder: Path, kinds: list[str], chance: random.Random) -> dict[str, Any]:
    """Do one run with a kill of each of `kinds`; return what happened."""
    folder.mkdir()
    process, again, killed = start(folder), 0, []
    left = list(kinds)
    while True:
        pids = await_moment(folder, left[0], chance, process) if left else []
        if pids:
            kind = left.pop(0)
            victims = pids if "all" in kind else pids[:1] if kind == "rank 0" else [chance.choice(pids)]
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
            killed.append(kind)
            while living(folder) and process.poll() is None:
                time.sleep(0.01)
        elif process.wait() == 0:
            break
        else:
            again += 1
            process = start(folder)
    return {"kills": killed, "started again": again}


def same_weights(folder: Path, other: Path) -> bool:
    """Tell whether two runs ended with the same weights, to the bit."""
    ours, theirs = (read_weights(each / "checkpoint") for each in (folder, other))
    return ours.keys() == theirs.keys() and all(bool((ours[name] == theirs[name]).all()) for name in ours)


def main() -> None:
    """Measure, print a line for each run, and write kills.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.kills < 1:
        parser.error(f"--kills {options.kills}: give 1 or more")
    chance = random.Random(options.seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(options.kills)]
    chance.shuffle(kinds)
    with tempfile.TemporaryDirectory(prefix="paceline-kills-") as place:
        calm = Path(place, "calm")
        calm.mkdir()
        assert start(calm).wait() == 0, (calm / "output").read_text()
        assert used_once(calm)
        runs: list[dict[str, Any]] = []
        while kinds:
            folder = Path(place, f"run-{len(runs)}")
            told = disturb(folder, kinds[:KILLS_A_RUN], chance)
            kinds = kinds[len(told["kills"]) :]
            told |= {"same weights": same_weights(folder, calm), "every sample once": used_once(folder)}
            runs.append(told)
            print(told, flush=True)
    totals = Counter(kind for told in runs for kind in told["kills"])
    result = result_head("kills") | {
        "settings": {"seed": options.seed},
        "kills": sum(totals.values()),
        "by kind": totals,
        "runs": runs,
        "all the same": all(told["same weights"] and told["every sample once"] for told in runs),
    }
    write_json(HERE / "kills.json", result)
    print(f"{result['kills']} kills in {len(runs)} runs; all as if undisturbed: {result['all the same']}")


if __name__ == "__main__":
    main()
