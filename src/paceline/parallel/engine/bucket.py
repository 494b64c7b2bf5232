"""Which parameter lies where in which contiguous gradient buffer.

`paceline.cost_model.bucket_layout.plan_buckets` decides over plain numbers; `Bucket` is the memory. A parameter's
gradient is a view into its bucket, so backward writes where the collective reads: nothing is packed or unpacked.

    flat   | grad 0 | grad 1 |..pad..| grad 2 | ledger or padding |
             └ slots[0].view

[Note: streams] On a GPU autograd adds a gradient on the stream on which the program used the parameter, and runs its
hooks there too. A collective waits for the stream that launches it, which is that of the gradient that came last. So
where a program computes on several streams, that stream is first made to wait for the others. What is launched after
backward needs nothing: autograd ends with the caller's stream behind all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paceline.parallel.compression.compressed_bucket import CompressedBucket

__all__ = [
    "ALIGN",
    "Allocate",
    "Bucket",
    "GradSlot",
    "ShardPiece",
    "shaped_as",
    "storage_dtype",
    "storage_numel",
]

ALIGN = 16
"""Views start at multiples of this many elements (64 bytes of float32: a cache line)."""


Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]


def storage_dtype(param: torch.Tensor, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """Return the real dtype in which `param`'s gradient is kept: complex numbers as pairs."""
    if param.is_complex():
        return param.dtype.to_real()
    low = param.dtype in (torch.bfloat16, torch.float16)
    return reduce_dtype if low and reduce_dtype is not None else param.dtype


def storage_numel(param: torch.Tensor) -> int:
    """Return how many real numbers `param`'s gradient takes."""
    return param.numel() * (2 if param.is_complex() else 1)


@dataclass(eq=False)
class GradSlot:
    """One parameter and the place of its gradient.

    Attributes:
        index: position among the trainable parameters, in registration order.
        name: as in ``named_parameters()``.
        expected: firings of its hook that one backward brings (more than 1 with re-entrant checkpoints).
        fired: firings in the backward under way.
        used: the view holds a gradient (of this rank, or of any rank once reduced).
        start: first element in `bucket.flat`; numel: elements there.
        view: the gradient in the bucket, shaped and strided as the parameter.
        staged: the bucket keeps another dtype than the parameter, so gradients are added to it.
        stale: the view holds what zero_grad() dropped; it is zeroed right before it is written or sent.
        early: the gradient in the dtype of the reduction while there is no bucket; None where that is the
            parameter's own dtype.
    """

    index: int
    name: str
    param: torch.nn.Parameter
    expected: int = 1
    fired: int = 0
    used: bool = False
    start: int = 0
    numel: int = 0
    upcast: bool = False
    needs_zero: bool = False
    unbucketed: torch.Tensor | None = None
    bucket: Bucket = field(init=False, repr=False)
    view: torch.Tensor = field(init=False, repr=False)

    def zero_if_needed(self) -> None:
        """Zero the view if it is stale: next to its use, while it is in the cache."""
        if self.needs_zero:
            self.view.zero_()
            self.needs_zero = False

    def keep_unbucketed(self, dtype: torch.dtype) -> None:
        """Add the gradient that autograd brought to `unbucketed`, where the reduction has another dtype."""
        grad = self.param.grad
        if grad is None or grad.is_complex() or grad.dtype == dtype:
            return
        self.unbucketed = (
            grad.detach().to(dtype) if self.unbucketed is None else self.unbucketed.add_(grad.detach())
        )
        self.param.grad = None

    def expose(self, visible: bool) -> None:
        """Let ``param.grad`` be the gradient (rounded, where the bucket is more precise) or None."""
        if not visible:
            self.param.grad = None
        elif self.unbucketed is not None:
            self.param.grad = self.unbucketed.to(self.param.dtype)
        elif self.has_bucket:
            self.param.grad = self.view.to(self.param.dtype) if self.upcast else self.view

    @property
    def has_bucket(self) -> bool:
        """Whether the slot has its place in a bucket."""
        return hasattr(self, "bucket")


@dataclass(frozen=True)
class ShardPiece:
    """The part of one parameter that lies in one rank's shard.

    Attributes:
        slot: the parameter.
        start: first element of the flattened parameter in storage order; stop: one past the last.
        data: 1-D view of the parameter's elements; grad: of its gradient's.
    """

    slot: GradSlot
    start: int
    stop: int
    data: torch.Tensor
    grad: torch.Tensor


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _shaped(flat: torch.Tensor, slot: GradSlot) -> torch.Tensor:
    """Return `slot`'s part of `flat` with the parameter's shape and, where it is dense, its strides."""
    return shaped_as(slot.param, flat[slot.start : slot.start + slot.numel])


def shaped_as(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return `part` [`storage_numel(param)`] as a view with `param`'s shape and, where it is dense, its strides."""
    if param.is_complex():
        return torch.view_as_complex(part.view(*param.shape, 2))
    if param.numel() and torch._debug_has_internal_overlap(param) == 0 and _is_dense(param):
        return part.as_strided(param.shape, param.stride())
    return part.view(param.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor without overlap fills its span of memory."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel()


class Bucket:
    """One contiguous gradient buffer and, where the optimizer is sharded, the parameters' own buffer.

    Args:
        index: position in launch order.
        slots: the parameters, in ready order.
        dtype: of the buffer. device: of the buffer.
        tail: elements to add behind the gradients for the ledger.
        shards: number of equal parts that the buffer must divide into; each a multiple of `unit` elements.
        allocate: returns uninitialised memory for a number of elements, a dtype and a device.
    """

    def __init__(
        self,
        index: int,
        slots: list[GradSlot],
        dtype: torch.dtype,
        device: torch.device,
        *,
        tail: int = 0,
        shards: int = 1,
        unit: int = ALIGN,
        allocate: Allocate,
    ) -> None:
        self.index, self.slots = index, slots
        self._allocate = allocate
        self.pending = len(slots)
        self.launched = False
        self.ready: float | None = None
        """When the last gradient of the latest backward was there, while a timeline is recorded."""
        self.compressed: CompressedBucket | None = None
        """What sends it in fewer bytes, where it is compressed."""
        used = 0
        for slot in slots:
            slot.start, slot.numel = used, storage_numel(slot.param)
            used = _round_up(used + slot.numel, ALIGN)
        total = _round_up(max(used + tail, 1), shards * (unit if shards > 1 else 1))
        self._gaps = [(slot.start + slot.numel, _round_up(slot.start + slot.numel, ALIGN)) for slot in slots]
        self._gaps.append((used, total))
        self.flat = self._empty(dtype, total, device)
        self.grads, self.ledger = self.flat[:used], self.flat[used : used + tail]
        self.params: torch.Tensor | None = None
        self.writers: set[torch.cuda.Stream] | None = set() if device.type == "cuda" else None
        """On a GPU: the streams on which gradients were written into it; see [Note: streams]."""
        for slot in slots:
            slot.bucket, slot.view = self, _shaped(self.flat, slot)
            slot.upcast = not slot.param.is_complex() and slot.param.dtype != dtype

    @classmethod
    def for_ledger(
        cls, index: int, device: torch.device, length: int, rank: int, ranks: int, allocate: Allocate
    ) -> Bucket:
        """Return a bucket without parameters, in which every rank has a row of its own for the ledger."""
        bucket = cls(index, [], torch.float64, device, tail=ranks * length, allocate=allocate)
        bucket.ledger = bucket.flat[rank * length : (rank + 1) * length]
        return bucket

    def _empty(self, dtype: torch.dtype, numel: int, device: torch.device) -> torch.Tensor:
        """Return memory for the slots, zero between them; it takes no pages until slots are written."""
        flat = self._allocate(numel, dtype, device)
        for start, stop in self._gaps:
            flat[start:stop].zero_()
        return flat

    def note_writer(self) -> None:
        """Take note that autograd has just written here on the current stream."""
        if self.writers is not None:
            self.writers.add(torch.cuda.current_stream(self.flat.device))

    def await_writers(self) -> None:
        """Have the current stream wait for what was written here on others."""
        if self.writers:
            now = torch.cuda.current_stream(self.flat.device)
            for stream in self.writers:
                if stream != now:
                    now.wait_stream(stream)
            self.writers.clear()

    def adopt_gradients(self) -> None:
        """Move the parameters' gradients in, one by one, so that no second set of them exists."""
        for slot in self.slots:
            grad = slot.unbucketed if slot.unbucketed is not None else slot.param.grad
            slot.needs_zero = grad is None
            if grad is not None:
                slot.view.copy_(grad.detach())
                slot.param.grad, slot.unbucketed = None, None

    def adopt_parameters(self) -> None:
        """Move the parameters into one buffer laid out like the gradients, so that a shard is a slice."""
        dtype = self.slots[0].param.dtype
        real = dtype.to_real() if dtype.is_complex else dtype
        self.params = self._empty(real, self.flat.numel(), self.flat.device)
        with torch.no_grad():
            for slot in self.slots:
                place = _shaped(self.params, slot)
                place.copy_(slot.param)
                slot.param.data = place

    def span(self, rank: int, shards: int) -> tuple[int, int]:
        """Return first and one-past-last element of `rank`'s shard."""
        length = self.flat.numel() // shards
        return rank * length, (rank + 1) * length

    def pieces(self, rank: int, shards: int) -> list[ShardPiece]:
        """Return the parts of parameters that lie in `rank`'s shard (after `adopt_parameters`)."""
        assert self.params is not None, "parameters were not adopted"
        low, high = self.span(rank, shards)
        found = []
        for slot in self.slots:
            first, last = max(low, slot.start), min(high, slot.start + slot.numel)
            if first < last:
                at = slice(first, last)
                found.append(
                    ShardPiece(slot, first - slot.start, last - slot.start, self.params[at], self.flat[at])
                )
        return found
