"""A small training problem and its solution by one process on the whole batch, with which trials are compared."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

STEPS, SAMPLES, RATE = 4, 3, 0.01

Gap = float
"""Largest difference of a parameter from the result of one process."""


def build() -> nn.Module:
    """Return the model in float64, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a rank's batch."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    sizes = ((SAMPLES, 4), (SAMPLES, 1))
    inputs, targets = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return inputs, targets


def loss_of(model: Callable[[Tensor], Tensor], number: int, rank: int) -> Tensor:
    """Return the mean loss over the samples of a rank's batch."""
    inputs, targets = batch(number, rank)
    return (model(inputs) - targets).square().mean()


def learn(
    model: Callable[[Tensor], Tensor],
    optim: torch.optim.Optimizer,
    backward: Callable[[Tensor], object],
    rank: int,
    clip: Callable[[], object] = lambda: None,
) -> None:
    """Train on this rank, with the given functions for backward and clipping."""
    for step in range(STEPS):
        backward(loss_of(model, step, rank))
        clip()
        optim.step()
        optim.zero_grad()


def one_process(ranks: int, *, micro: int = 1, clip: float | None = None) -> list[Tensor]:
    """Train in one process on the batches of all ranks, `micro` per rank and step; return the parameters."""
    model = build()
    optim = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        for number in range(step * micro, (step + 1) * micro):
            for rank in range(ranks):
                (loss_of(model, number, rank) / (ranks * micro)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optim.step()
        optim.zero_grad()
    return [param.detach() for param in model.parameters()]


def gap(params: list[Tensor], expected: list[Tensor]) -> Gap:
    """Return the largest difference of an element."""
    return max((a.detach() - b).abs().max().item() for a, b in zip(params, expected, strict=True))


def run_trials(trials: list[Callable[[], Gap]]) -> dict[str, Gap | str]:
    """Run every trial on this rank and return the results; rank 0 prints them."""
    results: dict[str, Gap | str] = {}
    for trial in trials:
        results[trial.__name__] = outcome = _outcome(trial)
        if os.environ.get("RANK", "0") == "0":
            text = outcome if isinstance(outcome, str) else f"{outcome:.0e} from one process"
            print(f"{trial.__name__}: {text}", flush=True)
    return results


def _outcome(trial: Callable[[], Gap]) -> Gap | str:
    try:
        return trial()
    except (RuntimeError, TypeError, ValueError) as error:
        message = str(error).splitlines()[0]
        return f"raises {type(error).__name__}: {message if len(message) <= 80 else f'{message[:80]}…'}"
