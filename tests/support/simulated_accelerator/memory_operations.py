"""Operations of the simulated device that allocate, copy and resize memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simulated_accelerator import memory
from simulated_accelerator import simulator as simulation
from simulated_accelerator.call_sites import call_site, is_called_by_python
from simulated_accelerator.host_memory import is_pinned, pin
from simulated_accelerator.memory import twin_of
from simulated_accelerator.queues import Launch
from simulated_accelerator.streams import current_number, engine_pass

__all__ = ["CPU_KEYS", "MEMORY_OPERATIONS", "allocate", "resize_"]

aten = torch.ops.aten
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # type: ignore[attr-defined]


def allocate(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, memory.Allocation]:
    """Return a new tensor of the device; its memory is poisoned in the order of the current stream."""
    now, number = simulation.active(), current_number()
    now.queues.hand_out(number)
    tensor, allocation = memory.new_tensor(size, stride, dtype, number, now)
    engine = engine_pass()
    if engine is not None:
        engine.own(allocation)
    if now.queues.only_busy(number) and len(now.queues.all) == 1:
        memory.poison(allocation.twin)
    else:
        now.queues.put(
            number, Launch(memory.poison, (allocation.twin,), {}, "fresh memory", (allocation.twin,))
        )
    return tensor, allocation


def empty_memory_format(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    memory_format: Any = None,
) -> Tensor:
    """Return uninitialised memory."""
    if memory_format in (None, torch.contiguous_format):
        stride = _contiguous(size)
    else:
        stride = torch.empty(size, memory_format=memory_format, device="meta").stride()
    return allocate(size, stride, dtype or torch.get_default_dtype())[0]


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """Return uninitialised memory of given strides."""
    return allocate(size, stride, dtype or torch.get_default_dtype())[0]


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy within the device, or from or to the host."""
    now, number = simulation.active(), current_number()
    queues, engine = now.queues, engine_pass()
    if engine is not None:
        engine.read(number, (source, target), is_called_by_python())
    if target.is_cpu:
        _copy_to_host(source, target, non_blocking)
    elif source.is_cpu:
        pinned = is_pinned(source)
        if not (pinned and non_blocking):
            now.count("pageable copy" if non_blocking else "copy to device")
        source = source.detach() if pinned else source.clone()
        twin = twin_of(target)
        queues.put(number, Launch(twin.copy_, (source,), {}, call_site(), (twin,)))
        if not non_blocking:
            marker = queues.mark(number)
            queues.finish(lambda: marker.done)
    else:
        twin = twin_of(target)
        queues.put(number, Launch(twin.copy_, (twin_of(source),), {}, call_site(), (twin,)))
    return target


def _copy_to_host(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    now, number = simulation.active(), current_number()
    target = target.detach()
    if non_blocking:
        if not is_pinned(target):
            now.count("pageable copy")
        memory.poison(target)
    now.queues.put(number, Launch(target.copy_, (twin_of(source),), {}, call_site()))
    if not non_blocking:
        marker = now.queues.mark(number)
        now.wait("copy to host", lambda: marker.done)


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy `source` into `target`; one of them is on the device."""
    return copy_from(source, target, non_blocking)


def to_copy(
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Tensor:
    """Return a copy of a tensor of the device."""
    preserved = memory_format in (None, torch.preserve_format)
    like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
    like = torch.empty_like(
        like, dtype=dtype, memory_format=torch.preserve_format if preserved else memory_format
    )
    target = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device or self.device)
    if non_blocking and target.is_cpu:
        pin(target)  # as for copies from CUDA
    return copy_from(self, target, non_blocking)


def record_stream(self: Tensor, stream: torch.Stream) -> None:
    """Let the memory of `self` be handed out again only after what is queued on `stream` when its storage dies."""
    memory.allocation_of(self).used_on.add(stream.stream_id)


def resize_(self: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Tensor:
    """Change the size of `self`; a storage that is too small is replaced."""
    stride = _contiguous(size)
    count = size[0] * stride[0] if size else 1
    old = twin_of(self)
    if count > self.untyped_storage().nbytes() // self.itemsize - self.storage_offset():
        grown = allocate(size, stride, self.dtype)[0]
        aten.set_.source_Tensor.redispatch(CPU_KEYS, self, grown)
        if old.numel():
            beginning = twin_of(self).view(-1)[: old.numel()]
            simulation.active().queues.put(
                current_number(), Launch(beginning.copy_, (old.reshape(-1),), {}, call_site())
            )
        return self
    return aten.as_strided_.default.redispatch(CPU_KEYS, self, size, stride, self.storage_offset())


def _contiguous(size: Sequence[int]) -> list[int]:
    stride = [1] * len(size)
    for place in range(len(size) - 2, -1, -1):
        stride[place] = stride[place + 1] * max(size[place + 1], 1)
    return stride


MEMORY_OPERATIONS = {
    "empty.memory_format": empty_memory_format,
    "empty_strided": empty_strided,
    "_copy_from": copy_from,
    "copy_": copy_,
    "_to_copy": to_copy,
    "record_stream": record_stream,
    "resize_": resize_,
}
