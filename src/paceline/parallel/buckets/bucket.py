"""Contiguous gradient buffers, and where each parameter's gradient lies in them.

`paceline.cost_model.bucket_assignment.plan_buckets` assigns parameters to buckets; `Bucket` holds the memory. A new
gradient is copied into its bucket; after the round ``param.grad`` is a view into it, so nothing is unpacked.

    flat   | grad 0 | grad 1 |..pad..| grad 2 | round status or padding |
             └ slots[0].view

Parameters that have an owner each lie in their owner's part, whole; parts have equal lengths.

    flat   | grad 0 | grad 2 |..pad..| grad 1 | grad 3 |..pad..|
           └ part of rank 0          └ part of rank 1

[Note: streams] On a GPU, autograd accumulates a gradient, and runs its hooks, on the stream on which forward used the
parameter. A collective waits only for the stream that launches it, which is that of the last gradient. Where a model
computes on several streams, that stream therefore waits for the others first. A launch after backward needs no wait:
autograd ends with the caller's stream ordered behind all of them.

[Note: taking gradients over] While ``param.grad`` is None, autograd leaves a gradient where it computed it, without
adding. A large one is copied to its view at once, which frees its memory for the next; small ones are copied together,
when their bucket is full. Adding to a zeroed view would pass over memory twice as often.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from operator import attrgetter
from sys import getrefcount
from typing import Any, cast

import torch

from paceline.parallel.buckets.grad_slot import GradSlot, ShardPiece, dense, shaped_as, storage_numel
from paceline.parallel.compression.compressed_bucket import CompressedBucket
from paceline.world.accelerator import current_stream, current_stream_key, has_streams

__all__ = ["ALIGN", "SMALL_NBYTES", "Allocate", "Bucket"]

ALIGN = 16
"""Views start at multiples of this many elements (64 bytes of float32: a cache line)."""

_NONE, _get_grad = id(None), attrgetter("grad")

SMALL_NBYTES = 1 << 16
"""Smaller gradients are copied together; see [Note: taking gradients over]."""

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]
"""Returns uninitialised memory for a number of elements, a dtype and a device."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _place(slots: Sequence[GradSlot], start: int, align: int) -> int:
    """Place slots one behind the other from `start` on; return where they end."""
    for slot in slots:
        slot.start, slot.numel = start, storage_numel(slot.param)
        start = _round_up(start + slot.numel, align)
    return start


def _place_at_owners(
    slots: Sequence[GradSlot], owners: Sequence[int], shards: int, unit: int, align: int
) -> int:
    """Place every slot in the part of its owner; return the length of all parts."""
    parts = [
        [slot for slot, owner in zip(slots, owners, strict=True) if owner == part] for part in range(shards)
    ]
    length = _round_up(max([1, *(_place(part, 0, align) for part in parts)]), unit)
    for number, part in enumerate(parts):
        _place(part, number * length, align)
    return shards * length


def _gaps(slots: Sequence[GradSlot], total: int) -> list[tuple[int, int]]:
    """Return start and stop of what lies between, before and behind slots."""
    gaps, end = [], 0
    for slot in sorted(slots, key=attrgetter("start")):
        gaps.append((end, slot.start))
        end = slot.start + slot.numel
    return [(start, stop) for start, stop in [*gaps, (end, total)] if start < stop]


class Bucket:
    """A contiguous gradient buffer and, with a sharded optimizer, the parameters' buffer of the same layout.

    Args:
        index: position in launch order.
        slots: the parameters, in ready order.
        dtype: of the buffer.
        device: of the buffer.
        tail: elements behind the gradients for the round status.
        shards: number of equal parts that the buffer divides into.
        unit: each part is a multiple of this many elements.
        align: gradients start at multiples of this many elements.
        allocate: allocates the buffer.
        owners: part that each slot lies in, whole; None: slots lie one behind the other, across parts.
        own: this rank's part and the number of parts, if the buffer's memory is freed once it is reduced.

    Attributes:
        flat: the whole buffer.
        grads: the gradients in it.
        status: this rank's place for the round status, often empty.
        params: the parameters, after `adopt_parameters`.
        views: the gradient of each slot.
        addresses: of the views in the buffer.
        small: slots whose gradients are copied together; see [Note: taking gradients over].
        others: the other slots.
        last_small: the small slot whose gradient is ready last; it stands for all small ones.
        pending: of the last small slot and the others, those whose gradient is not complete yet.
        attached: every gradient is in the buffer, and ``param.grad`` is its view.
        upcast: it has another dtype than the parameters.
        converted: slots whose parameters have another dtype, shape or device than when the bucket was built.
        launched: its collective was launched in this round.
        whole: every parameter lies in the part of its owner.
        own: if the buffer's memory is freed once it is reduced, this rank's part of the result; else None.
        released: that memory is freed at present.
        ready: when the last gradient of the latest backward was complete; set while a timeline is recorded.
        compressed: reduces it in compressed packets; None: uncompressed.
        writers: on an accelerator, the streams that wrote gradients into it; see [Note: streams].
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
        align: int = ALIGN,
        allocate: Allocate,
        owners: Sequence[int] | None = None,
        own: tuple[int, int] | None = None,
    ) -> None:
        self.index, self.slots = index, slots
        self._allocate = allocate
        self.pending = 0
        self.launched = False
        self.ready: float | None = None
        self.compressed: CompressedBucket | None = None
        self.whole = owners is not None
        if owners is not None:
            used = total = _place_at_owners(slots, owners, shards, unit, align)
        else:
            used = _place(slots, 0, align)
            total = _round_up(max(used + tail, 1), shards * (unit if shards > 1 else 1))
        self._gaps = _gaps(slots, total)
        self.released = False
        self.own: torch.Tensor | None = None
        if own is not None:
            self._allocate = lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device)
            self._own_span = self.span_of(total, *own)
            self.own = torch.zeros(total // own[1], dtype=dtype, device=device)
        self.flat = self._empty(dtype, total, device)
        self.grads, self.status = self.flat[:used], self.flat[used : used + tail]
        self.params: torch.Tensor | None = None
        self.members = [slot.param for slot in slots]
        self.views = [self.flat] * len(slots)
        self.addresses = [0] * len(slots)
        self._addresses: list[int] = []  # of the parameters in that buffer
        self._seen: list[int] = []  # where the parameters were in the latest backward
        self._kinds = [(slot.param.dtype, slot.param.shape) for slot in slots]
        self.converted: list[GradSlot] = []
        self.attached = self._kept = self._copied = False
        self.writers: set[Any] | None = set() if has_streams(device) else None
        self._writer_key = current_stream_key(device)
        self._writer_keys: set[Hashable] = set()
        for position, slot in enumerate(slots):
            slot.bucket, slot.position = self, position
            slot.make_view()
            slot.upcast = not slot.param.is_complex() and slot.param.dtype != dtype
        self._unshared = max(map(getrefcount, self.views), default=0)  # while nobody else holds a view
        self.upcast = any(slot.upcast for slot in slots)
        self.classify()

    @classmethod
    def for_status(cls, index: int, device: torch.device, length: int, allocate: Allocate) -> Bucket:
        """Return a bucket without parameters, for a round status of `length` numbers."""
        return cls(index, [], torch.float64, device, tail=length, allocate=allocate)

    def _empty(self, dtype: torch.dtype, numel: int, device: torch.device) -> torch.Tensor:
        """Allocate a buffer and zero the gaps between slots; its pages are touched when slots are written."""
        flat = self._allocate(numel, dtype, device)
        for start, stop in self._gaps:
            flat[start:stop].zero_()
        return flat

    def classify(self) -> None:
        """Divide the slots into small ones and others, by the number of times that each is expected to be ready."""
        self.small: list[GradSlot] = []
        self.others: list[GradSlot] = []
        for slot in self.slots:
            slot.small = slot.expected == 1 and not slot.upcast and slot.view.nbytes < SMALL_NBYTES
            (self.small if slot.small else self.others).append(slot)
        self.last_small = self.small[-1] if self.small else None
        self._small_params = [slot.param for slot in self.small]

    def begin_backward(self, kept: Collection[int]) -> None:
        """Prepare for a backward that adds to the gradients of the slots `kept` and computes the others anew."""
        self.pending, self.launched, self.ready = len(self.others) + bool(self.small), False, None
        self.attached, self._kept, self._copied = False, bool(kept), False
        if self.released and any(slot.index in kept for slot in self.slots):
            self.hold()
        if self.writers is not None:
            self.writers.clear()
            self._writer_keys.clear()
        here = list(map(torch.Tensor.data_ptr, self.members))
        if here != self._seen:
            self._seen, device = here, self.flat.device
            self.converted = [
                slot
                for slot, kind in zip(self.slots, self._kinds, strict=True)
                if (slot.param.dtype, slot.param.shape) != kind or slot.param.device != device
            ]
        for slot in self.slots:
            slot.fired = 0
            slot.used = False
        for slot in self.others:
            slot.needs_zero = True
        if self.released:
            return
        moved = list(map(torch.Tensor.data_ptr, self.views)) != self.addresses
        held = list(map(getrefcount, self.views))
        if moved or max(held, default=0) > self._unshared:
            for slot, references in zip(self.slots, held, strict=True):
                if slot.index not in kept and (moved or references > self._unshared):
                    slot.leave_view()

    def collect(self, *, complete: bool = True) -> bool:
        """Move gradients that autograd has left outside into the buffer.

        Args:
            complete: zero the places of parameters without a gradient; False: with such ones, do nothing.

        Returns:
            Whether every parameter has a gradient.
        """
        self.hold()
        attachable = self._kept or self._copied or self.others  # otherwise no parameter has a view yet
        if attachable and list(map(torch.Tensor.data_ptr, self.views)) != self.addresses:
            for slot in self.slots:
                slot.return_to_bucket()
        for slot in self.converted:
            slot.param.grad, slot.needs_zero = None, True
        grads = list(map(_get_grad, self._small_params))
        absent = []
        if _NONE in map(id, grads):
            absent = [slot for slot, grad in zip(self.small, grads, strict=True) if grad is None]
        absent += [slot for slot in self.others if slot.needs_zero]
        if not complete and (absent or (self._kept and not all(slot.fired for slot in self.small))):
            return False
        for slot in absent:
            slot.view.zero_()
            slot.fired = 0
        self._copy_small(grads, all_outside=not (absent or self._kept))
        for slot in self.others:
            if not (slot.upcast or slot.needs_zero or slot.param.grad is slot.view):
                slot.replace_by(slot.param.grad)
        self.attached = not (absent or self.upcast)
        return not absent

    def _copy_small(self, grads: list[torch.Tensor | None], *, all_outside: bool) -> None:
        """Copy the gradients of the small slots to their views, and attach these."""
        slots, params = self.small, self._small_params
        if not all_outside:
            outside = [at for at, grad in enumerate(grads) if grad is not None and grad is not slots[at].view]
            slots, grads = [slots[at] for at in outside], [grads[at] for at in outside]
            params = [slot.param for slot in slots]
        if not slots:
            return
        views, found = [slot.view for slot in slots], cast("list[torch.Tensor]", grads)
        with torch.no_grad():
            try:
                torch._foreach_copy_(views, found)
            except RuntimeError:
                if not any(grad.is_sparse for grad in found):
                    raise
                torch._foreach_copy_(views, list(map(dense, found)))
        self._copied = True
        self._keep_until_copied(found)
        for param, view in zip(params, views, strict=True):
            param.grad = view
        for slot in slots:
            slot.fired = slot.fired or 1

    def note_writer(self) -> None:
        """Record that autograd has written a gradient on the current stream."""
        if self.writers is not None and (key := self._writer_key()) not in self._writer_keys:
            self._writer_keys.add(key)
            self.writers.add(current_stream(self.flat.device))

    def await_writers(self) -> None:
        """Make the current stream wait for the other streams that wrote gradients."""
        if self.writers:
            now = current_stream(self.flat.device)
            for stream in self.writers:
                if stream != now:
                    now.wait_stream(stream)

    def _keep_until_copied(self, grads: Sequence[torch.Tensor]) -> None:
        """Keep the memory of gradients of other streams from being reused before this stream has copied them."""
        if self.writers:
            now = current_stream(self.flat.device)
            if self.writers != {now}:
                for grad in grads:
                    grad.record_stream(now)

    def adopt_gradients(self) -> None:
        """Move the parameters' gradients into the bucket, one by one, so that memory never holds two sets."""
        for slot in self.slots:
            grad = slot.unbucketed if slot.unbucketed is not None else slot.param.grad
            slot.needs_zero = grad is None
            if grad is not None:
                slot.view.copy_(grad.detach())
                slot.param.grad, slot.unbucketed = None if slot.upcast else slot.view, None

    def adopt_parameters(self) -> None:
        """Move the parameters into one buffer laid out like the gradients, so that a shard is a slice."""
        dtype = self.slots[0].param.dtype
        real = dtype.to_real() if dtype.is_complex else dtype
        self.params = self._empty(real, self.flat.numel(), self.flat.device)
        with torch.no_grad():
            for slot in self.slots:
                place = shaped_as(slot.param, self.params[slot.start : slot.start + slot.numel])
                place.copy_(slot.param)
                slot.param.data = place
        self._addresses = list(map(torch.Tensor.data_ptr, self.members))

    @property
    def moved(self) -> list[GradSlot]:
        """Slots whose parameters the program has moved out of the buffer since `adopt_parameters`."""
        with torch._C.DisableTorchFunction():  # or this would wait for what is gathered (`parameter_gather`)
            now = list(map(torch.Tensor.data_ptr, self.members))
        if now == self._addresses:
            return []
        return [
            slot for slot, here, there in zip(self.slots, now, self._addresses, strict=True) if here != there
        ]

    def span(self, rank: int, shards: int) -> tuple[int, int]:
        """Return the first and one-past-last element of `rank`'s shard."""
        return self.span_of(self.flat.numel(), rank, shards)

    @staticmethod
    def span_of(numel: int, rank: int, shards: int) -> tuple[int, int]:
        """Return the first and one-past-last element of a rank's part of a buffer."""
        length = numel // shards
        return rank * length, (rank + 1) * length

    def result(self, low: int, high: int) -> torch.Tensor:
        """Return the reduced elements from `low` up to `high`, all of them in this rank's part if only that is kept."""
        if self.own is None:
            return self.flat[low:high]
        first = self._own_span[0]
        return self.own[low - first : high - first]

    def keep_own(self) -> None:
        """Keep this rank's part of the result and free the buffer, if that is the plan."""
        if self.own is None or self.released:
            return
        low, high = self._own_span
        self.own.copy_(self.flat[low:high])
        self.flat.untyped_storage().resize_(0)
        self.released = True

    def hold(self) -> None:
        """Have memory for the whole buffer again, with this rank's part of the result in its place."""
        if not self.released:
            return
        assert self.own is not None, "only its memory is freed"
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        self.released = False
        for start, stop in self._gaps:
            self.flat[start:stop].zero_()
        self.flat[slice(*self._own_span)].copy_(self.own)
        self.addresses = list(map(torch.Tensor.data_ptr, self.views))

    def pieces(self, rank: int, shards: int) -> list[ShardPiece]:
        """Return the parts of parameters that lie in `rank`'s shard (after `adopt_parameters`)."""
        assert self.params is not None, "parameters were not adopted"
        low, high = self.span(rank, shards)
        found = []
        for slot in self.slots:
            first, last = max(low, slot.start), min(high, slot.start + slot.numel)
            if first < last:
                at = slice(first, last)
                grad = self.result(first, last)
                found.append(ShardPiece(slot, first - slot.start, last - slot.start, self.params[at], grad))
        return found
