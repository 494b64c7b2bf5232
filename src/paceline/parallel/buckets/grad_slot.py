"""The place of a parameter's gradient in a bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

__all__ = ["GradSlot", "ShardPiece", "SlotBucket", "dense", "shaped_as", "storage_dtype", "storage_numel"]


class SlotBucket(Protocol):
    """The bucket of a slot, `paceline.parallel.buckets.bucket.Bucket`, as users of the slot see it."""

    index: int
    flat: torch.Tensor
    views: list[torch.Tensor]
    addresses: list[int]
    params: torch.Tensor | None
    pending: int
    launched: bool
    ready: float | None
    small: list[GradSlot]
    last_small: GradSlot | None
    released: bool
    writers: set[Any] | None

    def adopt_parameters(self) -> None:
        """Move the parameters into one buffer laid out like the gradients."""
        ...

    def note_writer(self) -> None:
        """Record that autograd has written a gradient on the current stream."""
        ...

    def hold(self) -> None:
        """Have memory for the whole buffer again."""
        ...


def storage_dtype(param: torch.Tensor, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """Return the real dtype in which `param`'s gradient is stored; complex numbers are stored as pairs."""
    if param.is_complex():
        return param.dtype.to_real()
    low = param.dtype in (torch.bfloat16, torch.float16)
    return reduce_dtype if low and reduce_dtype is not None else param.dtype


def storage_numel(param: torch.Tensor) -> int:
    """Return the number of real elements of `param`'s gradient."""
    return param.numel() * (2 if param.is_complex() else 1)


@dataclass(eq=False)
class GradSlot:
    """A parameter and the place of its gradient.

    Attributes:
        index: position among the trainable parameters, in registration order.
        name: as in ``named_parameters()``.
        expected: how often its hook fires in a backward (more than once with re-entrant checkpoints).
        fired: how often it has fired in the present backward.
        used: the view holds a gradient (of this rank, or of any rank once reduced).
        start: first element in `bucket.flat`.
        numel: number of elements in `bucket.flat`.
        view: the gradient in the bucket, with the parameter's shape and strides.
        position: index in `bucket.slots`.
        small: its gradient is copied along with those of other small slots; see `Bucket`.
        upcast: the bucket has another dtype than the parameter, so gradients are added to it.
        needs_zero: the view holds a dropped gradient: it is overwritten, or zeroed right before it is sent.
        unbucketed: the gradient in the reduction's dtype before buckets exist; None where that is the parameter's.
        stand_in: `param.grad` while every rank holds a shard of the gradient.
        added: what autograd has added to `stand_in`.
        converted: the engine's list of slots whose parameters have another dtype, shape or device than their buckets.
        consumer: number of the optimizer that updates it; buckets don't mix them.
        update_cost: cost of its update by one rank, which then owns it, in any unit; None: it may be cut.
    """

    index: int
    name: str
    param: torch.nn.Parameter
    expected: int = 1
    fired: int = 0
    used: bool = False
    start: int = 0
    numel: int = 0
    position: int = 0
    small: bool = False
    upcast: bool = False
    needs_zero: bool = False
    unbucketed: torch.Tensor | None = None
    stand_in: torch.Tensor | None = field(default=None, repr=False)
    added: torch.Tensor | None = field(default=None, repr=False)
    converted: list[GradSlot] = field(default_factory=list, repr=False)
    consumer: int = 0
    update_cost: float | None = None
    bucket: SlotBucket = field(init=False, repr=False)
    view: torch.Tensor = field(init=False, repr=False)

    def take(self, grad: torch.Tensor) -> None:
        """Add a gradient to what the view holds in this round."""
        if self.needs_zero:
            self.view.copy_(grad.detach())
            self.needs_zero = False
        else:
            self.view.add_(grad.detach())

    def replace_by(self, grad: torch.Tensor | None) -> None:
        """Let the view hold `grad`, which is elsewhere."""
        if grad is not None and grad is not self.stand_in:
            self.view.copy_(dense(grad).detach())
            self.param.grad, self.needs_zero = self.view, False

    def make_view(self) -> None:
        """Let `view` be the gradient's place in the bucket."""
        self.view = shaped_as(self.param, self.bucket.flat[self.start : self.start + self.numel])
        self.bucket.views[self.position] = self.view
        self.bucket.addresses[self.position] = self.view.data_ptr()

    def return_to_bucket(self) -> None:
        """Copy the gradient into the bucket again after the program has moved it (``param.grad.data = ...``)."""
        if self.view.data_ptr() != self.bucket.addresses[self.position]:
            moved, attached = self.view, self.param.grad is self.view
            self.make_view()
            if (moved.dtype, moved.device, moved.shape) != (
                self.view.dtype,
                self.view.device,
                self.view.shape,
            ):
                self.converted.append(self)
                return
            self.view.copy_(moved.detach())
            if attached:
                self.param.grad = self.view

    def leave_view(self) -> None:
        """Leave a dropped gradient to the program, which still holds it, in memory of its own."""
        held = self.view
        self.make_view()
        held.data = held.detach().clone()

    def keep_unbucketed(self, dtype: torch.dtype) -> None:
        """Add the new gradient to `unbucketed` if the reduction has another dtype."""
        grad = self.param.grad
        if grad is None or grad.is_complex() or grad.dtype == dtype:
            return
        kept = self.unbucketed
        self.unbucketed = grad.detach().to(dtype) if kept is None else kept.add_(grad.detach())
        self.param.grad = None

    def expose(self, visible: bool) -> None:
        """Set ``param.grad`` to the gradient (rounded where the bucket is more precise), or to None."""
        if not visible:
            self.param.grad = None
        elif self.unbucketed is not None:
            self.param.grad = self.unbucketed.to(self.param.dtype)
        elif hasattr(self, "bucket"):
            self.param.grad = self.view.to(self.param.dtype) if self.upcast else self.view


@dataclass(frozen=True)
class ShardPiece:
    """The part of a parameter that lies in one rank's shard.

    Attributes:
        slot: the parameter.
        start: first element of the flattened parameter, in storage order.
        stop: one past the last element.
        data: 1-D view of the parameter's elements.
        grad: 1-D view of the gradient's elements.
    """

    slot: GradSlot
    start: int
    stop: int
    data: torch.Tensor
    grad: torch.Tensor


def dense(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient with memory for every element."""
    return grad.to_dense() if grad.is_sparse else grad


def shaped_as(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return `part` [`storage_numel(param)`] as a view with `param`'s shape and, where it is dense, its strides."""
    if param.is_complex():
        return torch.view_as_complex(part.view(*param.shape, 2))
    if param.numel() and torch._debug_has_internal_overlap(param) == 0:
        span = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
        if span == param.numel():  # it fills its span of memory
            return part.as_strided(param.shape, param.stride())
    return part.view(param.shape)
