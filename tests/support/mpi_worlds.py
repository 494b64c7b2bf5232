"""Worlds under mpiexec as subprocesses of a test, with a time limit; no process is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

import paceline
from paceline.launch.targets.mpiexec_command import mpich_settings
from paceline.world.mpi_world import find_mpiexec

SOURCE = str(Path(paceline.__file__).parents[1])
MPIEXEC = find_mpiexec()
REASON = "needs mpiexec: pip install 'paceline[mpi]'"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "PACELINE_INIT_METHOD", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class WorldResult:
    """Result of a world: mpiexec's exit code, its output, and the reports of its ranks."""

    code: int
    out: str
    err: str

    def reports(self):
        """Return the reports of ranks (see `report`), by rank."""
        found = [json.loads(line[7:]) for line in self.out.splitlines() if line.startswith("REPORT ")]
        return dict(sorted(found))

    def __str__(self):
        return f"exit code {self.code}\n{self.out}\n{self.err}"


def environment(**variables):
    """Return the environment of a new world."""
    env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    own = {
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{os.path.dirname(__file__)}",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return env | own | mpich_settings(crowded=True) | variables


def mpi_world(ranks, *program, timeout=60, env=None):
    """Run ``python *program`` as ranks of MPI and return its result; it is killed after `timeout` seconds."""
    command = [MPIEXEC, "-n", str(ranks), sys.executable, *map(str, program)]
    return run(command, timeout, env)


def run(command, timeout=60, env=None):
    """Run a command that may start a world, and return its result."""
    with start(command, env) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"not over after {timeout} s:\n{out}\n{err}") from None
    return WorldResult(process.returncode, out, err)


@contextlib.contextmanager
def start(command, env=None):
    """Start a command in a new process group, which is killed at the end."""
    process = subprocess.Popen(
        command,
        env=environment(**env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def all_ended(pids, timeout=10.0):
    """Return whether all processes end in time; zombies have ended."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def report(rank, what):
    """In a rank: send the test a result, once, in one write."""
    sys.stdout.write(f"REPORT {json.dumps([rank, what])}\n")
    sys.stdout.flush()
