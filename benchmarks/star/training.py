"""What all contestants train: the reference model `mini` on its corpus, on machines of different speeds."""

from __future__ import annotations

import time
from typing import Any

import torch
from slowed import Slowed
from torch import Tensor, nn

from paceline.tools.models import corpus as corpora
from paceline.tools.models.gpt import GPT
from paceline.tools.models.gpt import token_loss as loss_of
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import HeldOutWindows, TrainingWindows, summed_token_loss

__all__ = ["BATCH", "SIZE", "SPEEDS", "Training", "seconds_of"]

SIZE, BATCH = "mini", 2
SPEEDS = (1, 1, 2, 4)
"""Of the four machines, relative to the slowest."""

_ADAMW: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
_CLIP = 1.0
_HELD_OUT = 512


def seconds_of(rank: int, fastest: float) -> float:
    """Return what a step takes on the machine of a rank, if the fastest takes `fastest`."""
    return fastest * max(SPEEDS) / SPEEDS[rank]


class Training:
    """One machine's part.

    Args:
        rank: which. seed: of parameters and data. lr: the largest learning rate. step_seconds: of a step.
    """

    def __init__(self, rank: int, seed: int, lr: float, step_seconds: float) -> None:
        torch.set_num_threads(1)
        corpus, shape = corpora.load_corpus(None), gpt_size(SIZE)
        self.batches = TrainingWindows(
            corpus.train, BATCH, shape.context, rank=rank, size=len(SPEEDS), seed=seed
        )
        self.held_out = HeldOutWindows(corpus.held_out, 16, shape.context, limit=_HELD_OUT)
        torch.manual_seed(seed)
        self.net = GPT(shape)
        self.model: nn.Module = self.net
        self.lr, self.made = lr, 0
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr, **_ADAMW)
        self.slowed = Slowed(self.net.blocks, step_seconds)

    def step(self, share: float) -> None:
        """Take a step at this share of the full learning rate."""
        self.slowed.begin()
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * share
        batch = self.batches.at(self.made)
        loss_of(self.model(batch.inputs), batch.targets).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), _CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.slowed.end()
        self.made += 1

    @torch.no_grad()
    def loss(self, parameters: dict[str, Tensor]) -> float:
        """Return the held-out loss with these parameters, in nats per token."""
        for name, param in self.net.named_parameters():
            param.copy_(parameters[name])
        total, count = summed_token_loss(self.net, self.held_out)
        return total / count


def wait_until(at: float) -> None:
    """Wait until a time of day."""
    time.sleep(max(0.0, at - time.time()))
