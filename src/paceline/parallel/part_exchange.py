"""Sums of parts that ranks send each other, received in pieces.

[Note: pieces] Between backward and step a rank holds what it has received of all buckets. malloc serves small blocks
from the memory of activations that backward has just freed. For large blocks the holes between live tensors are too
small, and the process grows: by 6 to 11 MiB with the 13 MiB of gradients of the model `mini`.

Parts of 16-bit floats are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

__all__ = ["LOW_PRECISION", "PIECE_NBYTES", "PartSum"]

LOW_PRECISION = (torch.bfloat16, torch.float16)

PIECE_NBYTES = (512 << 10) - 4096
"""A part of more than one and a half times this size is cut into equal pieces of at most this size."""

_MOST_PIECES = 16
"""Of one part: more messages take time, and large models have large activations."""


class PartSum:
    """Sums the parts of all ranks into `result`; each part travels in a few messages.

    Args:
        own: this rank's part, 1-D.
        result: of the same size; may be `own`.
        sources: the number of parts that are received.
        received: memory of those parts; None: allocated here.
    """

    def __init__(
        self,
        own: torch.Tensor,
        result: torch.Tensor,
        sources: int = 0,
        received: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._own, self._result = _pieces(own), _pieces(result)
        if received is None:
            self._received = [[piece.new_empty(piece.numel()) for piece in self._own] for _ in range(sources)]
        else:
            self._received = [list(_pieces(part)) for part in received]

    def receive(self, source: int, receive: Callable[[torch.Tensor], dist.Work]) -> list[dist.Work]:
        """Call `receive` with the memory of each piece of a source's part, and return its results."""
        return [receive(piece) for piece in self._received[source]]

    @staticmethod
    def send(part: torch.Tensor, send: Callable[[torch.Tensor], dist.Work]) -> list[dist.Work]:
        """Call `send` with each piece of a part for another rank, and return its results."""
        return [send(piece) for piece in _pieces(part)]

    def add(self, divisor: int = 1) -> None:
        """Add what was received, the first source first, divide the sum, and free each piece at once."""
        for row in self._received:
            row.reverse()
        for own, result in zip(self._own, self._result, strict=True):
            _add(own, [row.pop() for row in self._received], result, divisor)


def _add(own: torch.Tensor, others: list[torch.Tensor], result: torch.Tensor, divisor: int) -> None:
    """Write the sum of one piece of all parts, divided, to `result`."""
    total = own.float() if own.dtype in LOW_PRECISION else result
    if not others and total is not own:
        total.copy_(own)
    for number, other in enumerate(others):
        if total.device.type == "cpu":
            # The addition would convert it itself, unseen by a prediction of memory.
            other = other.to(total.dtype)
        torch.add(total if number or own.dtype in LOW_PRECISION else own, other, out=total)
    if divisor > 1:
        total.div_(divisor)
    if total is not result:
        result.copy_(total)


def _pieces(part: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the consecutive pieces of a part: alike for parts of one size and dtype."""
    count = 1 if 2 * part.nbytes <= 3 * PIECE_NBYTES else -(-part.nbytes // PIECE_NBYTES)
    return part.chunk(min(count, _MOST_PIECES))
