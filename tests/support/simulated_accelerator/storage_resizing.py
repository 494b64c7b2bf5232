"""Storages of the device that give back their memory without ending, as FSDP's between uses of a parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from simulated_accelerator import memory
from simulated_accelerator import simulator as simulation
from simulated_accelerator.queues import Launch
from simulated_accelerator.streams import current_number

__all__ = ["resizable_storages"]


@contextlib.contextmanager
def resizable_storages() -> Iterator[None]:
    """Let ``storage.resize_(0)`` poison the memory, and back to the size of before let it be the current stream's."""
    storage, given_back = torch.UntypedStorage, set[int]()
    original_resize, original_nbytes = storage.resize_, storage.nbytes

    def nbytes(self: torch.UntypedStorage) -> int:
        found = original_nbytes(self)
        gone = given_back and self.device.type == "sim" and self.data_ptr() in given_back
        return 0 if gone else found

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "sim":
            return original_resize(self, size)
        if size not in (0, original_nbytes(self)):
            raise RuntimeError(
                f"a storage of {original_nbytes(self)} bytes can have these or none here, not {size}"
            )
        queues, allocation = simulation.active().queues, memory.live[self.data_ptr()]
        if size == 0:
            given_back.add(allocation.pointer)
            with queues.lock:
                queues.take_back(allocation)
            twin = allocation.twin
            if allocation.stream == current_number():
                queues.put(allocation.stream, Launch(memory.poison, (twin,), {}, "freed memory", (twin,)))
        else:
            given_back.discard(allocation.pointer)
            allocation.stream, twin = current_number(), allocation.twin
            allocation.used_on.clear()
            queues.put(allocation.stream, Launch(memory.poison, (twin,), {}, "fresh memory", (twin,)))
        return self

    storage.resize_, storage.nbytes = resize_, nbytes  # type: ignore[method-assign]
    try:
        yield
    finally:
        storage.resize_, storage.nbytes = original_resize, original_nbytes  # type: ignore[method-assign]
