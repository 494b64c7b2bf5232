"""Program for torch's DistributedDataParallel in the style of tutorials: a Trainer, a DistributedSampler, epochs."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    """Trains, and saves a checkpoint after each epoch."""

    def __init__(self, model, data, optimizer, local_rank):
        self.data, self.optimizer, self.losses = data, optimizer, []
        self.model = DDP(model)
        self.local_rank = local_rank

    def run_epoch(self, epoch):
        """Train on every batch."""
        self.data.sampler.set_epoch(epoch)
        for source, targets in self.data:
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.model(source), targets)
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    def evaluate(self, points):
        """Return the mean output, computed on rank 0 only."""
        self.model.eval()
        with torch.no_grad():
            mean = self.model.module(points).mean().item()
        self.model.train()
        return mean


def main(folder):
    """Train for five epochs of ten steps, and evaluate after each."""
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # models are alike only because DDP copies rank 0's
    points = torch.rand(dist.get_world_size() * 80, 20, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(points, points[:, :1] * points[:, 1:2])
    data = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    net = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))
    trainer = Trainer(net, data, torch.optim.SGD(net.parameters(), lr=1e-2), int(os.environ["LOCAL_RANK"]))
    for epoch in range(5):
        trainer.run_epoch(epoch)
        if rank == 0:
            trainer.losses.append(trainer.evaluate(points[:16]))
            torch.save(trainer.model.state_dict(), f"{folder}/checkpoint.pt")
    dist.destroy_process_group()
    return trainer.losses


if __name__ == "__main__":
    losses = main(*sys.argv[1:])
