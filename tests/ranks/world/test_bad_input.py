"""Mistakes of a program, on separate ranks and under torchrun: the run ends with an error that names a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch, paceline
from torch import nn
mistake, strategy = sys.argv[1:]
world = paceline.init(timeout=60)
wide = 9 if mistake == "model" and world.rank == 1 else 8
net = nn.Sequential(nn.Linear(4, wide), nn.ReLU(), nn.Linear(wide, 1))
model = paceline.DataParallel(net, sync=strategy)
optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
for step in range(4):
    batch = torch.randn(6, 5 if mistake == "batch" and (world.rank, step) == (1, 2) else 4)
    model.backward(model(batch).square().mean(), samples=len(batch))
    optim.step()
    optim.zero_grad()
paceline.shutdown()
print("ended well", flush=True)
"""


def run_ranks(fork, folder, *arguments):
    """Run the program on two ranks; return exit code and output of each."""
    ranks = [fork(run, rank, folder, *arguments) for rank in range(2)]
    codes = [rank.wait(timeout=60) for rank in ranks]
    return [(code, (Path(folder) / f"rank{rank}").read_text()) for rank, code in enumerate(codes)]


def run(send, rank, folder, *arguments):
    """Be a rank that runs the program, and end as it ends."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ["PACELINE_INIT_METHOD"] = f"file://{folder}/meet"
    sys.argv = ["program.py", *arguments]
    with open(f"{folder}/rank{rank}", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    exec(compile(PROGRAM, "program.py", "exec"), {"__name__": "__main__"})


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["bucketed", "sharded", "flat"])
def test_a_batch_of_the_wrong_shape_on_one_rank_ends_all(killable, strategy):
    (_, zero), (_, one) = results = killable.run_ranks(run_ranks, "batch", strategy, timeout=100)
    assert [code for code, _ in results] == [1, 1]
    assert "mat1 and mat2 shapes cannot be multiplied (6x5 and 4x8)" in one
    assert "rank 1" in zero
    assert "ended well" not in zero + one


@pytest.mark.parametrize(
    ("mistake", "strategy", "message"),
    [
        ("model", "bucketed", "rank 1 has parameter '0.weight': shape [9, 4], float32"),
        ("none", "bukketed", "did you mean 'bucketed'?"),
    ],
)
def test_a_mistake_known_at_wrapping_is_one_message(killable, mistake, strategy, message):
    for code, text in killable.run_ranks(run_ranks, mistake, strategy, timeout=100):
        assert code == 1
        assert message in text
        assert "ended well" not in text


@pytest.mark.thorough
def test_a_mistake_on_one_rank_ends_torchrun_and_without_one_it_succeeds(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1"}
    for mistake in ("batch", "none"):
        command = [sys.executable, *torchrun, str(script), mistake, "bucketed"]
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        if mistake == "batch":
            assert result.returncode != 0
            assert "mat1 and mat2 shapes cannot be multiplied (6x5 and 4x8)" in result.stderr
            assert "ended well" not in result.stdout
        else:
            assert result.returncode == 0, result.stderr
            assert result.stdout.count("ended well") == 2
