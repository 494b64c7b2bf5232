"""Queues of the simulated device's streams, and the order in which what they hold runs."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from simulated_accelerator import memory

__all__ = ["DeviceError", "Launch", "Marker", "Queue", "Queues", "Waiting"]

IDLE_SECONDS = 0.0002  # between two looks at collectives under way
STALLED_SECONDS = 60.0


class DeviceError(RuntimeError):
    """An operation failed on the simulated device, after the call that queued it had returned."""


class Launch:
    """A call that a stream carries out."""

    __slots__ = ("args", "call", "kwargs", "site")

    def __init__(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], site: str
    ) -> None:
        self.call, self.args, self.kwargs, self.site = call, args, kwargs, site

    def ready(self) -> bool:
        """Return True: only what is before it in its stream holds it up."""
        return True

    def run(self) -> None:
        """Make the call."""
        self.call(*self.args, **self.kwargs)


class Marker:
    """A point in a stream's queue, done once the stream has passed it.

    Attributes:
        step: number of the simulator's step in which it was queued.
    """

    __slots__ = ("done", "site", "step")

    def __init__(self, step: int) -> None:
        self.done, self.step, self.site = False, step, ""

    def ready(self) -> bool:
        """Return True: only what is before it in its stream holds it up."""
        return True

    def run(self) -> None:
        """Mark the point as passed."""
        self.done = True


class Waiting:
    """Holds a stream until `condition` is met: a marker of another stream passed, a collective over."""

    __slots__ = ("external", "ready", "site")

    def __init__(self, condition: Callable[[], bool], external: bool = False) -> None:
        self.ready, self.external, self.site = condition, external, ""

    def run(self) -> None:
        """Do nothing: the wait is over."""


class Queue:
    """What one stream still has to do, in order."""

    __slots__ = ("entries", "last", "number", "weight")

    def __init__(self, number: int, weight: float) -> None:
        self.number, self.weight, self.last = number, weight, False
        self.entries: deque[Any] = deque()


class Queues:
    """The queues of all streams.

    What is queued runs at random ticks, at each of which some entries run, and while the host waits: in any order
    that keeps each stream's own and the waits between streams. Everything random comes from the seed: how often there
    are ticks, how long they are, and how fast each stream is compared with the others.

    Args:
        seed: of the order.
        late: False runs everything at the call.
    """

    def __init__(self, seed: int, late: bool) -> None:
        self.random = random.Random(seed)
        self.late = late
        self.lock = threading.RLock()
        self.all: dict[int, Queue] = {}
        self.step = 0
        self.failure: DeviceError | None = None
        self._tick_rate = self.random.choice((0.0, 0.02, 0.1, 0.4))
        self._tick_length = self.random.choice((1, 3, 10))
        self._busy: dict[int, Queue] = {}
        self._running = False
        self.queue(0)

    def queue(self, number: int) -> Queue:
        """Return the queue of stream `number`, made when first asked for."""
        found = self.all.get(number)
        if found is None:
            found = self.all[number] = Queue(number, 10 ** self.random.uniform(-2, 0))
        return found

    def run_last(self, number: int) -> None:
        """Let stream `number` run only while the host waits and nothing else can run."""
        self.queue(number).last = True

    def put(self, number: int, entry: Any) -> None:
        """Queue `entry` on stream `number`."""
        with self.lock:
            if memory.freed:
                self.collect_freed()
            self._append(number, entry)
            if self._running:
                return
            if not self.late:
                self._run(lambda: not self._busy, idle=False)
            elif self._tick_rate and self.random.random() < self._tick_rate:
                self._tick(self.random.randint(1, self._tick_length))

    def _append(self, number: int, entry: Any) -> None:
        queue = self.queue(number)
        queue.entries.append(entry)
        self._busy[number] = queue

    def mark(self, number: int) -> Marker:
        """Return a marker queued on stream `number`; it is passed already if the stream is idle."""
        marker = Marker(self.step)
        with self.lock:
            if memory.freed:
                self.collect_freed()
            if number in self._busy:
                self._append(number, marker)
            else:
                marker.done = True
        return marker

    def wait_for(self, number: int, marker: Marker) -> None:
        """Let stream `number` wait until `marker` is passed."""
        if not marker.done:
            self.put(number, Waiting(lambda: marker.done))

    def idle(self, number: int) -> bool:
        """Return whether stream `number` has nothing left to do."""
        return number not in self._busy

    def only_busy(self, number: int) -> bool:
        """Return whether no other stream than `number` has anything to do."""
        return not self._busy or (len(self._busy) == 1 and number in self._busy)

    def collect_freed(self) -> None:
        """Queue the poison of storages that died on the host, as a caching allocator would hand them out again."""
        with self.lock:
            while memory.freed:
                allocation = memory.release(memory.freed.popleft())
                streams = [number for number in allocation.used_on if number in self._busy]
                if not streams and self.only_busy(allocation.stream):
                    continue  # whoever could still read it does so before
                for number in streams:
                    marker = Marker(self.step)
                    self._append(number, marker)
                    self._append(allocation.stream, Waiting(lambda marker=marker: marker.done))
                self._append(allocation.stream, Launch(memory.poison, (allocation.twin,), {}, "freed memory"))

    def look(self) -> None:
        """Let time pass, as a poll of the host does."""
        with self.lock:
            if not self._running:
                self._tick(self.random.randint(1, 3))

    def finish(self, done: Callable[[], bool]) -> None:
        """Run until `done()`, as the host does when it waits, and raise what failed on the device.

        Raises:
            DeviceError: a queued operation failed.
        """
        with self.lock:
            self.collect_freed()
            self._run(done, idle=True)
            failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def everything_ran(self) -> bool:
        """Return whether no stream has anything to do."""
        return not self._busy and not memory.freed

    def _tick(self, length: int) -> None:
        left = length

        def over() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        self._run(over, idle=False, held_back=False)

    def _run(self, done: Callable[[], bool], idle: bool, held_back: bool = True) -> None:
        """Run entries until `done()`, or until none can run and `idle` is False."""
        if self._running:
            raise RuntimeError("an operation that the device carries out waits for the device")
        self._running = True
        deadline = 0.0
        try:
            with torch._C._AutoDispatchBelowAutograd():  # type: ignore[attr-defined]
                while not done():
                    queue = self._choose(held_back)
                    if queue is not None:
                        deadline = 0.0
                        self._run_entry(queue)
                        continue
                    if not idle:
                        return
                    deadline = self._stall(deadline)
        finally:
            self._running = False

    def _stall(self, deadline: float) -> float:
        now = time.monotonic()
        if not any(getattr(queue.entries[0], "external", False) for queue in self._busy.values()):
            raise RuntimeError(
                "deadlock: the host waits for streams of the simulated device that wait for each other"
            )
        if deadline and now > deadline:
            raise TimeoutError(f"no collective of the simulated device got further in {STALLED_SECONDS:g} s")
        time.sleep(IDLE_SECONDS)
        return deadline or now + STALLED_SECONDS

    def _choose(self, held_back: bool) -> Queue | None:
        """Return a stream whose first entry may run, None if there is none; one held back only if no other can."""
        can = [queue for queue in self._busy.values() if queue.entries[0].ready()]
        first = [queue for queue in can if not queue.last]
        if not first and held_back:
            first = can
        if len(first) < 2:
            return first[0] if first else None
        return self.random.choices(first, [queue.weight for queue in first])[0]

    def _run_entry(self, queue: Queue) -> None:
        entry = queue.entries.popleft()
        if not queue.entries:
            del self._busy[queue.number]
        try:
            entry.run()
        except Exception as error:  # noqa: BLE001 — it surfaces where the host waits next, as on a device
            if self.failure is None:
                name = getattr(entry, "call", entry)
                self.failure = DeviceError(f"{name} queued at {entry.site} failed on the device: {error}")
                self.failure.__cause__ = error

    def abandon(self) -> None:
        """Forget what is left, at the end of a simulation that failed."""
        with self.lock:
            for queue in self.all.values():
                queue.entries.clear()
            self._busy.clear()
