"""The most memory that a block of code needed, beyond what the process held before.

On CUDA the allocator tells. On the CPU it is resident memory: Linux keeps its peak (``VmHWM``) and forgets it
when 5 is written to ``/proc/self/clear_refs``. Where that is not allowed, the process's peak since it started
stands in, which is right as long as nothing before was larger: measure in a fresh process. What was freed before
is first handed back to the system (glibc), or the block would get it for nothing. The kernel notes a peak from
counts that lag by some pages on each core: 0.3 MiB were seen missing on two cores.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from paceline.parallel.engine.bucket_builder import return_freed_memory

__all__ = ["PeakMemory", "resident_nbytes"]

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures its block: afterwards `nbytes` is the peak inside of it less what was held before.

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
        if self._device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            return_freed_memory()
            forget_peak()
            self._before = resident_nbytes()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.startswith("cuda"):
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = peak_resident_nbytes()
        self.nbytes = max(0, peak - self._before)


def forget_peak() -> None:
    """Let the peak of resident memory begin anew, where the system allows it."""
    try:
        _FORGET.write_text("5")
    except OSError:
        return


def resident_nbytes() -> int:
    """Return the bytes of this process that are in memory now."""
    return _status("VmRSS")


def peak_resident_nbytes() -> int:
    """Return the most bytes of this process that were in memory at once since the peak was forgotten."""
    return _status("VmHWM")


def _status(field: str) -> int:
    """Return a field of ``/proc/self/status`` in bytes; without that file, the peak since the process started."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
