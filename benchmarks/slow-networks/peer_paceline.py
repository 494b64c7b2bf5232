"""Paceline's DiLoCo, as a contestant of `peers.py`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from peer_turn import OUTER_LR, OUTER_MOMENTUM, Peer, Place, play
from torch import Tensor
from workload import EVERY

import paceline
from paceline.tools.models.gpt import GPT


def build(place: Place, model: GPT, optimizer: torch.optim.Optimizer) -> Peer:
    """Return the inner optimizer, whose steps DiLoCo counts."""
    fragments, delay = place.settings["fragments"], place.settings["delay"]
    loop = paceline.DiLoCo(
        model,
        optimizer,
        EVERY,
        outer_lr=OUTER_LR,
        outer_momentum=OUTER_MOMENTUM,
        fragments=fragments,
        delay=delay,
        compression=place.settings["compression"],
    )

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def agreed() -> Iterable[Tensor]:
        return loop.shared().values()

    return Peer(finish, loop, loop.round_nbytes, overlaps=delay > 0, agreed=agreed if delay else None)


if __name__ == "__main__":
    play(build)
