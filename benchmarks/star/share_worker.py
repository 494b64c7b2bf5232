"""The worker of `share.py`: a large model that is exchanged as often as may be; it computes next to nothing.

python benchmarks/star/share_worker.py HUB BANDWIDTH
"""

from __future__ import annotations

import sys
import time

import torch

import paceline


def main(hub: str, bandwidth: str) -> None:
    """Exchange until it is ended."""
    torch.set_num_threads(1)
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    with paceline.AsyncDataParallel(
        net, optimizer, hub, 2, 1, compression=None, bandwidth=bandwidth, insecure=True
    ):
        while True:
            for param in net.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:3])
