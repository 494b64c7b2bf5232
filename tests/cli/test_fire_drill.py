"""A fire drill of `paceline train`: a fault by environment variable, named by the surviving ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.testing import fault_injection
from paceline.tools.train.start_training import start_training
from paceline.tools.train.train_settings import TrainSettings


@pytest.mark.thorough
def test_a_rank_that_is_killed_is_named_on_the_terminal(tmp_path):
    text = tmp_path / "text.py"
    text.write_bytes((Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()[:20_000])
    line = [
        "--data",
        text,
        "--out",
        tmp_path / "run",
        "--steps",
        1000,
        "--context",
        16,
        "--micro-batch-size",
        2,
        "--recovery",
        "restart",
    ]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"PACELINE_FAULTS": "fail_at(rank=1, step=5, how='kill')", "NO_COLOR": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", "train", "--threads", "1", *map(str, line)],
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 1
    assert "PeerFailed: [rank 1, step 5] rank 1 on host" in ended.stderr, ended.stderr
    assert "was ended by SIGKILL" in ended.stderr


def test_a_fault_that_can_not_be_read_is_refused_before_anything_is_started(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_FAULTS", "fail_at(rank=1)")
    out = tmp_path / "run"
    with pytest.raises(UsageError, match=r"PACELINE_FAULTS='fail_at\(rank=1\)'"):
        start_training(TrainSettings(out=str(out)))
    assert not out.exists()
    assert not fault_injection.armed
