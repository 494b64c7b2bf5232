"""Weights of one rank's gradients, with which the sum over ranks is the mean over all samples.

[Note: loss weights] A rank multiplies its loss by samples / reference, which costs nothing. The reference is the
previous round's total, so while the total stays the same, the sum over ranks is the mean over all samples. When it
changes, one multiplication by reference / total corrects the sum.

[Note: the first reference] The first round has no previous total, and samples / ranks may be thousands: token counts
would overflow fp16. So each rank starts from ranks · 2ᵏ, by its own first samples, and before anything is sent, all
ranks adopt the largest. Powers of two change no bit of the result.

[Note: on the device] Where the round status is read late (`deferred_status`), the total of a round stays on the device,
and with it the next reference and all factors: scalars there, computed in float64 as on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.parallel.engine.round_status import RoundSummary, Status

__all__ = ["Factor", "LossWeights", "check_loss", "multiply_by"]

Factor = float | Tensor
"""A number, or one on the device: a scalar of float64; see [Note: on the device]."""


def check_loss(loss: Tensor | None, samples: float | None, rank: int, step: int) -> None:
    """Raise for a loss that is not one number, or a number of samples that does not belong to it.

    Args:
        loss: the mean over `samples`; None on a rank that has none.
        samples: 0 or more; None: ranks count equally.
        rank, step: for the message.

    Raises:
        UsageError: names what was passed.
    """
    if loss is None and samples != 0:
        message, remedy = f"backward(None, samples={samples!r})", "a rank without a loss passes samples=0"
    elif loss is not None and not isinstance(loss, Tensor):
        message = f"the loss is a {type(loss).__name__}, not a tensor"
        remedy = "pass the tensor that the model computed"
    elif loss is not None and loss.numel() != 1:
        message = f"loss has shape {list(loss.shape)}, not one number"
        remedy = "take its mean over this rank's samples"
    elif samples is not None and (not math.isfinite(samples) or samples < 0):
        message, remedy = f"samples={samples!r}", "pass the number of samples, 0 or more"
    else:
        return
    raise UsageError(message, rank=rank, step=step, remedy=remedy)


@torch.no_grad()
def multiply_by(tensors: Sequence[Tensor], factor: Factor) -> None:
    """Multiply tensors in place, with the same rounding wherever the factor is."""
    if not isinstance(factor, Tensor):
        if factor == 1.0:
            return
        # for several tensors of 16 bits on a CPU, torch rounds the factor to their dtype
        if len(tensors) == 1 or any([each.dtype.itemsize < 4 for each in tensors]):
            for each in tensors:
                each.mul_(factor)
        elif tensors:
            torch._foreach_mul_(list(tensors), factor)
        return
    wide = [each for each in tensors if each.dtype.itemsize >= 4]
    for dtype, device in {(each.dtype, each.device) for each in wide}:
        same = [each for each in wide if (each.dtype, each.device) == (dtype, device)]
        torch._foreach_mul_(same, factor.to(device, dtype))
    for each in tensors:
        if each.dtype.itemsize < 4:  # with a dimension, the factor is not rounded to this dtype first
            (each if each.dim() else each.view(1)).mul_(factor.to(each.device, torch.float32).view(1))


class LossWeights:
    """The weights of one rank's gradients; see [Note: loss weights].

    Attributes:
        status: how the present gradient is weighted.
        samples: this rank's samples since the last round.
        total: all ranks' samples behind the latest result; of the round before while a status is on its way.
        counts_joined: with ``loss.backward()``, whether ranks without a batch count in the mean.
        agreed: whether all ranks have the same `reference`; see [Note: the first reference].
        exponent: the k of this rank's first reference; `NO_EXPONENT` until it has samples.
    """

    NO_EXPONENT = -9999

    def __init__(self, rank: int, ranks: int) -> None:
        self._ranks = ranks
        self.carries_result = rank == 0 or ranks == 1
        """Whether this rank carries a result into the next round; see `carry`."""
        self._reference: Factor = float(ranks)
        self.agreed = False
        self.exponent = self.NO_EXPONENT
        self.status = Status.EQUAL
        self.samples: Factor = 0.0
        self.total = 0.0
        self._latest: Factor = 0.0  # the total, wherever it is
        self.counts_joined = True

    @property
    def reference(self) -> Factor:
        """The total by which this round's losses are weighted; it decides the last bits of the result."""
        return self._reference

    @reference.setter
    def reference(self, total: Factor) -> None:
        self._reference, self.agreed = total, True

    def start(self, samples: float) -> None:
        """Choose this rank's first reference by its first `samples`, which are more than 0."""
        if not self.agreed and self.exponent == self.NO_EXPONENT:
            self.exponent = math.frexp(samples)[1] - 1
            self._reference = math.ldexp(self._ranks, self.exponent)

    def restart(self) -> None:
        """Forget the reference: the next round agrees on one."""
        self._reference, self.agreed, self.exponent = float(self._ranks), False, self.NO_EXPONENT

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

    def of_loss(self, loss: Tensor, samples: float | None) -> tuple[Tensor, Factor]:
        """Return the factor of a loss, like it, and the samples that the factor stands for once it is rounded.

        Args:
            loss: the mean over `samples`.
            samples: on this rank; None: ranks count equally.
        """
        factor: Factor = 1 / self._ranks if samples is None else samples / self.reference
        low = loss.dtype in (torch.bfloat16, torch.float16)
        if isinstance(factor, Tensor):
            weight = factor.to(loss.device, loss.dtype)
            rounded: Factor = weight.to(factor.device, torch.float64) if low else 0.0
            weight = weight.expand_as(loss)
        else:
            weight = torch.full_like(loss, factor)
            # not of `weight`: don't wait for a GPU
            rounded = torch.full((), factor, dtype=loss.dtype).item() if low else 0.0
        if samples is None:
            return weight, 0.0
        return weight, rounded * self.reference if low else float(samples)

    def carry(self) -> Factor:
        """Take the latest result into the next round; return the factor on the ranks that carry it.

        A result that zero_grad() did not drop must count once, not once per rank. So one rank carries it and the others
        start from zero; when sharded, each rank carries its shard.
        """
        if not self.counted:
            return float(self._ranks) if self.averaged else 1.0
        self.samples = self._latest if self.carries_result else 0.0
        return self._latest / self.reference

    def end_round_on_device(self, total: Tensor, valid: Tensor) -> Factor:
        """Record a round's total, a float64 scalar; return the factor that makes its sum the mean.

        Args:
            total: samples of all ranks.
            valid: whether the round has a result; the factor is 0 without.
        """
        self.samples = 0.0
        if not self.counted:
            return 1.0
        valid = valid & (total > 0)
        factor = torch.where(valid, self.reference / total, torch.zeros_like(total))
        self.reference = torch.where(valid, total, self.reference)
        self._latest = total
        return factor

    def end_round(self, summary: RoundSummary) -> Factor:
        """Record a round's totals; return the factor that makes its sum the mean.

        Args:
            summary: of the round, with at least one sample if ranks are weighted by samples.
        """
        self.samples, self.total, self._latest = 0.0, summary.total, summary.total
        if not self.counted:
            joined = 0 if self.counts_joined else summary.status.count(Status.JOINED)
            return self._ranks / (self._ranks - joined)
        factor, self.reference = self.reference / summary.total, summary.total
        return factor
