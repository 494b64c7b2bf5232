"""Runs of ``live_program.py`` under ``paceline run``, and what their processes have written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from warm_commands import start_command

__all__ = ["PROGRAM", "STEPS", "LiveRun", "is_running", "run_alone"]

PROGRAM = Path(__file__).with_name("live_program.py")
STEPS = 150


class LiveRun:
    """A run of the program under ``paceline run``.

    Its processes are forked from one that has imported torch; with ``forked=False`` each one starts Python.
    """

    def __init__(self, folder, ranks, backend="paceline", steps=STEPS, data=(), options=(), forked=True):
        self.folder = folder
        command = ["run", "--nproc-per-node", str(ranks), "--min-ranks", "1", *options]
        command += ["--max-restarts", "20", "--log-dir", str(folder / "logs")]
        command += [str(PROGRAM), str(steps), str(folder), *data]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LIVE_BACKEND": backend}
        with (folder / "output").open("w") as output:
            if forked:
                self.process = start_command(command, env=environment, output=output)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "paceline", *command],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )

    def lines(self):
        """Return what each process has written: {member: [(pid, step, ranks)]}."""
        found = {}
        for path in self.folder.glob("*.log"):
            rows = [line.split() for line in path.read_text().splitlines()]
            found[path.stem] = [tuple(map(int, row)) for row in rows if len(row) == 3 and row[0].isdigit()]
        return found

    def logged(self, kind):
        """Return the numbers in all processes' lines of a kind."""
        lines = [line.split() for path in self.folder.glob("*.log") for line in path.read_text().splitlines()]
        return [tuple(map(int, row[1:])) for row in lines if row[0] == kind]

    def step(self):
        return max((row[1] for rows in self.lines().values() for row in rows), default=0)

    def wait_for(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or self.process.poll() is not None:
                self.kill()
                raise AssertionError(self.text())
            time.sleep(0.02)

    def training(self):
        """Return the pids of the processes in the newest world, by member."""
        alive = {
            member: rows[-1] for member, rows in self.lines().items() if rows and is_running(rows[-1][0])
        }
        newest = max((row[1] for row in alive.values()), default=0)
        return {member: row[0] for member, row in alive.items() if row[1] >= newest - 1}

    def pid(self, local_rank):
        (pid,) = [pid for member, pid in self.training().items() if member.split("-")[1] == str(local_rank)]
        return pid

    def text(self):
        logs = sorted((self.folder / "logs").rglob("*.log"))
        return "\n".join(path.read_text() for path in [self.folder / "output", *logs])

    def end(self, seconds=90):
        """Wait for the end; return the digests of all processes that have finished."""
        try:
            assert self.process.wait(seconds) == 0, self.text()
        finally:
            self.kill()
        found = [re.findall(r"digest (\w+)", path.read_text()) for path in self.folder.glob("*.log")]
        return {each for digests in found for each in digests}

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def records(self, event):
        path = self.folder / "logs" / "restarts.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if record["event"] == event]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def run_alone(folder, *data):
    """Return the digest of a run of one process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), str(STEPS), str(folder), *data]
    subprocess.run(command, check=True, timeout=60, env=environment)
    return (folder / "alone.log").read_text().split()[-1]
