"""Checks whether a reduced gradient is finite, and if not, names the parameters and the ranks it came from.

A sum over ranks that is NaN does not show where the NaN came from, and each rank's own gradient is gone: buckets are
reduced in place. So, with a finite check installed, every rank measures its gradient right before it is sent. The
result is one number for all buckets, its *peak*: at least as large as any element, and not finite if an element is not.
The peaks travel in the round status.

[Note: peaks] No element of the sum is larger than the sum of the peaks. Where the peaks and their sum are finite, so is
the result: no rank inspects it, and no message is needed, even if each rank holds only a shard. Otherwise (rarely: sums
close to the largest number) all ranks inspect what they hold, parameter by parameter, and add up what they found. On
CPUs the peak is a 2-norm, which takes half the time of a largest element.

[Note: without peaks] A program that clips computes the norm of the result anyway. Measuring may therefore be off until
a first gradient is not finite: the norm shows that, all ranks inspect the gradient, and the ranks whose loss was not
finite are named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline._core.format import plural
from paceline.parallel.gradient_collectives import Comm
from paceline.world.control_collectives import sum_over_ranks

__all__ = [
    "FiniteCheck",
    "NonFiniteReport",
    "find_non_finite",
    "non_finite_ranks",
    "peak_of",
    "surely_finite",
]

_LARGEST_PEAK = 1e38
"""Larger finite peaks are reported as this: a status vector may be float32."""


@dataclass(frozen=True)
class NonFiniteReport:
    """A gradient that is not finite.

    Attributes:
        step: the optimizer step, counted from 0.
        ranks: ranks whose gradient was not finite before the reduction; empty if only the sum is not.
        names: the parameters concerned.
        parameters: number of all parameters.
    """

    step: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    parameters: int

    def __str__(self) -> str:
        first = ", ".join(map(repr, self.names[:3])) + (", …" if len(self.names) > 3 else "")
        ranks = ", ".join(map(str, self.ranks))
        source = f"from rank{'s' * (len(self.ranks) > 1)} {ranks}" if ranks else "from no rank alone"
        of = plural(self.parameters, "parameter")
        return f"the gradient of {len(self.names)} of {of} is NaN or infinite ({first}): {source}"


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
    """Return whether the peaks guarantee that a sum over ranks is finite.

    Args:
        peaks: of each rank; empty, NaN or infinite peaks guarantee nothing.
        factor: by which the sum is multiplied.
        largest: the largest number of the sum's dtype.

    Example:
        >>> surely_finite([3.0, 2.0], factor=0.5, largest=65504.0), surely_finite([3.0, math.nan], 0.5, 65504.0)
        (True, False)
    """
    return len(peaks) > 0 and sum(peaks) * max(factor, 1.0) < min(largest, _LARGEST_PEAK) / 2


def non_finite_ranks(peaks: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks whose peak is not finite."""
    return tuple(rank for rank, peak in enumerate(peaks) if not math.isfinite(peak))


class FiniteCheck:
    """Measures this rank's gradient before it is reduced.

    Args:
        largest: the largest number that any gradient's dtype holds.
        measures: False: use only the norm and the losses; see [Note: without peaks].

    Attributes:
        norm: of the result, if it was clipped.
        losses: of this rank's backwards that passed their loss.
    """

    def __init__(self, largest: float, *, measures: bool = True) -> None:
        self.largest, self.measures = largest, measures
        self.norm: torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []
        self._peaks: list[torch.Tensor] = []

    def record_peak(self, gradient: torch.Tensor) -> None:
        """Measure one part of this rank's gradient."""
        if self.measures:
            self._peaks.append(peak_of(gradient.detach()))

    def write_peak(self, place: torch.Tensor) -> None:
        """Write the peak of all recorded parts to the status vector; on a GPU without waiting for it."""
        if not self._peaks:
            place.zero_()
            return
        peak = torch.stack([each.to(place.device, torch.float64) for each in self._peaks]).sum()
        place.copy_(torch.where(torch.isfinite(peak), peak.clamp(max=_LARGEST_PEAK), peak))
        self._peaks.clear()

    def clear(self) -> None:
        """Discard all records, as the gradients were dropped."""
        self.norm = None
        self.losses.clear()
        self._peaks.clear()

    def ranks_with_bad_loss(self, comm: Comm) -> tuple[int, ...]:
        """Return the ranks with a loss that is not finite; all ranks call this."""
        mine = torch.zeros(comm.size)
        mine[comm.rank] = sum(not math.isfinite(loss) for loss in self.losses)
        bad = sum_over_ranks(mine, comm.group).tolist()
        return tuple(rank for rank, count in enumerate(bad) if count)


def find_non_finite(
    parts: Mapping[str, Sequence[torch.Tensor]], comm: Comm, step: int, ranks: tuple[int, ...], *, split: bool
) -> NonFiniteReport | None:
    """Inspect a result that may not be finite; if it is split, all ranks call this.

    Args:
        parts: this rank's parts of each parameter's gradient.
        comm: the ranks.
        step: the round.
        ranks: ranks whose own gradient is known to have been not finite.
        split: ranks hold different parts.
    """
    found = [float(any(not math.isfinite(peak_of(part)) for part in held)) for held in parts.values()]
    if split and found:
        found = sum_over_ranks(torch.tensor(found), comm.group).tolist()
    names = tuple(name for name, bad in zip(parts, found, strict=True) if bad)
    return NonFiniteReport(step, ranks, names, len(parts)) if names else None
