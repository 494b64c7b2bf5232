"""The simulator: state of the device, and what the host waited for."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

from simulated_accelerator import memory
from simulated_accelerator.call_sites import paceline_site
from simulated_accelerator.host_waits import HostWait
from simulated_accelerator.queues import DeviceError, Marker, Queues

__all__ = ["Simulator", "active", "enter", "is_active", "leave"]


class Simulator:
    """One simulated device.

    Attributes:
        synchronisations: each place where the host waited, in order.
        phase: a label for `synchronisations`, set by the test.
        queues: the streams' queues.
    """

    def __init__(self, seed: int = 0, late: bool = True) -> None:
        self.seed = seed
        self.queues = Queues(seed, late)
        self.synchronisations: list[HostWait] = []
        self.phase = ""
        self.random_seeds = 0  # given out to random operations

    @property
    def step(self) -> int:
        """The number of steps begun with `next_step`."""
        return self.queues.step

    def next_step(self) -> None:
        """Begin the next step of the program."""
        self.queues.step += 1

    def restart(self, seed: int, *, late: bool = True, hold_back: int | None = None) -> None:
        """Run all that is queued, then begin another order of execution; process groups stay.

        Args:
            seed: of the order.
            late: False runs everything at the call.
            hold_back: number of a stream, in the order of their use, to treat as `hold_back` does.
        """
        self.run_all()
        self.seed, self.random_seeds = seed, 0
        self.queues.restart(seed, late, hold_back)
        self.synchronisations.clear()

    def hold_back(self, stream: object) -> None:
        """Run `stream` only while the host waits and nothing else can run."""
        self.queues.run_last(stream.stream_id)  # type: ignore[attr-defined]

    def count(self, kind: str, age: int | None = None) -> None:
        """Note that the host waits here."""
        self.synchronisations.append(HostWait(kind, paceline_site(), self.step, self.phase, age))

    def wait(self, kind: str, done: Callable[[], bool], marker: Marker | None = None) -> None:
        """Count a wait of the host and let the device run until `done()`."""
        self.count(kind, None if marker is None else self.step - marker.step)
        self.queues.finish(done)

    def run_all(self) -> None:
        """Let the device run until nothing is left, without counting a wait.

        Raises:
            DeviceError: a queued operation failed.
        """
        self.queues.finish(self.queues.everything_ran)

    @contextlib.contextmanager
    def keeping_failures(self) -> Iterator[list[DeviceError]]:
        """Go on where the device failed, so that ranks stay in step; at the end, all that is queued runs.

        Yields:
            a list to which failures of the device are appended.
        """
        found: list[DeviceError] = []
        self.queues.kept_failures = found
        try:
            yield found
            self.run_all()
        finally:
            self.queues.kept_failures = None

    def live_bytes(self) -> int:
        """Return the bytes of all storages allocated in this simulation that are still referenced."""
        gc.collect()
        self.queues.collect_freed()
        return sum(a.twin.nbytes for a in list(memory.live.values()) if a.owner is self)


_idle = Simulator(late=False)  # tensors that outlive their simulation
_active = _idle
_entering = threading.Lock()


def active() -> Simulator:
    """Return the simulator that runs now; between simulations, one that runs everything at the call."""
    return _active


def is_active() -> bool:
    """Return whether a test is inside `simulated_device`."""
    return _active is not _idle


def enter(simulator: Simulator) -> None:
    """Make `simulator` the one that runs.

    Raises:
        RuntimeError: there is another one.
    """
    global _active
    with _entering:
        if is_active():
            raise RuntimeError("there is a simulated device already; leave its context first")
        _active = simulator


def leave(simulator: Simulator) -> None:
    """End `simulator`."""
    global _active
    _active = _idle
    simulator.queues.end()
