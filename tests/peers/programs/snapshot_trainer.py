"""Program for torch's DistributedDataParallel in the style of minGPT: snapshots, autocast, clipping, evaluation."""

import os
import sys
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

VOCABULARY = 23


@dataclass
class Snapshot:
    """What a run resumes from."""

    model_state: dict
    optimizer_state: dict
    finished_epoch: int


class Model(nn.Module):
    """Predicts a token from the three before it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, VOCABULARY))

    def forward(self, tokens, targets=None):
        """Return logits and loss."""
        logits = self.layers(self.embedding(tokens).flatten(1))
        return logits, None if targets is None else F.cross_entropy(logits, targets)


class Trainer:
    """Trains for epochs, evaluates after each, and resumes from the snapshot if there is one."""

    def __init__(self, path, dtype, model, optimizer, train_set, test_set):
        self.local_rank, self.global_rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        self.dtype, self.path, self.optimizer, self.losses, self.epochs_run = dtype, path, optimizer, [], 0
        self.train_loader, self.test_loader = (
            DataLoader(each, batch_size=8, sampler=DistributedSampler(each)) for each in (train_set, test_set)
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=20)
        self.model = model
        if os.path.exists(path):
            snapshot = Snapshot(**torch.load(path))
            self.model.load_state_dict(snapshot.model_state)
            self.optimizer.load_state_dict(snapshot.optimizer_state)
            self.epochs_run = snapshot.finished_epoch
        self.model = DDP(self.model)

    def run_batch(self, source, targets, train):
        """Run one step, in training with the optimizer's."""
        with (
            torch.set_grad_enabled(train),
            torch.amp.autocast("cpu", self.dtype, self.dtype != torch.float32),
        ):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.losses.append(loss.item())

    def run_epoch(self, epoch, loader, train):
        """Run every batch."""
        if train:
            loader.sampler.set_epoch(epoch)
        for source, targets in loader:
            self.run_batch(source, targets, train)

    def train(self, epochs):
        """Train up to `epochs`."""
        for epoch in range(self.epochs_run + 1, epochs + 1):
            self.run_epoch(epoch, self.train_loader, train=True)
            if self.local_rank == 0:
                raw_model = self.model.module if hasattr(self.model, "module") else self.model
                snapshot = Snapshot(raw_model.state_dict(), self.optimizer.state_dict(), epoch)
                torch.save(asdict(snapshot), self.path)
            self.run_epoch(epoch, self.test_loader, train=False)


def main(folder, epochs="5", dtype="bfloat16"):
    """Train five epochs of ten steps or more."""
    dist.init_process_group(backend="gloo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    text = (
        torch.randint(0, 5, (95 * size,), generator=torch.Generator().manual_seed(0)).cumsum(0) % VOCABULARY
    )
    dataset = TensorDataset(text.unfold(0, 3, 1)[:-1], text[3:])
    train_set, test_set = random_split(dataset, [0.9, 0.1], generator=torch.Generator().manual_seed(0))
    model = Model()
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    trainer = Trainer(f"{folder}/snapshot.pt", getattr(torch, dtype), model, optimizer, train_set, test_set)
    trainer.train(int(epochs))
    dist.destroy_process_group()
    return trainer.losses


if __name__ == "__main__":
    losses = main(*sys.argv[1:])
