"""What torch's CPU allocator gave out during a block of code, from its own reports.

The profiler is told of every allocation and every free of ``c10``'s CPU allocator, those inside kernels too
(c10/core/CPUAllocator.cpp, `ProfiledCPUMemoryReporter`). What the C library is asked for behind its back is not seen:
gloo's buffers, scratch memory of MKL. Blocks that were there before the profiler count neither then nor when
they are freed.

It is told by the thread that allocates, if that thread is profiled; gloo's are not. A tensor that is freed by one of
them, which happens to the last holder of a message, is missed until its address is given out again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType

__all__ = ["Allocated", "Allocation"]


@dataclass(frozen=True)
class Allocation:
    """One change: `nbytes` (negative: freed) inside `operators`, outermost first."""

    nbytes: int
    held_nbytes: int
    operators: tuple[str, ...]


class Allocated:
    """Measures its block: afterwards `nbytes` is the peak, `changes` every allocation and free.

    Example:
        >>> with Allocated() as allocated:
        ...     x = torch.zeros(256)
        >>> allocated.nbytes
        1024
    """

    def __init__(self) -> None:
        self.changes: list[Allocation] = []

    def __enter__(self) -> Allocated:
        self._profile = torch.autograd.profiler.profile(profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._profile.__exit__(*args)
        results = self._profile.kineto_results
        if results is not None:
            self.changes = _running(
                [report for root in results.experimental_event_tree() for report in _reports(root)]
            )

    @property
    def nbytes(self) -> int:
        """The most bytes that were held at once."""
        return max((change.held_nbytes for change in self.changes), default=0)

    def at_peak(self) -> Allocation | None:
        """Return the allocation that made the peak."""
        return max(self.changes, key=lambda change: change.held_nbytes, default=None)


@dataclass(frozen=True)
class _Report:
    nanoseconds: int
    nbytes: int
    address: int
    operators: tuple[str, ...]


def _reports(root: Any) -> list[_Report]:
    """Return every allocation and free below an event; not recursive, for trees are deep."""
    found: list[_Report] = []
    left: list[tuple[Any, tuple[str, ...]]] = [(root, ())]
    while left:
        event, inside = left.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == "cpu":
                found.append(_Report(event.start_time_ns, fields.alloc_size, fields.ptr, inside))
        else:
            inside = (*inside, event.name)
        left += [(child, inside) for child in event.children]
    return found


def _running(reports: list[_Report]) -> list[Allocation]:
    """Return the changes in order with what is held after each."""
    held, at_address, found = 0, dict[int, int](), list[Allocation]()
    for report in sorted(reports, key=lambda report: report.nanoseconds):
        held -= at_address.pop(
            report.address, 0
        )  # it was freed: now, or before by a thread that is not profiled
        if report.nbytes > 0:
            at_address[report.address] = report.nbytes
            held += report.nbytes
        found.append(Allocation(report.nbytes, held, report.operators))
    return found
