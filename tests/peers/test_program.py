"""Programs that never import paceline use the backend: under torchrun, or started by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("plain_program.py")


@pytest.mark.thorough
def test_a_program_under_torchrun():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*torchrun, str(PROGRAM)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "import paceline" not in PROGRAM.read_text()
    assert sorted(ended.stdout.splitlines()) == ["rank 0: paceline 3", "rank 1: paceline 3"]
