"""The loss on a rank's held-out windows, summed."""

from __future__ import annotations

import torch
from torch import nn

from paceline.lm.batches import HeldOut
from paceline.lm.model import loss

__all__ = ["summed_loss"]


@torch.no_grad()
def summed_loss(model: nn.Module, held_out: HeldOut, device: torch.device | str = "cpu") -> tuple[float, int]:
    """Return the loss summed over this rank's held-out windows, in nats per token, and how many windows those are.

    Their quotient is the mean; over ranks, that of both sums.
    """
    total, count = 0.0, 0
    for batch in held_out.rounds():
        inputs, targets, samples = batch.to(device)
        value = loss(model(inputs), targets)  # also where nothing counts: forward may hold collectives
        if samples:
            total, count = total + value.item() * samples, count + samples
    return total, count
