"""Two ranks on GPUs get the parameters of one process: on one card over gloo, on two cards over NCCL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from two_ranks import STRATEGIES

from paceline.launch.process.local_ranks import run_ranks

TOLERANCE = 1e-10
SCRIPT = Path(__file__).with_name("two_ranks.py")


def run(backend, device, folder):
    """Return the results of both ranks."""
    out = folder / "found.json"
    run_ranks([str(SCRIPT), backend, device, str(out)], 2, timeout=240)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(2)]


def check(found):
    message = found.pop("captured")
    assert "CUDA graph" in message
    assert "world of 2 ranks" in message
    assert "is a CUDA graph" in found.pop("sharded graph")
    assert len(found) == 2 * (len(STRATEGIES) + 2) + 2
    assert {case: gap for case, gap in found.items() if not gap <= TOLERANCE} == {}


def test_on_one_card_over_gloo(tmp_path):
    for found in run("gloo", "cuda:0", tmp_path):
        check(found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_two_cards_over_nccl(tmp_path):
    for found in run("nccl", "cuda", tmp_path):
        check(found)
