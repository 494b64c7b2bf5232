"""From a failure to the next step: `paceline run`, restarting or recovering in place, beside torchrun.

    python benchmarks/restarts/restarts.py run      (as root, on Linux: plays hosts with `paceline.testing.netlab`)
    python benchmarks/restarts/restarts.py table

One host, two ranks: rank 1 is killed (SIGKILL); once more with a rank 0 that ignores SIGTERM. Three hosts with a rank
each: all processes of one are killed, and later it comes back. The launchers take turns. *Live*: the other ranks
recover in place.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.lab_run import read_json
from bench_harness.markdown import table
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption

LIVE = "paceline run, live"
ONE_HOST = {
    LIVE: "paceline run --nproc-per-node 2",
    "paceline run": "paceline run --nproc-per-node 2",
    "torchrun": "torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=3",
}
_TORCHRUN = (
    "torch.distributed.run --nnodes=2:3 --nproc-per-node=1 --max-restarts=3 "
    "--rdzv-backend=c10d --rdzv-endpoint=host0:29400 --rdzv-id=run"
)
THREE_HOSTS = {
    LIVE: "paceline run --nnodes 3 --min-ranks 2 --rendezvous host0:29400",
    "paceline run": "paceline run --nnodes 3 --min-ranks 2 --rendezvous host0:29400",
    "torchrun": _TORCHRUN,
    "torchrun, tuned": f"{_TORCHRUN} --rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4",
}
TUNED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LIMIT_SECONDS = 180.0
LOST_HOST = 2  # it does not serve the rendezvous
SCENES = {
    "rank killed": "one host: a rank is killed",
    "rank killed, peer deaf": "the same, and the other heeds no SIGTERM",
    "host killed": "three hosts: one is lost",
    "host back": "it comes back",
}

Row = dict[str, Any]

bench = Benchmark(__file__, docs=["restarts.md"])


@bench.run
def run(
    repeats: Annotated[int, Option(min=1, help="Turns of each launcher.")] = 3, json_file: JsonOption = None
) -> None:
    """Time restarts."""
    path = bench.output(json_file, "restarts")
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    with ProgressBar("restarts", repeats * (2 * len(ONE_HOST) - 1 + 2 * len(THREE_HOSTS))) as tick:
        for _ in range(repeats):
            for row in one_round():
                rows.append(row)
                tick()
    settings = {"repeats": repeats, "threads": 1, "backend": "gloo", "one_host": ONE_HOST}
    settings |= {"three_hosts": THREE_HOSTS, "tuned_environment": TUNED}
    bench.write(path, "restarts", settings, rows=rows)


def one_round() -> Iterator[Row]:
    """Yield a row per launcher and scene."""
    for launcher in ONE_HOST:
        for scene in ("rank killed", "rank killed, peer deaf")[: 1 if launcher == LIVE else 2]:
            yield one_host(launcher, scene)
    for launcher in THREE_HOSTS:
        yield from three_hosts(launcher)


def command(launcher: str, folder: Path, *arguments: str) -> list[str]:
    """Return the command line that starts the ranks by a launcher with its options."""
    return [sys.executable, "-m", *launcher.split(), str(bench.folder / "steps.py"), str(folder), *arguments]


def mode(launcher: str, scene: str = "") -> list[str]:
    """Return the further arguments of the program."""
    return ["live"] if launcher == LIVE else ["hang"] if "deaf" in scene else []


def one_host(launcher: str, scene: str) -> Row:
    """Kill rank 1 of two, and return when rank 0 made its first step after it: alone if that is live."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as place:
        folder = Path(place)
        run = subprocess.Popen(
            command(ONE_HOST[launcher], folder, *mode(launcher, scene)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            first_step(folder, 0, 2)
            killed = first_step(folder, 1, 2)
            if killed is None:
                raise TimeoutError(f"{launcher}: the ranks made no step")
            failed = time.time()
            os.kill(killed["pid"], signal.SIGKILL)
            row = measure(scene, launcher, failed, folder, 1 if launcher == LIVE else 2)
            (folder / "enough").touch()
            run.wait(LIMIT_SECONDS)
        finally:
            run.terminate()
            run.wait()
    return row


def three_hosts(launcher: str) -> Iterator[Row]:
    """Kill all processes of one host of three, start it again, and yield when rank 0 made its first step after each."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as place, Lab(3) as lab:
        folder = Path(place)
        line = command(THREE_HOSTS[launcher], folder, *mode(launcher))
        env = TUNED if "tuned" in launcher else {}
        env = {**env, "TMPDIR": str(folder)}  # a command that is killed leaves its logs there
        lab.start(line, env=env)
        first_step(folder, 0, 3)
        time.sleep(1.0)
        failed = time.time()
        lab.kill(LOST_HOST)
        yield measure("host killed", launcher, failed, folder, 2)
        time.sleep(1.0)
        back = time.time()
        again = lab.start(line, on=LOST_HOST, env=env)
        yield measure("host back", launcher, back, folder, 3, running=again.running)


def first_step(
    folder: Path, rank: int, size: int, after: float = 0.0, running: Callable[[], object] = lambda: True
) -> Row | None:
    """Wait until `rank` of a world of `size` that began later than `after` made its first step.

    Returns:
        its report; None if there is none within the limit, or before it stops `running`.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline and running():
        for path in folder.glob(f"*-{rank}.json"):
            report = read_json(path)
            if report["size"] == size and report["began"] > after:
                return report
        time.sleep(0.02)
    return None


def measure(
    scene: str,
    launcher: str,
    since: float,
    folder: Path,
    size: int,
    running: Callable[[], object] = lambda: True,
) -> Row:
    """Return the seconds from `since` until the new rank 0 began and made its first step; None where it never did.

    A rank that recovers in place begins when it notices the change.
    """
    report = first_step(folder, 0, size, since, running)
    seconds = {name: report and report[name] - since for name in ("began", "stepped")}
    return {"scene": scene, "launcher": launcher, **seconds, "waited": time.time() - since}


def rounded(value: float) -> str:
    """Return seconds with one decimal, or two below 0.1."""
    return f"{value:.2f}" if value < 0.1 else f"{value:.1f}"


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md and docs/restarts.md: a row per scene and launcher."""
    found, rows = bench.read("restarts")["rows"], []
    for scene, title in SCENES.items():
        for launcher in THREE_HOSTS:
            runs = [row for row in found if (row["scene"], row["launcher"]) == (scene, launcher)]
            stepped = [row for row in runs if row["stepped"] is not None]
            if stepped:
                cells = [rounded(median(row[name] for row in stepped)) for name in ("began", "stepped")]
                each = ["never" if row["stepped"] is None else rounded(row["stepped"]) for row in runs]
                rows.append([title, launcher, *cells, ", ".join(each)])
            elif runs:
                waited = median(row["waited"] for row in runs)
                rows.append([title, launcher, "", "never", f"gave up after {waited:.0f}"])
    return {
        "figures": table(["", "launcher", "noticed or started, s", "first step, s", "all, s"], rows, words=2)
    }


if __name__ == "__main__":
    bench.main()
