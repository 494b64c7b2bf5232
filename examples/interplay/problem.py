"""A small problem, and what one process on the whole batch makes of it: trials are held against that."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

STEPS, SAMPLES, RATE = 4, 3, 0.01

Gap = float
"""The largest difference of any parameter from what one process has."""


def build() -> nn.Module:
    """Return the model, the same every time, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a rank's batch."""
    draw = torch.Generator().manual_seed(100 * number + rank)
    sizes = ((SAMPLES, 4), (SAMPLES, 1))
    inputs, targets = (torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes)
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
    """Make the steps of a rank, with whatever runs backward and clips."""
    for step in range(STEPS):
        backward(loss_of(model, step, rank))
        clip()
        optim.step()
        optim.zero_grad()


def one_process(ranks: int, *, micro: int = 1, clip: float | None = None) -> list[Tensor]:
    """Train on the batches of all ranks, `micro` of each rank to a step; return the parameters."""
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
    """Return the largest difference of any element."""
    return max((a.detach() - b).abs().max().item() for a, b in zip(params, expected, strict=True))


def tried(trials: list[Callable[[], Gap]]) -> dict[str, Gap | str]:
    """Make every trial on this rank; rank 0 says what came of each."""
    found: dict[str, Gap | str] = {}
    for trial in trials:
        found[trial.__name__] = outcome = _outcome(trial)
        if os.environ.get("RANK", "0") == "0":
            told = outcome if isinstance(outcome, str) else f"{outcome:.0e} from one process"
            print(f"{trial.__name__}: {told}", flush=True)
    return found


def _outcome(trial: Callable[[], Gap]) -> Gap | str:
    try:
        return trial()
    except (RuntimeError, TypeError, ValueError) as error:
        said = str(error).splitlines()[0]
        return f"raises {type(error).__name__}: {said if len(said) <= 80 else f'{said[:80]}…'}"
