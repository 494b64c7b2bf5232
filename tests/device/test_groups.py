"""Groups of GPUs that were made without a backend's name, and without a current device: as a program of torch's may.

As a program, ``test_groups.py MODE DEVICE OUT.json``, it is one of two ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import on_device as on
import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.launch.process.local_ranks import run_ranks
from paceline.parallel.gradient_collectives import Comm
from paceline.world.control_collectives import gather_texts
from paceline.world.group_devices import backend_name, group_device

STEPS = 3


@pytest.mark.parametrize("bound", [False, True])
def test_alone_without_a_name(bound):
    card = torch.device("cuda", torch.cuda.device_count() - 1)
    options: dict[str, Any] = {"device_id": card} if bound else {}
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        assert (dist.get_backend(), backend_name()) == ("nccl" if bound else "undefined", "nccl")
        assert Comm().stream_ordered
        assert group_device(None) == (card if bound else torch.device("cuda:0"))
        x = torch.ones(1, device=group_device(None))
        dist.all_reduce(x)
        assert x.tolist() == [1.0]
    finally:
        dist.destroy_process_group()


def main(mode: str, device: str, out: str) -> None:
    """Train both strategies that reduce on streams, without ever setting the current device."""
    rank = int(os.environ["RANK"])
    here = device if device == "cpu" else f"cuda:{rank}"
    options: dict[str, Any] = {"device_id": torch.device(here)} if mode == "bound" else {}
    method, size = os.environ["PACELINE_INIT_METHOD"], int(os.environ["WORLD_SIZE"])
    dist.init_process_group(init_method=method, rank=rank, world_size=size, **options)
    found: dict[str, object] = {"backend": Comm().backend, "texts": gather_texts(str(rank))}
    for sync in ("bucketed", "sharded"):
        model = paceline.DataParallel(on.build("Plain", here), sync=sync)
        optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=on.RATE)
        for step in range(STEPS):
            model.backward(on.loss_of(model, *on.batch(step, [rank], here)), samples=on.SAMPLES)
            optim.step()
            optim.zero_grad()
        alone = on.one_process("Plain", here, STEPS, ranks=(0, 1))
        found[sync] = on.max_difference(model.whole_parameters(), alone)
    Path(f"{out}.{rank}").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("mode", ["bound", "not bound"])
def test_two_cards_without_a_name(mode, tmp_path):
    out = tmp_path / "found.json"
    run_ranks([str(Path(__file__)), mode, "cuda", str(out)], 2, timeout=120)
    for rank in range(2):
        found = json.loads(Path(f"{out}.{rank}").read_text())
        assert (found["backend"], found["texts"]) == ("nccl", ["0", "1"])
        assert max(found["bucketed"], found["sharded"]) < 1e-10


if __name__ == "__main__":
    main(*sys.argv[1:])
