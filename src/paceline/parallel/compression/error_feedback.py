"""Error feedback: what a codec loses is kept as a residual and sent in the next round.

With x = the values to send plus the residual e, the packet is C(x) and the new residual is x − D(C(x)): over any number
of rounds, what was sent plus the residual equals what was given (Seide et al., Interspeech 2014; Karimireddy et al.,
arXiv 1901.09847, algorithm 2). A lossy codec then delays instead of distorting.

With `decay` the residual is multiplied by it in every round, so that what was left out long ago, from other parameters,
counts less. With a sparse codec the residual then also takes the part of an outer momentum, and the outer optimizer
needs none (Sarfi et al., SparseLoCo, arXiv 2508.15706, algorithm 1: e ← β·e + Δ, e ← e − sent).

With `momentum`, for `TopKCodec`: numbers that wait for many rounds arrive with the momentum they would have had (Lin et
al., arXiv 1712.01887, algorithm 2: momentum correction and momentum factor masking)::

    u ← m·u + g        v ← v + u        send the largest of v        u ← 0 and v ← v − sent where it was sent

The optimizer that receives the sum must then have no momentum of its own. `v` is the residual; where a number was sent,
its rounding error to float16 stays.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.compression.codecs import Codec, RawCodec
from paceline.parallel.compression.topk import TopKCodec

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """A codec with the residual of one buffer.

    Args:
        codec: for all packets; may be replaced at any time, such as by a `TopKCodec` that keeps less.
        numel: of the buffer, whose parts are compressed one at a time, in any order.
        device: of the buffer.
        momentum: 0, or below 1 for TopKCodec.
        decay: factor of the residual from one round to the next; 1: nothing is lost.

    Raises:
        UsageError: a momentum that is out of range, or with another codec.
    """

    def __init__(
        self,
        codec: Codec,
        numel: int,
        device: torch.device | str = "cpu",
        *,
        momentum: float = 0.0,
        decay: float = 1.0,
    ) -> None:
        if not 0 <= momentum < 1:
            raise UsageError(f"momentum={momentum}", remedy="use a number from 0 to below 1, such as 0.9")
        if momentum and not isinstance(codec, TopKCodec):
            raise UsageError(
                f"momentum={momentum} with {codec.name}",
                remedy="leave momentum to the optimizer; only top-k delays numbers so long that it needs its own",
            )
        self.codec, self.momentum, self.decay = codec, momentum, decay
        self.residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self.velocity = torch.zeros_like(self.residual) if momentum else None

    @torch.no_grad()
    def compress(
        self, values: Tensor, packet: Tensor, start: int = 0, *, counts: Tensor | None = None
    ) -> None:
        """Fill the packet of a part of the buffer, and keep the error.

        Args:
            values: the numbers of the part, [n]; not modified. On an accelerator also those of neighbouring parts,
                [parts, n].
            packet: uint8, [``codec.nbytes(n)``] or [parts, ``codec.nbytes(n)``].
            start: offset of the (first) part in the buffer.
            counts: a flag on the device; where it is False, zeros are sent and nothing is kept. None: True.

        Raises:
            UsageError: the part is not inside the buffer.
        """
        stop = start + values.numel()
        if not 0 <= start <= stop <= len(self.residual):
            raise UsageError(
                f"numbers {start} to {stop} of a buffer of {len(self.residual)}",
                remedy="compress parts that lie inside the buffer",
            )
        if isinstance(self.codec, RawCodec):  # lossless, and may be float64
            self.codec.compress(values, packet)
            return
        kept = [self.residual[start:stop].view(values.shape)]
        if self.velocity is not None:
            kept.append(self.velocity[start:stop].view(values.shape))
        if counts is None:
            self._compress(values, packet, counts, *kept)
            return
        before = [each.clone() for each in kept]
        self._compress(values, packet, counts, *kept)
        for each, old in zip(kept, before, strict=True):
            each.copy_(torch.where(counts, each, old))

    def _compress(
        self,
        values: Tensor,
        packet: Tensor,
        counts: Tensor | None,
        residual: Tensor,
        velocity: Tensor | None = None,
    ) -> None:
        """Fill the packet of a part, and change its residual and velocity."""
        if self.decay != 1.0:
            residual.mul_(self.decay)
        if velocity is not None:
            values = velocity.mul_(self.momentum).add_(values)
        residual.add_(values)
        if counts is not None:
            residual.masked_fill_(~counts, 0.0)
        self.codec.compress(residual, packet, residual)
        if velocity is None:
            return
        assert isinstance(self.codec, TopKCodec), "checked at construction"
        indices, sent = self.codec.entries(packet, values.shape[-1])
        velocity.scatter_(-1, indices, 0.0)
        # Non-finite numbers are sent first: if none is sent, there is none.
        if velocity.device.type != "cpu" or not math.isfinite(sent.sum()):
            velocity.nan_to_num_(0.0, 0.0, 0.0)

    def scale(self, factor: float | Tensor) -> None:
        """Multiply the residual, as when all later values are in another unit."""
        self.residual.mul_(factor)
        if self.velocity is not None:
            self.velocity.mul_(factor)
