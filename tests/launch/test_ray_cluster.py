"""A Ray cluster of this machine: a training that finishes, and one of which a worker is killed."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

pytest.importorskip("ray", reason="no Ray (pip install 'paceline[ray]')")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def launch(notes, tmp_path):
    """Start ``paceline launch ray``, with a cluster of its own."""
    made = []
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"), "RAY_AUTH_MODE": "disabled"}

    def start(*options, pause=0.0):
        line = [sys.executable, "-m", "paceline", "launch", "ray", "--ranks", "2", "--submit", *options]
        line += ["--folder", str(notes.folder), *notes.words(pause)]
        made.append(
            subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        return made[-1]

    yield start
    for one in made:
        if one.poll() is None:
            one.terminate()
        one.communicate(timeout=60)


@pytest.mark.launcher("Ray", "finishes")
def test_it_finishes(launch, notes, undisturbed):
    driver = launch()
    said, _ = driver.communicate(timeout=240)
    assert driver.returncode == 0, said
    notes.check_finished(undisturbed)


@pytest.mark.launcher("Ray", "killed and resumed")
def test_after_the_death_of_a_worker_it_resumes(launch, notes, undisturbed):
    driver = launch(pause=0.2)
    first, _ = notes.await_step(3)
    [worker] = [one for one in psutil.Process(first).parents() if one.name().startswith("ray::")]
    worker.kill()
    said, _ = driver.communicate(timeout=240)
    assert driver.returncode == 0, said
    notes.check_resumed(undisturbed)
