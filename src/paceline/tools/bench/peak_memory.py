"""Peak memory of a block of code: of the process, and as torch's CPU allocator reports it.

[Note: resident peak] On the CPU, Linux keeps the peak of a process's resident memory (``VmHWM``) and resets it when 5
is written to ``/proc/self/clear_refs``. Where that is not allowed, the peak since the process started stands in, which
is right if nothing before was larger: measure in a fresh process. Memory freed earlier is first returned to the system
(glibc, the arena), or the block could use it without a trace. The kernel's counts lag by some pages per core: 0.3 MiB
were found missing on two cores.

[Note: shared memory] Linux counts a page that several ranks map in each of them, so their sum is more than the machine
holds. Here it counts in the rank that allocated it. The kernel keeps no such peak: what is mapped of others when a
part of the block begins (`PeakMemory.begin_part`), and still at its end, is taken off the resident peak of that part.

[Note: reported allocations] The profiler records every allocation and free of ``c10``'s CPU allocator, those inside
kernels too (c10/core/CPUAllocator.cpp, `ProfiledCPUMemoryReporter`). Memory that libraries take from the C library
directly is not recorded: gloo's buffers, scratch memory of MKL. Blocks that existed before the profiler count neither
then nor when they are freed. The record is made by the thread that allocates or frees, if that thread is profiled;
gloo's are not. Occasionally one of them is the last to release a message, soon after it was sent, and that free is not
recorded. So a block that no record has freed by the end, although no tensor holds it, counts as freed with the record
after its own; `unreported_nbytes` says how much that is.
"""

from __future__ import annotations

import contextlib
import gc
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import FakeTensor

from paceline.backends.shm.shared_arena import arena, received_segments
from paceline.parallel.buckets.bucket_builder import return_freed_memory
from paceline.tools.plan.memory.tensor_tracer import plain_tensors

__all__ = ["CpuAllocations", "MemoryChange", "PeakMemory", "borrowed_nbytes", "resident_nbytes"]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MAPPINGS = Path("/proc/self/smaps")


class PeakMemory:
    """Measures its block: `nbytes` is the peak inside it less the memory before it; see [Note: resident peak] and
    [Note: shared memory].

    On an accelerator it is the peak of torch's caching allocator.

    Example:
        >>> with PeakMemory("cpu") as peak:
        ...     block = bytearray(2**26)
        >>> peak.nbytes > 0.99 * 2**26
        True
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.nbytes = 0

    def __enter__(self) -> PeakMemory:
        if self._device != "cpu":
            memory = torch.get_device_module(self._device)
            memory.reset_peak_memory_stats(self._device)
            self._before = memory.memory_allocated(self._device)
        else:
            return_freed_memory(torch.device("cpu"))
            arena.release_free_pages()
            borrowed = borrowed_nbytes()
            self._before = resident_nbytes() - borrowed
            self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device != "cpu":
            peak = torch.get_device_module(self._device).max_memory_allocated(self._device)
            self.nbytes = max(0, peak - self._before)
        else:
            self._end()

    def begin_part(self) -> None:
        """Begin the next part of the block, as before and after what maps memory of other ranks."""
        if self._device == "cpu":
            self._end()
            self._begin()

    def _begin(self) -> None:
        self._borrowed = borrowed_nbytes() if _reset_resident_peak() else 0

    def _end(self) -> None:
        borrowed = min(self._borrowed, borrowed_nbytes())
        self.nbytes = max(self.nbytes, _read_status("VmHWM") - borrowed - self._before)


def _reset_resident_peak() -> bool:
    """Reset the peak, and return whether that was possible."""
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True


def borrowed_nbytes() -> int:
    """Return the resident memory that this process shares with another rank, which allocated it."""
    starts = {segment.address for segment in received_segments}
    if not starts:
        return 0
    found, counts = 0, False
    with contextlib.suppress(OSError), _MAPPINGS.open() as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                counts = int(name.partition("-")[0], 16) in starts
            elif counts and name == "Rss:":
                found += int(rest.split()[0]) * 1024
    return found


def resident_nbytes() -> int:
    """Return the resident memory of this process."""
    return _read_status("VmRSS")


def _read_status(field: str) -> int:
    """Return a field of ``/proc/self/status`` in bytes; without that file, the peak since the process started."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class MemoryChange:
    """An allocation, or a free.

    Attributes:
        nbytes: of the block; negative if it was freed.
        held_nbytes: memory held afterwards.
        operators: those that were running, outermost first.
    """

    nbytes: int
    held_nbytes: int
    operators: tuple[str, ...]


class CpuAllocations:
    """Records the allocations of its block in `changes`; see [Note: reported allocations].

    Example:
        >>> with CpuAllocations() as allocated:
        ...     x = torch.zeros(256)
        >>> allocated.nbytes
        1024
    """

    def __init__(self) -> None:
        self.changes: list[MemoryChange] = []
        self.unreported_nbytes = 0

    def __enter__(self) -> CpuAllocations:
        self._profile = torch.autograd.profiler.profile(profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        live = _tensor_addresses()
        self._profile.__exit__(*args)
        results = self._profile.kineto_results
        if results is not None:
            records = [each for root in results.experimental_event_tree() for each in _records_below(root)]
            records.sort(key=lambda record: record.nanoseconds)
            unfreed = _unreported_frees(records, live)
            self.unreported_nbytes = sum(records[at].nbytes for at in unfreed)
            self.changes = _running_total(records, unfreed)

    @property
    def nbytes(self) -> int:
        """The peak."""
        return max((change.held_nbytes for change in self.changes), default=0)

    def at_peak(self) -> MemoryChange | None:
        """Return the allocation that reached the peak."""
        return max(self.changes, key=lambda change: change.held_nbytes, default=None)


@dataclass(frozen=True)
class _Record:
    nanoseconds: int
    nbytes: int
    address: int
    operators: tuple[str, ...]


def _records_below(root: Any) -> Iterator[_Record]:
    """Yield every allocation and free below an event; without recursion, as trees are deep."""
    pending: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while pending:
        event, operators = pending.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                yield _Record(event.start_time_ns, fields.alloc_size, fields.ptr, operators)
        else:
            operators = (*operators, event.name)
        pending += [(child, operators) for child in event.children]


def _tensor_addresses() -> set[int]:
    """Return the start of the memory of every tensor that Python can reach."""
    gc.collect()
    found: set[int] = set()
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):  # not isinstance: some objects compute their class
            found |= {
                plain.untyped_storage().data_ptr()
                for plain in plain_tensors(each)
                if not isinstance(plain, FakeTensor)
            }
    return found


def _unreported_frees(records: Sequence[_Record], live: set[int]) -> set[int]:
    """Return the indices of allocations without a free whose address is not live, or was allocated again."""
    latest: dict[int, int] = {}
    found: set[int] = set()
    for at, record in enumerate(records):
        before = latest.pop(record.address, None)
        if record.nbytes > 0:
            latest[record.address] = at
            found |= set() if before is None else {before}
    return found | {at for address, at in latest.items() if address not in live}


def _running_total(records: Sequence[_Record], unfreed: set[int]) -> list[MemoryChange]:
    """Return the changes in order with the memory held after each; `unfreed` blocks end with the next record."""
    held, ending, found = 0, 0, list[MemoryChange]()
    known: set[int] = set()
    for at, record in enumerate(records):
        held, ending = held - ending, 0
        if record.nbytes > 0:
            held += record.nbytes
            ending = record.nbytes if at in unfreed else 0
            known.add(record.address) if not ending else known.discard(record.address)
        elif record.address in known:
            known.remove(record.address)
            held += record.nbytes
        found.append(MemoryChange(record.nbytes, held, record.operators))
    return found
