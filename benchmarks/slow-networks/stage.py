"""What a contestant of `step.py` is built from, and what it is then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.tools.models.token_windows import TokenBatch

__all__ = ["Contestant", "Stage", "ring_nbytes"]


@dataclass(frozen=True)
class Stage:
    """What a contestant is built from.

    Attributes:
        rank, ranks: which rank this is, of how many; one a host.
        batch: what it trains on.
        gloo: a process group of torch's own, for torch's contestants; the world's group is the "paceline" backend.
    """

    rank: int
    ranks: int
    batch: TokenBatch
    gloo: dist.ProcessGroup


@dataclass(frozen=True)
class Contestant:
    """How one contestant trains on this rank.

    Attributes:
        step: one training step.
        model: whose parameters it trains.
        sent: bytes that a host is expected to send in one step, without headers; a round's bytes / `every`.
        every: steps after which the ranks are equal; it is timed over whole rounds of so many.
        equal: whether anything is equal on all ranks after a round.
        agreed: returns what is; None: the model's parameters.
    """

    step: Callable[[], object]
    model: torch.nn.Module
    sent: float
    every: int = 1
    equal: bool = True
    agreed: Callable[[], Iterable[torch.Tensor]] | None = None


def ring_nbytes(nbytes: float, ranks: int) -> float:
    """Return what each rank of a ring sends to all-reduce a buffer: a share to the next one, 2 (N - 1) times."""
    return 2 * (ranks - 1) / ranks * nbytes
