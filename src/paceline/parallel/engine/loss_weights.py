"""Weights of one rank's gradients, with which the sum over ranks is the mean over all samples.

[Note: loss weights] A rank multiplies its loss by samples / reference, which costs nothing. The reference is the
previous round's total, so while the total stays the same, the sum over ranks is the mean over all samples. When it
changes, one multiplication by reference / total corrects the sum.

[Note: the first reference] The first round has no previous total, and samples / ranks may be thousands: token counts
would overflow fp16. So each rank starts from ranks · 2ᵏ, by its own first samples, and before anything is sent, all
ranks adopt the largest. Powers of two change no bit of the result.
"""

from __future__ import annotations

import math

from paceline.parallel.engine.round_status import RoundSummary, Status

__all__ = ["LossWeights"]


class LossWeights:
    """The weights of one rank's gradients; see [Note: loss weights].

    Attributes:
        status: how the present gradient is weighted.
        samples: this rank's samples since the last round.
        total: all ranks' samples behind the latest result.
        counts_joined: with ``loss.backward()``, whether ranks without a batch count in the mean.
        agreed: whether all ranks have the same `reference`; see [Note: the first reference].
        exponent: the k of this rank's first reference; `NO_EXPONENT` until it has samples.
    """

    NO_EXPONENT = -9999

    def __init__(self, rank: int, ranks: int) -> None:
        self._ranks = ranks
        self.carries_result = rank == 0 or ranks == 1
        """Whether this rank carries a result into the next round; see `carry`."""
        self._reference = float(ranks)
        self.agreed = False
        self.exponent = self.NO_EXPONENT
        self.status = Status.EQUAL
        self.samples = 0.0
        self.total = 0.0
        self.counts_joined = True

    @property
    def reference(self) -> float:
        """The total by which this round's losses are weighted; it decides the last bits of the result."""
        return self._reference

    @reference.setter
    def reference(self, total: float) -> None:
        self._reference, self.agreed = total, True

    def start(self, samples: float) -> None:
        """Choose this rank's first reference by its first `samples`, which are more than 0."""
        if not self.agreed and self.exponent == self.NO_EXPONENT:
            self.exponent = math.frexp(samples)[1] - 1
            self._reference = math.ldexp(self._ranks, self.exponent)

    def agree(self, exponent: int) -> float:
        """Adopt the largest `exponent` of all ranks; return the factor for this rank's gradient so far."""
        own, self.agreed = self.exponent, True
        if exponent == self.NO_EXPONENT:
            return 1.0
        self.reference = math.ldexp(self._ranks, exponent)
        return 1.0 if own == self.NO_EXPONENT else math.ldexp(1.0, own - exponent)

    @property
    def averaged(self) -> bool:
        """Whether the collective averages, since the loss was not scaled (``loss.backward()``)."""
        return self.status in (Status.EQUAL, Status.JOINED)

    @property
    def counted(self) -> bool:
        """Whether ranks are weighted by samples."""
        return self.status is Status.SAMPLES

    def loss_factor(self, samples: float | None) -> float:
        """Return the factor for a loss that is the mean over `samples`; None: ranks count equally."""
        return 1 / self._ranks if samples is None else samples / self.reference

    def samples_for(self, factor: float) -> float:
        """Return the samples that a (rounded) factor stands for."""
        return factor * self.reference

    def carry(self) -> float:
        """Take the latest result into the next round; return the factor on the ranks that carry it.

        A result that zero_grad() did not drop must count once, not once per rank. So one rank carries it and the others
        start from zero; when sharded, each rank carries its shard.
        """
        if not self.counted:
            return float(self._ranks) if self.averaged else 1.0
        self.samples = self.total if self.carries_result else 0.0
        return self.total / self.reference

    def end_round(self, summary: RoundSummary) -> float:
        """Record a round's totals; return the factor that makes its sum the mean.

        Args:
            summary: of the round, with at least one sample if ranks are weighted by samples.
        """
        self.samples, self.total = 0.0, summary.total
        if not self.counted:
            joined = 0 if self.counts_joined else summary.status.count(Status.JOINED)
            return self._ranks / (self._ranks - joined)
        factor, self.reference = self.reference / summary.total, summary.total
        return factor
