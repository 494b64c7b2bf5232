"""An ordinary training loop, data-parallel: a small model of bytes on the Python standard library's sources.

torchrun --nproc-per-node 2 examples/train.py
"""

from __future__ import annotations

import itertools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import paceline

CONTEXT, BATCH, STEPS = 64, 32, 200


class ByteModel(nn.Module):
    """Predicts each byte from those before it."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits [batch, context, 256] for `text` [batch, context]."""
        return self.head(self.memory(self.embedding(text))[0])


def main() -> None:
    """Train, and print the loss of rank 0."""
    world = paceline.init()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in sources)), dtype=torch.uint8)

    torch.manual_seed(0)
    model = paceline.DataParallel(ByteModel().to(world.device), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=4e-3)
    loader = paceline.Loader(
        text.unfold(0, CONTEXT + 1, 1), BATCH
    )  # every window of the text, each on one rank

    for step, batch in enumerate(itertools.islice(loader, STEPS)):
        windows = batch.long().to(world.device)
        logits = model(windows[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        model.backward(loss, samples=batch.samples)
        model.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()
        if world.rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}/{STEPS}  loss {loss.item():.3f}", flush=True)
    paceline.shutdown()


if __name__ == "__main__":
    main()
