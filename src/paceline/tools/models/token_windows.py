"""Windows of a corpus that a rank trains on at each step, as a function of the step; and the held-out windows.

All windows are numbered globally. Step s of a job whose global batch has w windows uses the numbers s·w to
(s + 1)·w - 1: the first b belong to rank 0, the next b to rank 1, and so on, in rounds of micro-batches. So the global
batch does not depend on the number of ranks, and resuming a job takes its step only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline._core.keyed_random import keyed_hash
from paceline._core.summation_tree import leaves_of
from paceline.errors import UsageError
from paceline.tools.models.corpus import Tokens
from paceline.tools.models.gpt import token_loss

__all__ = ["HeldOutWindows", "TokenBatch", "TrainingWindows", "summed_token_loss"]


class TokenBatch(NamedTuple):
    """Windows with their next tokens.

    Attributes:
        inputs: ``[batch, context]`` int64.
        targets: ``[batch, context]`` int64, the token after each of `inputs`.
        samples: number of windows that count; less than the batch only if a rank has too few.
    """

    inputs: Tensor
    targets: Tensor
    samples: int

    def to(self, device: str | torch.device) -> TokenBatch:
        """Return the same batch on `device`."""
        return TokenBatch(self.inputs.to(device), self.targets.to(device), self.samples)


def window_starts(numbers: NDArray[np.uint64], seed: int, places: int) -> NDArray[np.int64]:
    """Return the starts of the windows with these `numbers`, spread evenly over ``range(places)``.

    Each start is a function of (seed, number) alone.
    """
    drawn = keyed_hash(numbers, seed * 0xD1342543DE82EF95 + 1)
    return (drawn % np.uint64(places)).astype(np.int64)


def _check_length(tokens: Tokens, context: int) -> None:
    if len(tokens) <= context:
        raise UsageError(f"{len(tokens)} tokens are too few for one window of {context} and its target")


def _cut(tokens: Tokens, starts: NDArray[np.int64], context: int, samples: int) -> TokenBatch:
    windows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    rows = torch.from_numpy(windows)
    return TokenBatch(rows[:, :-1], rows[:, 1:], samples)


@dataclass(frozen=True)
class TrainingWindows:
    """Batches that one rank trains on.

    Attributes:
        tokens: ``[tokens]``.
        batch: most windows of a rank's micro-batch.
        context: tokens of a window.
        rank: this rank.
        size: number of ranks.
        seed: selects the sequence of windows.
        windows: of the global batch; 0: one micro-batch per rank.
        virtual_ranks: micro-batches of a step, whatever the number of ranks, each of which has consecutive ones; None:
            ranks take turns.

    Raises:
        UsageError: `tokens` is shorter than one window.

    Example:
        >>> tokens = np.arange(99_999).astype(np.uint8)
        >>> one = TrainingWindows(tokens, batch=32, context=128)
        >>> two = [TrainingWindows(tokens, batch=16, context=128, rank=rank, size=2) for rank in range(2)]
        >>> torch.equal(one.at(7).inputs, torch.cat([rank.at(7).inputs for rank in two]))
        True
    """

    tokens: Tokens
    batch: int
    context: int
    _: KW_ONLY
    rank: int = 0
    size: int = 1
    seed: int = 0
    windows: int = 0
    virtual_ranks: int | None = None

    def __post_init__(self) -> None:
        _check_length(self.tokens, self.context)

    @property
    def leaves(self) -> range:
        """Virtual ranks of this rank; of real ranks, itself."""
        if self.virtual_ranks is None:
            return range(self.rank, self.rank + 1)
        return leaves_of(self.rank, self.size, self.virtual_ranks)

    @property
    def windows_per_step(self) -> int:
        """Windows of the global batch."""
        return self.windows or self.batch * (self.virtual_ranks or self.size)

    @property
    def rounds(self) -> int:
        """Micro-batches of a step on this rank: the same number on every rank, unless virtual ranks have them."""
        if self.virtual_ranks is not None:
            return len(self.leaves)
        return -(-self.windows_per_step // (self.batch * self.size))

    def at(self, step: int, micro: int = 0) -> TokenBatch:
        """Return this rank's micro-batch number `micro` of `step`, both counted from 0.

        If no window is left for this rank, it holds one that does not count (``samples == 0``).
        """
        number = micro * self.size + self.rank if self.virtual_ranks is None else self.leaves[micro]
        low = min(self.windows_per_step, number * self.batch)
        high = min(self.windows_per_step, low + self.batch)
        first = step * self.windows_per_step
        numbers = np.arange(first + low, first + high) if low < high else np.array([first])
        places = len(self.tokens) - self.context
        starts = window_starts(numbers.astype(np.uint64), self.seed, places)
        return _cut(self.tokens, starts, self.context, high - low)


@dataclass(frozen=True)
class HeldOutWindows:
    """Windows that the held-out loss is measured on: always the same ones, each on exactly one rank.

    Attributes:
        tokens: one-dimensional array of held-out tokens.
        batch: windows of a rank's batch.
        context: tokens of a window.
        rank: this rank.
        size: number of ranks.
        limit: the most windows used, evenly spread; 0: all.
        virtual_ranks: between which windows are divided, whatever the number of ranks; None: between the ranks.

    Raises:
        UsageError: `tokens` is shorter than one window.
    """

    tokens: Tokens
    batch: int
    context: int
    _: KW_ONLY
    rank: int = 0
    size: int = 1
    limit: int = 0
    virtual_ranks: int | None = None

    def __post_init__(self) -> None:
        _check_length(self.tokens, self.context)

    def by_virtual_rank(self) -> list[HeldOutWindows]:
        """Return the windows of each virtual rank of this rank; itself without."""
        if self.virtual_ranks is None:
            return [self]
        leaves = leaves_of(self.rank, self.size, self.virtual_ranks)
        return [replace(self, rank=leaf, size=self.virtual_ranks, virtual_ranks=None) for leaf in leaves]

    @property
    def most_parts(self) -> int:
        """The largest number of parts that `by_virtual_rank` returns on any rank."""
        return 1 if self.virtual_ranks is None else len(leaves_of(0, self.size, self.virtual_ranks))

    def starts(self) -> NDArray[np.int64]:
        """Return the starts of the windows of all ranks; they do not overlap."""
        available = (len(self.tokens) - 1) // self.context
        used = min(available, self.limit) if self.limit else available
        return np.arange(used, dtype=np.int64) * available // used * self.context

    def rounds(self) -> Iterator[TokenBatch]:
        """Yield this rank's batches, the same number on every rank.

        A rank with no window left gets one that does not count (``samples == 0``), so that it takes part in the
        collectives of the model's forward pass.
        """
        starts = self.starts()
        per_round = self.batch * self.size
        for first in range(0, len(starts), per_round):
            mine = starts[first : first + per_round][self.rank :: self.size]
            yield _cut(self.tokens, mine if len(mine) else starts[:1], self.context, len(mine))


@torch.no_grad()
def summed_token_loss(
    model: nn.Module, held_out: HeldOutWindows, device: torch.device | str = "cpu"
) -> tuple[float, int]:
    """Return the loss summed over this rank's held-out windows, in nats per token, and the number of windows.

    The mean over all ranks is the quotient of both sums over ranks.
    """
    total, count = 0.0, 0
    for batch in held_out.rounds():
        inputs, targets, samples = batch.to(device)
        value = token_loss(model(inputs), targets)  # even if nothing counts: forward may have collectives
        if samples:
            total, count = total + value.item() * samples, count + samples
    return total, count
