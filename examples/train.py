"""A data-parallel training loop: a small byte-level language model on the sources of Python's standard library.

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

CONTEXT, BATCH_SIZE, STEPS = 64, 32, 200


class ByteModel(nn.Module):
    """GRU that predicts each byte from the previous ones."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits [batch, context, 256] for `text` [batch, context]."""
        return self.head(self.gru(self.embedding(text))[0])


def main() -> None:
    """Train; rank 0 prints its loss."""
    world = paceline.init()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in sources)), dtype=torch.uint8)

    torch.manual_seed(0)
    model = paceline.DataParallel(ByteModel().to(world.device), sync="sharded")
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=4e-3)
    windows_of_text = text.unfold(0, CONTEXT + 1, 1)
    loader = paceline.Loader(windows_of_text, BATCH_SIZE)  # deals every window to one rank

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
