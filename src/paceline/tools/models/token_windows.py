"""Which windows of a corpus a rank sees at which step: pure functions of the step's number.

Every window has a number in one global row. Step s of a job whose global batch has w windows uses the numbers
s·w … (s + 1)·w - 1: the first b are rank 0's, the next b rank 1's, and so on, in as many rounds as it takes. So the
global batch does not depend on the number of ranks that it is dealt to, and to resume is to go on counting.

The loss on a rank's held-out windows, summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline._core.keyed_random import keyed_hash
from paceline.errors import UsageError
from paceline.tools.models.corpus import Tokens
from paceline.tools.models.gpt import loss

__all__ = ["Batch", "Batches", "HeldOut", "summed_loss"]


class Batch(NamedTuple):
    """Windows and what follows each token of them.

    Attributes:
        inputs: ``[batch, context]`` int64.
        targets: ``[batch, context]`` int64, the token after each of `inputs`.
        samples: how many of the windows count; less than the batch only where a rank has too few.
    """

    inputs: Tensor
    targets: Tensor
    samples: int

    def to(self, device: str | torch.device) -> Batch:
        """Return the same batch on `device`."""
        return Batch(self.inputs.to(device), self.targets.to(device), self.samples)


def window_starts(numbers: NDArray[np.uint64], seed: int, places: int) -> NDArray[np.int64]:
    """Return where the windows with these `numbers` start, spread evenly over ``range(places)``.

    Each start is a function of (seed, number) alone.
    """
    drawn = keyed_hash(numbers, seed * 0xD1342543DE82EF95 + 1)
    return (drawn % np.uint64(places)).astype(np.int64)


def _check_length(tokens: Tokens, context: int) -> None:
    if len(tokens) <= context:
        raise UsageError(f"{len(tokens)} tokens are too few for one window of {context} and its target")


def _cut(tokens: Tokens, starts: NDArray[np.int64], context: int, samples: int) -> Batch:
    windows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    rows = torch.from_numpy(windows)
    return Batch(rows[:, :-1], rows[:, 1:], samples)


@dataclass(frozen=True)
class Batches:
    """The batches that one rank trains on.

    Attributes:
        tokens: one-dimensional array of tokens.
        batch: most windows of a rank's micro-batch.
        context: tokens of a window.
        rank: this rank.
        size: number of ranks.
        seed: two seeds give two different rows of windows.
        windows: of the global batch; 0: one micro-batch of each rank.

    Raises:
        UsageError: `tokens` is shorter than one window.

    Example:
        >>> tokens = np.arange(99_999).astype(np.uint8)
        >>> one = Batches(tokens, batch=32, context=128)
        >>> two = [Batches(tokens, batch=16, context=128, rank=rank, size=2) for rank in range(2)]
        >>> torch.equal(one.at(7).inputs, torch.cat([rank.at(7).inputs for rank in two]))
        True
    """

    tokens: Tokens
    batch: int
    context: int
    rank: int = 0
    size: int = 1
    seed: int = 0
    windows: int = 0

    def __post_init__(self) -> None:
        _check_length(self.tokens, self.context)

    @property
    def of_step(self) -> int:
        """Windows of the global batch."""
        return self.windows or self.batch * self.size

    @property
    def rounds(self) -> int:
        """Micro-batches of a step, the same number on every rank."""
        return -(-self.of_step // (self.batch * self.size))

    def at(self, step: int, micro: int = 0) -> Batch:
        """Return this rank's micro-batch number `micro` at `step`, both counted from 0.

        Where none is left for this rank, it holds a window that does not count (``samples == 0``).
        """
        low = min(self.of_step, (micro * self.size + self.rank) * self.batch)
        high = min(self.of_step, low + self.batch)
        first = step * self.of_step
        numbers = np.arange(first + low, first + high) if low < high else np.array([first])
        places = len(self.tokens) - self.context
        starts = window_starts(numbers.astype(np.uint64), self.seed, places)
        return _cut(self.tokens, starts, self.context, high - low)


@dataclass(frozen=True)
class HeldOut:
    """The windows that the held-out loss is measured on: always the same ones, each on exactly one rank.

    Attributes:
        tokens: one-dimensional array of held-out tokens.
        batch: windows of a rank's batch.
        context: tokens of a window.
        rank: this rank.
        size: number of ranks.
        limit: use at most this many windows, evenly spread; 0 uses all.

    Raises:
        UsageError: `tokens` is shorter than one window.
    """

    tokens: Tokens
    batch: int
    context: int
    rank: int = 0
    size: int = 1
    limit: int = 0

    def __post_init__(self) -> None:
        _check_length(self.tokens, self.context)

    def starts(self) -> NDArray[np.int64]:
        """Return where all windows of all ranks start; they do not overlap."""
        there = (len(self.tokens) - 1) // self.context
        used = min(there, self.limit) if self.limit else there
        return np.arange(used, dtype=np.int64) * there // used * self.context

    def rounds(self) -> Iterator[Batch]:
        """Yield this rank's batches; every rank gets the same number of them.

        A rank with nothing left gets a window that does not count (``samples == 0``), so that it still takes
        part in whatever collectives the model's forward pass has.
        """
        starts = self.starts()
        per_round = self.batch * self.size
        for first in range(0, len(starts), per_round):
            mine = starts[first : first + per_round][self.rank :: self.size]
            yield _cut(self.tokens, mine if len(mine) else starts[:1], self.context, len(mine))


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
