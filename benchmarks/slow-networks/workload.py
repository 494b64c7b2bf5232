"""What `step.py` and `peers.py` train: the reference GPT at 20 M parameters, on random tokens.

The time of a step does not depend on the tokens. Every rank starts from the same parameters and has its own batch, so
ranks that don't synchronise drift apart at once, and it can be checked that the others stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.tools.bench.step.strategy_trainers import random_batch
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import GptSize
from paceline.tools.models.token_windows import TokenBatch

SIZE = GptSize("20m", 512, 2048, 6, 8, vocabulary=1000, context=128)
BATCH = 2
EVERY = 20
"""Inner steps of a round, wherever ranks synchronise every so many steps."""

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
"""Of the inner optimizer."""

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""Of the outer Nesterov step in `peers.py` (DiLoCo, arXiv 2311.08105, section 3)."""

FACTS: dict[str, Any] = {
    "threads": 1,
    "batch": BATCH,
    "model": vars(SIZE),
    "parameters": SIZE.parameters(),
    "every": EVERY,
}
"""Of the workload, for the settings of a result."""


def model_and_optimizer() -> tuple[GPT, torch.optim.AdamW]:
    """Return the model, the same on every rank, and its inner optimizer."""
    torch.manual_seed(0)
    model = GPT(SIZE)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def batch_of(rank: int) -> TokenBatch:
    """Return the batch of a rank."""
    return random_batch(SIZE, BATCH, SIZE.context, rank, "cpu")


def train_step(model: torch.nn.Module, batch: TokenBatch, finish: Callable[[], object]) -> None:
    """Run forward and backward, then `finish`."""
    token_loss(model(batch.inputs), batch.targets).backward()
    finish()


def stepper(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a function that steps the optimizer and clears the gradients."""

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return finish


@torch.no_grad()
def digest_of(tensors: Iterable[Tensor]) -> int:
    """Return a number that is equal on two ranks if every bit of their float32 tensors is.

    Each position has its own weight; sums of integers don't depend on their order.
    """
    total = 0
    for place, tensor in enumerate(tensors):
        bits = tensor.detach().reshape(-1).view(torch.int32).to(torch.int64)
        position = torch.arange(1, len(bits) + 1)
        total += (place + 1) * int((bits * position).sum())
    return total % 2**61


# ---------------------------------------------------------------------- libraries in `peers.py`


@dataclass(frozen=True)
class Place:
    """Where a rank of `peers.py` runs.

    Attributes:
        rank, ranks: rank k runs on host k.
        port: this one and the next ninety-eight are free on every host.
        folder: empty, and the same on all hosts.
        settings: of the variant.
    """

    rank: int
    ranks: int
    port: int
    folder: Path
    settings: dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A library at work on a rank of `peers.py`.

    Attributes:
        finish: completes an inner step after backward: the inner optimizer, and after `EVERY` steps the outer one.
        running: entered when synchronising begins; left at the end.
        sent: bytes that a host is expected to send in a round, without headers and matchmaking.
        overlaps: whether it sends while inner steps compute, so that no synchronisation can be timed alone.
        begin: called once, when synchronising begins.
        prepare: called before a synchronisation alone is timed, for what can be done beside inner steps.
        agreed: returns what is the same on all hosts after a round; None: the model's parameters.
        extra: seconds of parts that the library records itself.
    """

    finish: Callable[[], object]
    running: AbstractContextManager[object]
    sent: float
    overlaps: bool = False
    begin: Callable[[], object] = lambda: None
    prepare: Callable[[], object] = lambda: None
    agreed: Callable[[], Iterable[Tensor]] | None = None
    extra: dict[str, list[float]] = field(default_factory=dict)
