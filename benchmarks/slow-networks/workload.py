"""What all contestants train: the reference GPT at 20 M parameters, on tokens drawn at random.

What a step takes does not depend on what the tokens say. Every rank starts from the same parameters and has a batch
of its own, so ranks that don't synchronise drift apart at once, and those that do can be held to be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.models.token_windows import TokenBatch

__all__ = ["BATCH", "EVERY", "SIZE", "batch_of", "digest_of", "model_and_optimizer", "trainer"]

SIZE = GptSize("20m", 512, 2048, 6, 8, vocabulary=1000, context=128)
BATCH = 2
"""Windows of a rank's batch."""

EVERY = 20
"""Inner steps of a round, wherever ranks agree every so many steps."""

_ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def model_and_optimizer() -> tuple[GPT, torch.optim.AdamW]:
    """Return the model, the same on every rank, and its inner optimizer."""
    torch.manual_seed(0)
    model = GPT(SIZE)
    return model, torch.optim.AdamW(model.parameters(), **_ADAMW)


def batch_of(rank: int) -> TokenBatch:
    """Return the batch of a rank."""
    drawn = torch.Generator().manual_seed(rank)
    tokens = torch.randint(SIZE.vocabulary, (BATCH, SIZE.context + 1), generator=drawn)
    return TokenBatch(tokens[:, :-1], tokens[:, 1:], BATCH)


def trainer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: TokenBatch
) -> Callable[[], None]:
    """Return one ordinary training step; whoever synchronises has hooked into the model or the optimizer."""

    def step() -> None:
        token_loss(model(batch.inputs), batch.targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@torch.no_grad()
def digest_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number that two ranks share if every bit of their float32 tensors is equal.

    Each place counts with a weight of its own; sums of integers don't depend on their order.
    """
    whole = 0
    for place, tensor in enumerate(tensors):
        bits = tensor.detach().reshape(-1).view(torch.int32).to(torch.int64)
        position = torch.arange(1, len(bits) + 1)
        whole += (place + 1) * int((bits * position).sum())
    return whole % 2**61
