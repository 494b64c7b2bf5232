"""The held-out loss: exact, whatever the number of ranks."""

from __future__ import annotations

import torch
from torch import nn

from paceline.lm.batches import HeldOut
from paceline.lm.held_out import summed_loss
from paceline.whereabouts import here
from paceline.world import World
from paceline.world.agree import sum_over_ranks

__all__ = ["held_out_loss"]


def held_out_loss(model: nn.Module, held_out: HeldOut, world: World) -> float:
    """Return the mean loss over all held-out windows of all ranks, in nats per token.

    Every rank must call this; each sums over its own windows, and sums and counts are added up.
    """
    with here.during("eval"):
        mine = torch.tensor(summed_loss(model, held_out, world.device), dtype=torch.float64)
        summed, count = sum_over_ranks(mine).tolist()
    return summed / count
