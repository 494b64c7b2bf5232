"""Mistakes of a program under torchrun: the run ends with an error that says what to do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch, paceline as pl
from torch import nn
mistake, strategy = sys.argv[1:]
world = pl.init(timeout=60)
wide = 9 if mistake == "model" and world.rank == 1 else 8
net = nn.Sequential(nn.Linear(4, wide), nn.ReLU(), nn.Linear(wide, 1))
model = pl.DataParallel(net, sync=strategy)
optim = pl.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
for step in range(4):
    batch = torch.randn(6, 5 if mistake == "batch" and (world.rank, step) == (1, 2) else 4)
    model.backward(model(batch).square().mean(), samples=len(batch))
    optim.step()
    optim.zero_grad()
pl.shutdown()
print("ended well", flush=True)
"""


def run(tmp_path, *arguments):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, str(script), *arguments]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("strategy", ["bucketed", "sharded", "flat"])
def test_a_batch_of_the_wrong_shape_on_one_rank_ends_all(tmp_path, strategy):
    told = run(tmp_path, "batch", strategy)
    assert told.returncode != 0
    assert "mat1 and mat2 shapes cannot be multiplied (6x5 and 4x8)" in told.stderr
    assert "ended well" not in told.stdout


@pytest.mark.parametrize(
    ("mistake", "strategy", "message"),
    [
        ("model", "bucketed", "rank 1 has parameter '0.weight': shape [9, 4], float32"),
        ("none", "bukketed", "did you mean 'bucketed'?"),
    ],
)
def test_what_ranks_can_know_at_wrapping_is_one_message(tmp_path, mistake, strategy, message):
    told = run(tmp_path, mistake, strategy)
    assert told.returncode != 0
    assert message in told.stderr
    assert "ended well" not in told.stdout


def test_the_program_without_a_mistake_ends_well(tmp_path):
    told = run(tmp_path, "none", "bucketed")
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("ended well") == 2
