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

[Note: known on the device] Where the host must not wait for an accelerator, the result is inspected on the device, in
one pass at the end of every backward. An optimizer skips its update by a flag there (`LateResult.found_inf`), and the
host reads one step late which parameters and ranks it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline._core.format import plural
from paceline.parallel.gradient_collectives import Comm
from paceline.world.accelerator import current_stream, has_streams, host_buffer
from paceline.world.control_collectives import sum_over_ranks

__all__ = [
    "FiniteCheck",
    "LateResult",
    "NonFiniteReport",
    "find_non_finite",
    "non_finite_flags",
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


@dataclass(eq=False)
class LateResult:
    """What is known of a result that was inspected on the device; see [Note: known on the device].

    Attributes:
        step: its round.
        found_inf: 1 if it is not finite, else 0: a float32 scalar on the device, the same on all ranks.
        ranks: the ranks that a report names; None: those with a bad peak in the round status.
        settled: whether all ranks have read it, so that they may act on `report` alike.
        report: once settled; None if it is finite.
    """

    step: int
    found_inf: torch.Tensor
    ranks: tuple[int, ...] | None = None
    settled: bool = False
    report: NonFiniteReport | None = None


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
        present: the gradient that there is, if it was inspected on the device and not yet read.
        unread: the latest result on its way to the host.
    """

    def __init__(self, largest: float, *, measures: bool = True) -> None:
        self.largest, self.measures = largest, measures
        self.norm: torch.Tensor | None = None
        self.losses: list[torch.Tensor] = []
        self.present: LateResult | None = None
        self.unread: LateResult | None = None
        self._peaks: list[torch.Tensor] = []
        self._names: tuple[str, ...] = ()  # of the unread result's parameters
        self._flags = torch.empty(0)  # on the host, once `_copied`
        self._copied: Any = None

    def record_peak(self, gradient: torch.Tensor) -> None:
        """Measure one part of this rank's gradient."""
        if self.measures:
            self._peaks.append(peak_of(gradient.detach()))

    def write_peak(self, place: torch.Tensor) -> None:
        """Write the peak of all recorded parts to the status vector; on a GPU without waiting for it."""
        if not self._peaks:
            place.zero_()
            if self.losses and not self.measures and has_streams(place.device):
                self._write_losses(place)
            return
        if has_streams(place.device):
            for each in self._peaks:  # measured on the streams of backward
                each.record_stream(current_stream(place.device))
        peak = torch.stack([each.to(place.device, torch.float64) for each in self._peaks]).sum()
        place.copy_(torch.where(torch.isfinite(peak), peak.clamp(max=_LARGEST_PEAK), peak))
        self._peaks.clear()

    def _write_losses(self, place: torch.Tensor) -> None:
        """Write NaN if a loss was not finite: the ranks that a late report names."""
        losses = torch.stack([each.reshape(()).to(place.device, torch.float64) for each in self.losses])
        place.masked_fill_(~torch.isfinite(losses).all(), math.nan)

    def inspect(
        self,
        parts: Mapping[str, Sequence[torch.Tensor]],
        device: torch.device,
        comm: Comm | None,
        step: int,
        ranks: tuple[int, ...] | None,
    ) -> None:
        """Inspect a result on the device, and start copying what was found; the result before has been read.

        Args:
            parts: this rank's parts of each parameter's gradient.
            device: of the parts.
            comm: the ranks, if they hold different parts: then all call this.
            step: the round.
            ranks: as for `LateResult`.
        """
        flags = non_finite_flags(parts, device)
        if comm is not None:
            flags = comm.combine_norms(flags, math.inf)
        if self._flags.shape != flags.shape or self._flags.dtype != flags.dtype:
            self._flags = host_buffer(flags.shape, flags.dtype, flags.device)
        self._flags.copy_(flags, non_blocking=True)
        self._copied = current_stream(flags.device).record_event()
        self.norm, self._names = None, tuple(parts)
        self.present = self.unread = LateResult(step, flags.any().to(torch.float32), ranks)

    def read(self) -> NonFiniteReport | None:
        """Return the report on the unread result; waits for the device."""
        assert self.unread is not None, "a result is on its way"
        if not self._copied.query():
            self._copied.synchronize()
        return _report(self.unread.step, self.unread.ranks or (), self._names, self._flags.tolist())

    def settle(self, report: NonFiniteReport | None) -> bool:
        """Record the report on the unread result; return whether that is the gradient that there is."""
        late, self.unread = self.unread, None
        assert late is not None, "a result is on its way"
        late.report, late.settled = report, True
        if self.present is not late:
            return False
        self.present = None
        return True

    def clear(self) -> None:
        """Discard all records, as the gradients were dropped."""
        self.norm, self.present = None, None
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
    device = next((part.device for held in parts.values() for part in held), torch.device("cpu"))
    if device.type == "cpu":
        found = [float(any(not math.isfinite(peak_of(part)) for part in held)) for held in parts.values()]
    else:
        found = non_finite_flags(parts, device).tolist()
    if split and found:
        found = sum_over_ranks(torch.tensor(found), comm.group).tolist()
    return _report(step, ranks, tuple(parts), found)


def _report(
    step: int, ranks: tuple[int, ...], names: tuple[str, ...], flags: Sequence[float]
) -> NonFiniteReport | None:
    found = tuple(name for name, bad in zip(names, flags, strict=True) if bad)
    return NonFiniteReport(step, ranks, found, len(names)) if found else None


def non_finite_flags(parts: Mapping[str, Sequence[torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Return, by parameter, 1.0 where one of this rank's parts is not finite, else 0.0; the host waits for nothing.

    An infinity norm overflows nowhere, and propagates NaN.
    """
    held = [
        (place, torch.view_as_real(part) if part.is_complex() else part)
        for place, of_one in enumerate(parts.values())
        for part in of_one
        if part.numel()
    ]
    wide = torch.float64 if any(part.dtype == torch.float64 for _, part in held) else torch.float32
    nothing = torch.zeros((), dtype=wide, device=device)
    norms: dict[int, torch.Tensor] = {}
    for dtype in {part.dtype for _, part in held}:
        of_dtype = [(place, part) for place, part in held if part.dtype == dtype]
        found = torch._foreach_norm([part for _, part in of_dtype], math.inf, dtype=wide)
        for (place, _), norm in zip(of_dtype, found, strict=True):
            norms[place] = torch.maximum(norms[place], norm.to(device)) if place in norms else norm.to(device)
    rows = [norms.get(place, nothing) for place in range(len(parts))]
    return torch.isfinite(torch.stack(rows)).logical_not().to(torch.float32)
