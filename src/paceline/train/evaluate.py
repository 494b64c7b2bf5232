"""The held-out loss: exact, whatever the number of ranks."""

from __future__ import annotations

import torch
from torch import nn

from paceline.lm.batches import HeldOut
from paceline.lm.model import loss
from paceline.whereabouts import here
from paceline.world import World
from paceline.world.agree import sum_over_ranks

__all__ = ["held_out_loss"]


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: HeldOut, world: World) -> float:
    """Return the mean loss over all held-out windows of all ranks, in nats per token.

    Every rank must call this; each sums over its own windows, and sums and counts are added up.
    """
    total = torch.zeros(2, dtype=torch.float64)
    with here.during("eval"):
        for batch in held_out.rounds():
            inputs, targets, samples = batch.to(world.device)
            value = loss(model(inputs), targets)  # also where nothing counts: forward may hold collectives
            if samples:
                total += torch.tensor([value.item() * samples, samples], dtype=torch.float64)
        summed, count = sum_over_ranks(total).tolist()
    return summed / count
