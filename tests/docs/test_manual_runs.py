"""A few command lines of the manual run, and print what the manual shows."""

from __future__ import annotations

import subprocess
import sys

import pytest
from manual import ROOT
from shell import command_lines

RUN = {
    "docs/data.md": (
        "paceline data --samples 50000 --world-size 7 --scheme round_robin",
        "deadlock in step 111",
    ),
    "docs/slow-networks.md": ("paceline plan network", "int8"),
    "docs/collectives.md": ("paceline collective ring", "all-reduce"),
    "docs/plan.md": ("paceline plan batch --model medium", "rtx-4090"),
    "docs/step-time.md": ("paceline plan step --profile profile.json", "bucketed"),
}


@pytest.mark.sweep
@pytest.mark.parametrize("page", RUN)
def test_a_command_line_of_the_manual_runs(page, tmp_path):
    begins, expected = RUN[page]
    line = next(line for line in command_lines(ROOT / page) if " ".join(line.words).startswith(begins))
    (tmp_path / "profile.json").write_bytes((ROOT / "tests" / "docs" / "profile.json").read_bytes())
    ended = subprocess.run(
        [sys.executable, "-m", *line.words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert expected in ended.stdout
