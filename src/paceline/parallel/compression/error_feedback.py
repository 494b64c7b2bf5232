"""Error feedback: what a codec loses is kept, and sent the next time.

With x = what is to be sent plus the residual e, the packet is C(x) and the new residual x − D(C(x)): what was sent, and
what is left, are together what was given, over any number of rounds (Seide et al., Interspeech 2014; Karimireddy et
al., arXiv 1901.09847, algorithm 2). A codec that loses much then delays, and no longer distorts.

With `momentum`, for `TopKCodec`: what waits for its turn for many rounds gets there with the momentum it would have had (Lin
et al., arXiv 1712.01887, algorithm 2: momentum correction and momentum factor masking)::

    u ← m·u + g        v ← v + u        send the largest of v        u ← 0 and v ← v − sent where it was sent

The optimizer that gets the sum then has no momentum of its own. `v` is the residual; where a number was sent, what its
rounding to float16 lost stays.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.compression.codecs import Codec, RawCodec
from paceline.parallel.compression.topk import TopKCodec

__all__ = ["ErrorFeedback", "density_at"]


class ErrorFeedback:
    """A codec together with what it has lost so far, for one buffer of numbers.

    Args:
        codec: for all packets; may be set to another one at any time, such as a `TopKCodec` that keeps less.
        numel: of the buffer, whose parts are compressed one at a time, in any order.
        device: where the numbers are.
        momentum: from 0 to below 1; above 0 for TopK only.

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
    ) -> None:
        if not 0 <= momentum < 1:
            raise UsageError(f"momentum={momentum}", remedy="use a number from 0 to below 1, such as 0.9")
        if momentum and not isinstance(codec, TopKCodec):
            raise UsageError(
                f"momentum={momentum} with {codec.name}",
                remedy="leave momentum to the optimizer; only a TopK delays numbers so long that it needs its own",
            )
        self.codec, self.momentum = codec, momentum
        self.residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self.velocity = torch.zeros_like(self.residual) if momentum else None

    @torch.no_grad()
    def compress(self, values: Tensor, packet: Tensor, start: int = 0) -> None:
        """Fill the packet of a part of the buffer, and keep what it loses.

        Args:
            values: 1-D, the part's numbers; left as they are.
            packet: 1-D uint8 of ``codec.nbytes(len(values))``.
            start: where in the buffer the part begins.

        Raises:
            UsageError: the part is not inside the buffer.
        """
        stop = start + len(values)
        if not 0 <= start <= stop <= len(self.residual):
            raise UsageError(
                f"numbers {start} to {stop} of a buffer of {len(self.residual)}",
                remedy="compress parts that lie inside the buffer",
            )
        if isinstance(self.codec, RawCodec):  # loses nothing, and may be float64
            self.codec.compress(values, packet)
            return
        residual = self.residual[start:stop]
        if self.velocity is None:
            self.codec.compress(residual.add_(values), packet, residual)
        else:
            self._with_momentum(values, packet, residual, self.velocity[start:stop])

    def scale(self, factor: float) -> None:
        """Multiply what is left to send, as when all that comes from now on is in other units."""
        self.residual.mul_(factor)
        if self.velocity is not None:
            self.velocity.mul_(factor)

    def _with_momentum(self, values: Tensor, packet: Tensor, residual: Tensor, velocity: Tensor) -> None:
        assert isinstance(self.codec, TopKCodec), "checked when it was made"
        velocity.mul_(self.momentum).add_(values)
        self.codec.compress(residual.add_(velocity), packet, residual)
        indices, sent = self.codec.entries(packet)
        velocity[indices] = 0.0
        if not math.isfinite(sent.sum()):  # what is not finite is sent first: as long as none is, all is
            velocity.nan_to_num_(0.0, 0.0, 0.0)


def density_at(step: int, keep: float, warmup_steps: int) -> float:
    """Return which part of the numbers a `TopKCodec` keeps in a step: less and less, exponentially, down to `keep`.

    Args:
        step: counted from 0. keep: after the warm-up. warmup_steps: in which 1/4, 1/16, … are kept in turn, each for
            as many steps, as far as that is more than `keep`.

    Source: Lin et al., arXiv 1712.01887, section 3.3 (75 %, 93.75 %, 98.4375 %, 99.6 % and 99.9 % left out).

    Example:
        >>> [density_at(step, 0.01, 6) for step in (0, 2, 4, 6)]
        [0.25, 0.0625, 0.015625, 0.01]
    """
    rungs = 0
    while 0.25 ** (rungs + 1) > keep:
        rungs += 1
    if step >= warmup_steps or not rungs:
        return keep
    return 0.25 ** (max(step, 0) * rungs // warmup_steps + 1)
