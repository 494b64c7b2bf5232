"""Where the host waited for the simulated device."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HostWait"]


@dataclass(frozen=True)
class HostWait:
    """A place where the host waits for the device, or would on CUDA.

    Attributes:
        kind: "item", "copy to host", "copy to device", "pageable copy", "data-dependent shape", "event", "stream" or
            "device"; a "pageable copy" is staged by the driver, so the host waits for its memory alone.
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
