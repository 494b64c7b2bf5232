"""What torch's CPU allocator gave out during a block of code, from its own reports.

The profiler is told of every allocation and every free of ``c10``'s CPU allocator, those inside kernels too
(c10/core/CPUAllocator.cpp, `ProfiledCPUMemoryReporter`). What the C library is asked for behind its back is not seen:
gloo's buffers, scratch memory of MKL. Blocks that were there before the profiler count neither then nor when
they are freed.

It is told by the thread that allocates or frees, if that thread is profiled; gloo's are not. Now and then one of them
is the last to let go of a message, soon after it was sent, and nobody reports that. So what no report has freed by the
end of the block, though no tensor has it any more, counts as freed with the report that follows its own;
`unreported_nbytes` says how much that is.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import FakeTensor

from paceline.tools.plan.memory.tensor_tracer import plain_tensors

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
        self.unreported_nbytes = 0

    def __enter__(self) -> Allocated:
        self._profile = torch.autograd.profiler.profile(profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        held = _addresses_of_tensors()
        self._profile.__exit__(*args)
        results = self._profile.kineto_results
        if results is not None:
            reports = [each for root in results.experimental_event_tree() for each in _reports(root)]
            reports.sort(key=lambda report: report.nanoseconds)
            silent = _never_freed(reports, held)
            self.unreported_nbytes = sum(reports[at].nbytes for at in silent)
            self.changes = _running(reports, silent)

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


def _addresses_of_tensors() -> set[int]:
    """Return where the memory of every tensor that Python can reach begins."""
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


def _never_freed(reports: Sequence[_Report], held: set[int]) -> set[int]:
    """Return which allocations no report ends though nobody holds them, or their address was given out again."""
    latest: dict[int, int] = {}
    found: set[int] = set()
    for at, report in enumerate(reports):
        before = latest.pop(report.address, None)
        if report.nbytes > 0:
            latest[report.address] = at
            found |= set() if before is None else {before}
    return found | {at for address, at in latest.items() if address not in held}


def _running(reports: Sequence[_Report], silent: set[int]) -> list[Allocation]:
    """Return the changes in order with what is held after each; `silent` blocks are gone with the next report."""
    held, gone, found = 0, 0, list[Allocation]()
    known: set[int] = set()
    for at, report in enumerate(reports):
        held, gone = held - gone, 0
        if report.nbytes > 0:
            held += report.nbytes
            gone = report.nbytes if at in silent else 0
            known.add(report.address) if not gone else known.discard(report.address)
        elif report.address in known:
            known.remove(report.address)
            held += report.nbytes
        found.append(Allocation(report.nbytes, held, report.operators))
    return found
