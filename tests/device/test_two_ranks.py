"""Two ranks on GPUs get the parameters of one process, over gloo and NCCL; over NCCL no step waits for the GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from two_ranks import STRATEGIES

from paceline.launch.process.local_ranks import run_ranks

TOLERANCE = 1e-10
SCRIPT = Path(__file__).with_name("two_ranks.py")


def run(script, arguments, folder):
    """Return the results of both ranks."""
    out = folder / "found.json"
    run_ranks([str(script), *arguments, str(out)], 2, timeout=240)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


def check(found):
    message = found.pop("captured")
    assert "CUDA graph" in message
    assert "world of 2 ranks" in message
    assert "is a CUDA graph" in found.pop("sharded graph")
    assert found.pop("mixed precision") <= 1e-4  # CUDA adds gradients of an embedding in any order
    assert len(found) == 2 * (len(STRATEGIES) + 2) + 4 + len(STRATEGIES[4:]) + 2
    assert {case: gap for case, gap in found.items() if not gap <= TOLERANCE} == {}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_on_one_card(backend, tmp_path):
    for found in run(SCRIPT, (backend, "cuda:0"), tmp_path):
        check(found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_two_cards_over_nccl(tmp_path):
    for found in run(SCRIPT, ("nccl", "cuda"), tmp_path):
        check(found)


def test_no_step_waits_for_the_gpu_and_failures_are_raised_one_step_late(tmp_path):
    for rank, found in enumerate(run(SCRIPT.with_name("host_waits.py"), ("cuda:0",), tmp_path)):
        first = "FloatingPointError None" if rank == 1 else ""
        assert found.pop("failure") == [first, "BackwardFailed 9", "SyncError 10"]
        assert found.pop("skipped") == [1, 0.0]
        assert len(found) == len(STRATEGIES) + 19
        assert {case: where for case, where in found.items() if where} == {}
