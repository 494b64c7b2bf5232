"""Is a gradient finite, and if not, which parameters' and which rank's own was not?

A sum over ranks that is NaN tells nothing of where that came from, and what a rank brought is gone: buckets are reduced
in place. So, while somebody asks (`finite`), every rank measures what it brings right before it is sent, one number
for all: its *peak*, which is at least as large as any of its elements, and not finite where one is not. The peaks
travel in the ledger.

[Note: peaks] No element of the sum is larger than the peaks together. So where they and their sum are finite, the
result is: no rank looks at it, and nobody asks others, also where each rank sees a shard only. Otherwise (rarely:
sums that come close to the largest number) all ranks look at what they hold, parameter by parameter, and add up what
they found. The peak is a 2-norm on CPUs, which takes half the time of a largest element.

[Note: without peaks] Who clips has the norm of the result anyway. So measuring may be left off until a first gradient
is not finite: then the norm tells, all ranks look, and what is known of its source is whose loss was not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.parallel.engine.comm import Comm
from paceline.world.object_collectives import sum_over_ranks

__all__ = [
    "FiniteCheck",
    "NonFiniteReport",
    "find_non_finite",
    "non_finite_ranks",
    "peak_of",
    "surely_finite",
]

_MOST = 1e38
"""Larger finite peaks are told as this: a ledger may be float32."""


@dataclass(frozen=True)
class NonFiniteReport:
    """A gradient that is not finite.

    Attributes:
        step: in which optimizer step, counted from 0.
        ranks: whose own gradient was not finite before it was reduced; none: only the sum is not.
        names: of the parameters concerned. of: how many parameters there are.
    """

    step: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    of: int

    def __str__(self) -> str:
        first = ", ".join(map(repr, self.names[:3])) + (", …" if len(self.names) > 3 else "")
        noun = "parameter" if self.of == 1 else "parameters"
        ranks = ", ".join(map(str, self.ranks))
        source = f"from rank{'s' * (len(self.ranks) > 1)} {ranks}" if ranks else "from no rank alone"
        return f"the gradient of {len(self.names)} of {self.of} {noun} is NaN or infinite ({first}): {source}"


def peak_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number that is at least as large as any element, and not finite if and only if one is not."""
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=tensor.device)
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    if tensor.device.type == "cpu":
        norm = torch.linalg.vector_norm(flat, dtype=wide)
        if math.isfinite(norm):
            return norm
    low, high = torch.aminmax(flat)  # a NaN anywhere makes both NaN
    return torch.maximum(-low, high).to(wide)


def surely_finite(peaks: Sequence[float], factor: float, largest: float) -> bool:
    """Tell whether a sum over ranks, times `factor`, is finite in a dtype whose largest number is `largest`.

    Args:
        peaks: of each rank; none: nothing is known. A NaN or an infinity makes it unsure.

    Example:
        >>> surely_finite([3.0, 2.0], factor=0.5, largest=65504.0), surely_finite([3.0, math.nan], 0.5, 65504.0)
        (True, False)
    """
    return len(peaks) > 0 and sum(peaks) * max(factor, 1.0) < min(largest, _MOST) / 2


class FiniteCheck:
    """Measures what this rank brings to a round.

    Args:
        largest: the largest number of any dtype that a gradient is kept in.
        measures: False leaves it at the norm and the losses; see [Note: without peaks].

    Attributes:
        norm: of the result, where it was clipped. losses: of this rank's backwards, as far as they were told.
    """

    def __init__(self, largest: float, *, measures: bool = True) -> None:
        self.largest, self.measures = largest, measures
        self.norm: torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []
        self._peaks: list[torch.Tensor] = []

    def record_peak(self, gradient: torch.Tensor) -> None:
        """Measure one part of this rank's gradient, before it is reduced."""
        if self.measures:
            self._peaks.append(peak_of(gradient.detach()))

    def write(self, place: torch.Tensor) -> None:
        """Put the peak of all that was noted into the ledger, on a GPU without waiting for it."""
        if not self._peaks:
            place.zero_()
            return
        peak = torch.stack([each.to(place.device, torch.float64) for each in self._peaks]).sum()
        place.copy_(torch.where(torch.isfinite(peak), peak.clamp(max=_MOST), peak))
        self._peaks.clear()

    def clear(self) -> None:
        """Forget what was noted: it was dropped."""
        self.norm = None
        self.losses.clear()
        self._peaks.clear()

    def bad_losses(self, comm: Comm) -> tuple[int, ...]:
        """Return the ranks that had a loss that is not finite; all ranks call this."""
        mine = torch.zeros(comm.size)
        mine[comm.rank] = sum(not math.isfinite(loss) for loss in self.losses)
        bad = sum_over_ranks(mine, comm.group).tolist()
        return tuple(rank for rank, count in enumerate(bad) if count)


def non_finite_ranks(peaks: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks whose peak is not finite."""
    return tuple(rank for rank, peak in enumerate(peaks) if not math.isfinite(peak))


def find_non_finite(
    parts: Mapping[str, Sequence[torch.Tensor]], comm: Comm, step: int, ranks: tuple[int, ...], *, split: bool
) -> NonFiniteReport | None:
    """Look at a result that may not be finite; all ranks of a split one call this.

    Args:
        parts: what this rank holds of each parameter's gradient.
        comm: the ranks. step: the round. split: ranks hold different parts.
        ranks: those that are known to have brought what is not finite.
    """
    found = [float(any(not math.isfinite(peak_of(part)) for part in held)) for held in parts.values()]
    if split and found:
        found = sum_over_ranks(torch.tensor(found), comm.group).tolist()
    names = tuple(name for name, broken in zip(parts, found, strict=True) if broken)
    if not names:
        return None
    return NonFiniteReport(step, ranks, names, len(parts))
