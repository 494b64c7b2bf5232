"""What one synchronisation brought, on the host or, until the host reads it, on the device.

On an accelerator the host does not wait for an exchange within a step. A merge uses the headers of all ranks where they
are, and copies them to the host, which reads them after its next local step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Self

import torch
from torch import Tensor

from paceline.parallel.compression.packet_header import PacketHeader
from paceline.world.accelerator import current_stream, host_buffer

__all__ = ["CopiedResult", "DeviceResult", "RankFlag", "SyncResult"]


class RankFlag(IntFlag):
    """Flags in the packet header of a rank."""

    REJECTED = 1
    """Its pseudo-gradient was not finite."""
    FINISHED = 2
    """It makes no more local steps."""
    CHANGED = 4
    """Its model or optimizer is no longer the one that is synchronised, so nothing can be merged."""


@dataclass(frozen=True)
class SyncResult:
    """What all ranks know about one synchronisation.

    Attributes:
        counts: whether any rank had a contribution.
        rejected: ranks whose pseudo-gradient was not finite.
        finished: whether every rank has made its last local step.
        inner_lr: mean learning rate of the local optimizers, by the ranks' weights.
        changed: ranks whose model or optimizer is no longer the one that is synchronised.
    """

    counts: bool
    rejected: tuple[int, ...]
    finished: bool
    inner_lr: float
    changed: tuple[int, ...] = ()

    @classmethod
    def of(cls, headers: Sequence[PacketHeader]) -> SyncResult:
        """Return the result that the headers of all ranks give."""
        total = sum(header.weight for header in headers)
        return cls(
            total > 0,
            tuple(rank for rank, header in enumerate(headers) if header.flags & RankFlag.REJECTED),
            all(header.flags & RankFlag.FINISHED for header in headers),
            sum(header.weight * header.inner_lr for header in headers) / total if total else 0.0,
            tuple(rank for rank, header in enumerate(headers) if header.flags & RankFlag.CHANGED),
        )


@dataclass(frozen=True)
class DeviceResult:
    """What a merge needs of a `SyncResult`, as scalars on the device."""

    counts: Tensor
    inner_lr: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Self:
        """Return the result that the headers of all ranks give, float64, [ranks, 4]."""
        weights = rows[:, 0]
        total, weighted = weights.cumsum(0)[-1], (weights * rows[:, 2]).cumsum(0)[-1]
        counts = total > 0
        return cls(counts, torch.where(counts, weighted / total, 0.0))


class CopiedResult:
    """Headers of all ranks, and which pieces of this rank were finite, on their way to the host.

    Args:
        rows: the headers, float64, [ranks, 4].
        finite: of the parameters and buffers of this rank, bool, [parameters].
    """

    def __init__(self, rows: Tensor, finite: Tensor) -> None:
        self._copies = [host_buffer(each.shape, each.dtype, each.device) for each in (rows, finite)]
        for copy, given in zip(self._copies, (rows, finite), strict=True):
            copy.copy_(given, non_blocking=True)
        self._arrived: Any = current_stream(rows.device).record_event()

    def read(self) -> tuple[SyncResult, list[bool]]:
        """Return the result, and what was finite, once it has come."""
        self._arrived.synchronize()
        rows, finite = self._copies
        return SyncResult.of(PacketHeader.read(rows)), finite.tolist()
