"""What an optimizer updates as one: part of a parameter, with the tensor that the optimizer holds in its place.

As a rule that tensor is a view of the parameter. With `StatePrecision` it is a copy, in another dtype or on the CPU
(a *master* copy, Micikevicius et al., arXiv 1710.03740): it is updated, and the parameter becomes its rounded value.

[Note: changed parameters] A program may change parameters between steps, by loading for example. Where a parameter is
not the rounded master, it was changed, and the master follows it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError

__all__ = ["MASTER", "StatePrecision", "UpdateUnit"]

MASTER = "master"
"""Entry of a saved state: the master copy."""

_DRAWN = "rounding_draws"
"""Entry of a saved state: how many times the master was rounded stochastically."""

_CUT_BITS = {torch.bfloat16: 16}
"""Bits of a float32 that rounding to a dtype cuts off."""


@dataclass(frozen=True)
class StatePrecision:
    """How an optimizer holds parameters and state.

    Attributes:
        master_dtype: dtype of the copy that is updated, for parameters of fewer bits; None: parameters themselves are.
        stochastic_rounding: round masters up or down at random, so that small updates are kept on average.
        offload: keep the copy and the state in the memory of the CPU.
    """

    master_dtype: torch.dtype | None = None
    stochastic_rounding: bool = False
    offload: bool = False

    def __post_init__(self) -> None:
        if self.master_dtype is not None and not (
            isinstance(self.master_dtype, torch.dtype) and self.master_dtype.is_floating_point
        ):
            raise UsageError(
                f"master_dtype={self.master_dtype!r}",
                remedy="give a floating-point dtype such as torch.float32, or None",
            )
        if self.stochastic_rounding and self.master_dtype is not torch.float32:
            raise UsageError(
                f"stochastic_rounding=True with master_dtype={self.master_dtype}",
                remedy="pass master_dtype=torch.float32: its values are rounded to bfloat16",
            )

    def dtype_of(self, data: Tensor) -> torch.dtype:
        """Return the dtype of the tensor that is updated in place of `data`."""
        master = self.master_dtype
        if master is None or data.is_complex() or master.itemsize <= data.dtype.itemsize:
            return data.dtype
        return master

    def copies(self, data: Tensor) -> bool:
        """Return whether a copy is updated in place of `data`."""
        return self.dtype_of(data) != data.dtype or (self.offload and data.device.type != "cpu")

    def copy(self, data: Tensor) -> Tensor:
        """Return the tensor to update in place of `data`: a view of it, or a copy."""
        if not self.copies(data):
            return data.detach()
        device = torch.device("cpu") if self.offload else data.device
        return data.detach().to(device, self.dtype_of(data), copy=True)


class UpdateUnit:
    """Elements of a parameter that are updated as one.

    Args:
        name: of the parameter.
        start: first element, in storage order.
        stop: one past the last element.
        data: returns the elements in the model's memory, in the shape in which the optimizer sees them.
        grad: returns their gradient in the same shape; None: not used in this round.
        precision: of the tensor that the optimizer holds.

    Attributes:
        inner: that tensor.
        like: a tensor without memory, like `inner`, which may have none between steps.
        copied: it is a copy.
        replicated: every rank updates it.
        in_copy: it belongs to the right neighbour's shard, of which this rank keeps a copy.
    """

    def __init__(
        self,
        name: str,
        start: int,
        stop: int,
        data: Callable[[], Tensor],
        grad: Callable[[], Tensor | None],
        precision: StatePrecision,
        *,
        replicated: bool = False,
    ) -> None:
        self.name, self.start, self.stop = name, start, stop
        self._data, self._grad, self._precision = data, grad, precision
        held = data()
        self.copied = precision.copies(held)
        self._has_master = precision.dtype_of(held) != held.dtype
        self.inner = torch.nn.Parameter(precision.copy(held))
        self.like = torch.empty_strided(held.shape, held.stride(), dtype=self.inner.dtype, device="meta")
        self.replicated = replicated
        self.in_copy = False
        self._draws = 0

    @property
    def used(self) -> bool:
        """Whether there is a gradient."""
        return self._grad() is not None

    def load(self) -> None:
        """Give the optimizer the gradient, and what the program has changed."""
        inner, grad = self.inner, self._grad()
        inner.grad = None if grad is None else grad.to(inner.device, inner.dtype)
        if self.copied:
            self._follow_changes()

    def follow_memory(self) -> None:
        """Update the parameter where it is now."""
        if not self.copied:
            self.inner.data = self._data().detach()

    def store(self) -> None:
        """Let the parameter be the rounded copy."""
        if not self.copied or self.inner.grad is None:
            return
        self.inner.grad = None
        data = self._data()
        bits = _CUT_BITS.get(data.dtype)
        if bits is None or not self._precision.stochastic_rounding:
            data.copy_(self.inner.detach())
        else:
            data.copy_(_rounded_up_or_down(self.inner.detach(), bits, self._seed()))
            self._draws += 1

    def _seed(self) -> int:
        """Return a seed that is the same wherever the unit is updated."""
        return zlib.crc32(f"{self.name}:{self.start}:{self._draws}".encode())

    def _follow_changes(self) -> None:
        """Take over what the program has changed; see [Note: changed parameters]."""
        data, master = self._data().detach(), self.inner.detach()
        now = data.to(master.device)
        if self._precision.stochastic_rounding and now.dtype in _CUT_BITS:
            low = master.view(torch.int32) >> _CUT_BITS[now.dtype]
            here = now.to(torch.float32).view(torch.int32) >> _CUT_BITS[now.dtype]
            changed = (here != low) & (here != low + 1)
        else:
            changed = master.to(now.dtype) != now
        master.copy_(torch.where(changed, now.to(master.dtype), master))

    def extra_state(self) -> dict[str, Any]:
        """Return what belongs to the state besides the optimizer's own."""
        if not self._has_master:
            return {}
        extra: dict[str, Any] = {MASTER: self.inner.detach()}
        return extra | ({_DRAWN: self._draws} if self._precision.stochastic_rounding else {})

    def take_extra_state(self, state: dict[str, Any]) -> None:
        """Take over, and remove from `state`, what `extra_state` has added to it."""
        master, self._draws = state.pop(MASTER, None), int(state.pop(_DRAWN, self._draws))
        if master is not None and self.copied:
            self.inner.detach().copy_(master)


def _rounded_up_or_down(values: Tensor, bits: int, seed: int) -> Tensor:
    """Return float32 `values` with the lowest `bits` cut off, after a random number below 2**bits was added to them."""
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(
        0, 1 << bits, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    rounded = ((values.view(torch.int32) + noise) >> bits << bits).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)
