"""mpiexec: a world that finishes, and one restarted after a kill."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest
from notes import STEPS, WEIRD

from paceline.world.mpi_world import find_mpiexec

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec (pip install 'paceline[mpi]')"),
]


@pytest.fixture
def launch(notes):
    """Run ``paceline launch mpi``."""

    def run(*options, pause=0.05, number=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        line = [
            sys.executable,
            "-m",
            "paceline",
            "launch",
            "mpi",
            "--nproc-per-node",
            "2",
            "--port",
            port,
            "--submit",
        ]
        line += ["--workdir", str(notes.folder), *options, *notes.words(pause)]
        if number is None:
            return subprocess.run(line, capture_output=True, text=True, timeout=240)
        with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                notes.await_step(3)
                process.send_signal(number)
                output = process.communicate(timeout=120)[0]
            finally:
                process.kill()
        return subprocess.CompletedProcess(line, process.returncode, output, "")

    return run


@pytest.mark.launcher("MPI", "finishes")
def test_it_finishes(launch, notes, expected_digest):
    result = launch()
    assert result.returncode == 0, result.stdout + result.stderr
    notes.check_finished(expected_digest)
    assert notes.all()[-1]["words"] == list(WEIRD)


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_warned_world_saves_and_is_not_started_again(launch, notes, expected_digest, number):
    saves = ["--env", "SAVE_EVERY=1000"]
    ended = launch(*saves, pause=0.3, number=number)
    assert ended.returncode == 75, ended.stdout
    assert "restart 1" not in ended.stdout
    result = launch(*saves)
    assert result.returncode == 0, result.stdout + result.stderr
    notes.check_resumed(expected_digest)
    assert [step for steps in notes.steps() for step in steps] == list(range(STEPS))


@pytest.mark.thorough
@pytest.mark.launcher("MPI", "killed and resumed")
def test_a_killed_world_is_started_again_and_resumes(launch, notes, expected_digest):
    kill = "fail_at(rank=1, step=5, how='kill')"
    ended = launch("--max-restarts", "0", "--env", f"PACELINE_FAULTS={kill}")
    assert ended.returncode not in (0, 2), ended.stdout + ended.stderr
    result = launch()
    assert result.returncode == 0, result.stdout + result.stderr
    notes.check_resumed(expected_digest)
