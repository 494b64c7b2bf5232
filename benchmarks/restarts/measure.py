"""From a failure to the first step of the restarted world: `paceline run` beside torchrun.

    python benchmarks/restarts/measure.py

One host, two ranks: rank 1 is killed (SIGKILL); once more with a rank 0 that heeds no SIGTERM. Three hosts of
`paceline.testing.netlab` (as root, on Linux) with a rank each: all processes of one are killed, and later it comes
back. The launchers take turns. Writes ``restarts.json`` beside this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline.testing.netlab import Lab
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
STEPS = HERE / "steps.py"
ONE_HOST = {
    "paceline run": "paceline run --ranks 2",
    "torchrun": "torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=3",
}
_TORCHRUN = (
    "torch.distributed.run --nnodes=2:3 --nproc-per-node=1 --max-restarts=3 "
    "--rdzv-backend=c10d --rdzv-endpoint=host0:29400 --rdzv-id=run"
)
THREE_HOSTS = {
    "paceline run": "paceline run --hosts 3 --min-ranks 2 --rendezvous host0:29400",
    "torchrun": _TORCHRUN,
    "torchrun, tuned": f"{_TORCHRUN} --rdzv-conf=last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4",
}
TUNED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LIMIT_SECONDS = 180.0
VICTIM = 2  # of the hosts; it does not serve the rendezvous

Row = dict[str, Any]


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Times each launcher has its turn.")] = 3,
    json_file: Annotated[Path, typer.Option("--json", help="Write the result there.")] = HERE
    / "restarts.json",
) -> None:
    """Time restarts."""
    check_writable(json_file, "--json")
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    for _ in range(repeats):
        for row in one_round():
            rows.append(row)
            print(
                " · ".join(
                    f"{value:.2f} s" if isinstance(value, float) else str(value) for value in row.values()
                )
            )
    result = result_head("restarts") | {
        "settings": {
            "repeats": repeats,
            "threads": 1,
            "backend": "gloo",
            "one_host": ONE_HOST,
            "three_hosts": THREE_HOSTS,
            "tuned_environment": TUNED,
        },
        "rows": rows,
    }
    write_json(json_file, result)
    print(json_file)


def one_round() -> Iterator[Row]:
    """Give every launcher its turn in every scene."""
    for launcher in ONE_HOST:
        yield one_host(launcher, deaf=False)
        yield one_host(launcher, deaf=True)
    for launcher in THREE_HOSTS:
        yield from three_hosts(launcher)


def one_host(launcher: str, *, deaf: bool) -> Row:
    """Kill rank 1 of two, and return when rank 0 made its first step after it."""
    with folder() as notes:
        command = [sys.executable, "-m", *ONE_HOST[launcher].split(), str(STEPS), str(notes)]
        command += ["deaf"] if deaf else []
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            first_step(notes, 0, 2)
            victim = first_step(notes, 1, 2)
            failed = time.time()
            os.kill(victim["pid"], signal.SIGKILL)
            row = times("rank killed, peer deaf" if deaf else "rank killed", launcher, failed, notes, 2)
            (notes / "enough").touch()
            run.wait(LIMIT_SECONDS)
        finally:
            run.terminate()
            run.wait()
    return row


def three_hosts(launcher: str) -> Iterator[Row]:
    """Kill all processes of one host of three, start it again, and yield when rank 0 made its first step after each."""
    env = TUNED if "tuned" in launcher else {}
    with folder() as notes, Lab(hosts=3) as lab:
        command = [sys.executable, "-m", *THREE_HOSTS[launcher].split(), str(STEPS), str(notes)]
        env = {**env, "TMPDIR": str(notes)}  # a command that is killed leaves its logs there
        lab.start(command, env=env)
        first_step(notes, 0, 3)
        time.sleep(1.0)
        failed = time.time()
        lab.kill(VICTIM)
        yield times("host killed", launcher, failed, notes, 2)
        time.sleep(1.0)
        back = time.time()
        again = lab.start(command, on=VICTIM, env=env)
        yield times("host back", launcher, back, notes, 3, going=again.running)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Give a folder for the notes of ranks."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as path:
        yield Path(path)


def first_step(
    notes: Path, rank: int, size: int, after: float = 0.0, going: Callable[[], object] = lambda: True
) -> Row | None:
    """Wait until `rank` of a world of `size` that began later than `after` made its first step.

    Returns:
        its note; None if there is none within the limit, or before it is `going` no more.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline and going():
        for path in notes.glob(f"*-{rank}.json"):
            told = json.loads(path.read_text())
            if told["size"] == size and told["began"] > after:
                return told
        time.sleep(0.02)
    return None


def times(
    scene: str,
    launcher: str,
    since: float,
    notes: Path,
    size: int,
    going: Callable[[], object] = lambda: True,
) -> Row:
    """Return the seconds from `since` until the new rank 0 began and made its first step; None where it never did."""
    told = first_step(notes, 0, size, since, going)
    seconds = {name: told and told[name] - since for name in ("began", "stepped")}
    return {"scene": scene, "launcher": launcher, **seconds, "waited": time.time() - since}


if __name__ == "__main__":
    run_program(main)
