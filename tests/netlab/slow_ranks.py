"""Ranks of test_slow_networks.py: a few steps of each kind, the interface's bytes beside the predicted ones.

torchrun … slow_ranks.py OUT KIND [KIND ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import paceline
from paceline.testing.netlab.lab_network import parse_traffic

WIDTH, STEPS = 512, 8


def sent() -> int:
    """Return the bytes that this host has sent."""
    return parse_traffic(Path("/proc/net/dev").read_text()).sent


def main(out: str, kinds: list[str]) -> None:
    """Train with each kind in turn, and record the sent and the predicted bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {kind: moved(kind) for kind in kinds}
    Path(f"{out}.{dist.get_rank()}").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def moved(kind: str) -> dict[str, float]:
    """Return the sent and the predicted bytes of a few steps."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    compressed = kind in ("bf16", "int8", "int4", "topk", "powersgd")
    model = paceline.DataParallel(
        net, sync=paceline.Sync(bucket_mib=1, compression=kind if compressed else None)
    )
    optim = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> None:
        functional.mse_loss(model(inputs), inputs).backward()
        optim.step()
        optim.zero_grad()

    for _ in range(2):
        step()
    predicted, calls = 0.0, 0
    dist.barrier()
    before = sent()
    if compressed or kind == "plain":
        for _ in range(STEPS):
            step()
            predicted += model.timings.sent_nbytes
            calls += model.timings.calls
    else:
        fragments = 3 if kind == "streaming" else 1
        with paceline.DiLoCo(
            model, optim, every=4, fragments=fragments, delay=fragments - 1, piece_mib=1
        ) as outer:
            for _ in range(STEPS):
                step()
        predicted, calls = outer.sent_nbytes, 2 * outer.syncs * 8  # two for each of at most 8 pieces
    passed = sent() - before
    same = [torch.zeros_like(param) for param in net.parameters()]
    for mine, theirs in zip(net.parameters(), same, strict=True):
        theirs.copy_(mine.detach())
        dist.broadcast(theirs, 0)
    equal = all(torch.equal(mine, theirs) for mine, theirs in zip(net.parameters(), same, strict=True))
    messages = calls * (dist.get_world_size() - 1)
    return {"moved": passed, "predicted": predicted, "messages": messages, "equal": equal}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
