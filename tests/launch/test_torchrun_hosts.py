"""torchrun on two hosts of the network lab, started by a shell line per host, as over ssh."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from notes import KILL_ONCE

from paceline.testing.netlab import namespace_main

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def launch(lab, notes, tmp_path):
    """Run ``paceline launch torchrun`` on both hosts."""
    shell = tmp_path / "shell"  # as ssh does: HOST LINE
    pids = " ".join(f"host{host}) pid={lab._nodes[host].ready()};;" for host in range(2))
    shell.write_text(
        f"#!/bin/sh\ncase $1 in {pids} esac\nshift\n"
        f'exec {sys.executable} -I -S {namespace_main.__file__} enter $pid / sh -c "$*"\n'
    )
    shell.chmod(0o755)

    def run(*options):
        line = [sys.executable, "-m", "paceline", "launch", "torchrun", "--host", "host0", "--host", "host1"]
        line += ["--submit", "--shell", str(shell), "--workdir", str(notes.folder)]
        line += [
            "--env",
            "GLOO_SOCKET_IFNAME=eth0",
            "--env",
            f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}",
        ]
        return subprocess.run([*line, *options, *notes.words()], capture_output=True, text=True, timeout=240)

    return run


@pytest.mark.thorough
@pytest.mark.launcher("torchrun", "finishes")
def test_it_finishes(launch, notes, expected_digest):
    result = launch()
    assert result.returncode == 0, result.stdout + result.stderr
    notes.check_finished(expected_digest, nodes=2)


@pytest.mark.thorough
@pytest.mark.launcher("torchrun", "killed and resumed")
def test_a_killed_rank_is_started_again_and_resumes(launch, notes, expected_digest):
    result = launch("--env", f"PACELINE_FAULTS={KILL_ONCE}")
    assert result.returncode == 0, result.stdout + result.stderr
    notes.check_resumed(expected_digest, nodes=2)
    assert "host1 | " in result.stdout
