"""A typical DistributedDataParallel script, before and after switching to Paceline.

torchrun --nproc-per-node 2 examples/ddp_before.py [SNAPSHOT]
torchrun --nproc-per-node 2 examples/ddp_after.py [SNAPSHOT]

The two files differ in one line: the import of DistributedDataParallel.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from paceline import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Points x in [−3, 3]² with the target sin(x₀) · cos(x₁)."""

    def __init__(self, samples: int) -> None:
        self.points = torch.rand(samples, 2, generator=torch.Generator().manual_seed(0)) * 6 - 3

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point = self.points[index]
        return point, (point[0].sin() * point[1].cos())[None]


class Trainer:
    """Trains, and saves a snapshot after every epoch."""

    def __init__(self, net: nn.Module, data: DataLoader, snapshot: Path, device: torch.device) -> None:
        self.data, self.snapshot, self.device, self.epoch = data, snapshot, device, 0
        if snapshot.exists():
            saved = torch.load(snapshot, map_location=device, weights_only=True)
            net.load_state_dict(saved["model"])
            self.epoch = saved["epoch"]
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def run_batch(self, points: Tensor, targets: Tensor) -> float:
        """Run one training step; return the loss."""
        self.optimizer.zero_grad()
        loss = functional.mse_loss(self.model(points), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train(self, epochs: int) -> None:
        """Train from the current epoch up to `epochs`."""
        for epoch in range(self.epoch, epochs):
            self.data.sampler.set_epoch(epoch)
            losses = [self.run_batch(x.to(self.device), y.to(self.device)) for x, y in self.data]
            if dist.get_rank() == 0:
                print(f"epoch {epoch}  loss {sum(losses) / len(losses):.4f}", flush=True)
                torch.save({"model": self.model.module.state_dict(), "epoch": epoch + 1}, self.snapshot)


def main(snapshot: str = "snapshot.pt", epochs: int = 4) -> None:
    """Train, from the snapshot if it exists."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    dataset = Waves(2048)
    data = DataLoader(dataset, batch_size=32, sampler=DistributedSampler(dataset))
    Trainer(net.to(device), data, Path(snapshot), device).train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
