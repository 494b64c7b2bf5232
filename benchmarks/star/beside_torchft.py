"""torchft's streaming DiLoCo, as a contestant of `peers.py`; runs where torchft is installed.

Settings: ``lr``; ``every``: H; ``fragments``; ``delay``; ``outer``: lr and momentum of the outer Nesterov step. Ranks
make the same number of steps, so all go at the pace of the slowest. Set up as in `benchmarks/slow-networks`.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from peer_torchft import fragments_of, manager_of  # pyright: ignore[reportMissingImports]
from torchft.local_sgd import DiLoCo  # pyright: ignore[reportMissingImports]
from training import Training

from single_process import Part, play


def attach(part: Part, training: Training) -> None:
    """Hook DiLoCo into AdamW."""
    settings = part.settings
    fragments = fragments_of(training.net, settings["fragments"])
    lr, momentum = settings["outer"]
    outer = [
        torch.optim.SGD(each.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
        for each in fragments
    ]
    place = SimpleNamespace(rank=part.rank, ranks=part.ranks, port=part.port, settings={})
    diloco = DiLoCo(
        manager_of(place), fragments, training.optimizer, outer,
        sync_every=settings["every"], fragment_sync_delay=settings["delay"],
    )  # fmt: skip
    part.kept.extend([place, diloco.__enter__()])


if __name__ == "__main__":
    play(attach)
