"""What a rank sends along with a packet: its weight in the sum, and two numbers for the caller."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["HEADER_NBYTES", "UNWEIGHTED", "PacketHeader", "header_row"]

_LENGTH = 4
HEADER_NBYTES = 8 * _LENGTH
"""Bytes of a header, four float64, behind its packet."""


@dataclass(frozen=True)
class PacketHeader:
    """What a rank sends along with its numbers.

    Attributes:
        weight: of the numbers in the sum; 0: they are left out, whatever they are.
        flags: bits, for the caller.
        inner_lr: learning rate, for the caller.
    """

    weight: float = 1.0
    flags: int = 0
    inner_lr: float = 0.0

    @classmethod
    def read(cls, rows: Tensor) -> list[PacketHeader]:
        """Return the headers in rows of float64, [ranks, 4]; waits for their device."""
        return [cls(weight, int(flags), inner_lr) for weight, flags, inner_lr, _ in rows.tolist()]

    def row(self, device: torch.device) -> Tensor:
        """Return it as four float64 on `device`."""
        return header_row(device, self.weight, self.flags, self.inner_lr)


UNWEIGHTED = PacketHeader()
"""Header of reductions in which all ranks count the same; all ranks pass this one."""


def header_row(
    device: torch.device, weight: float | Tensor, flags: float | Tensor, inner_lr: float | Tensor
) -> Tensor:
    """Return a header as four float64 on `device`, from numbers of the host and scalars of an accelerator.

    On an accelerator the host neither reads these nor waits.
    """
    if device.type == "cpu":
        return torch.tensor([float(weight), float(flags), float(inner_lr), 0.0], dtype=torch.float64)
    row = torch.zeros(_LENGTH, dtype=torch.float64, device=device)
    for place, value in enumerate((weight, flags, inner_lr)):
        if isinstance(value, Tensor):
            row[place].copy_(value, non_blocking=True)
        else:
            row[place].fill_(value)
    return row
