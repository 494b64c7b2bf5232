"""Where the host waited for the simulated device."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HostWait"]


@dataclass(frozen=True)
class HostWait:
    """A place where the host waits for the device, or would on CUDA.

    Attributes:
        kind: "item", "copy to host", "copy to device", "pageable copy", "data-dependent shape", "event", "stream" or
            "device" or "barrier"; a "pageable copy" does not block, but its memory of the host is not page-locked: CUDA
            stages it if it goes to the device, and waits if it comes from there.
        site: "file:line" of the innermost frame in src/paceline, or else of the caller.
        step: the step the test had reached.
        phase: what the test had set as phase.
        age: how many steps before the event waited for was recorded; None for other kinds.
    """

    kind: str
    site: str
    step: int
    phase: str
    age: int | None = None
