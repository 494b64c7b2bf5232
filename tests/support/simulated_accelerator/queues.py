"""Queues of the simulated device's streams, and the order in which what they hold runs."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simulated_accelerator import memory

__all__ = ["DeviceError", "Launch", "Marker", "Queue", "Queues", "Waiting"]

BACKGROUND_SECONDS = 0.05  # the host stands still if it queues nothing for that long
IDLE_SECONDS = 0.0002  # between two looks at collectives under way
STALLED_SECONDS = 60.0


class DeviceError(RuntimeError):
    """An operation failed on the simulated device, after the call that queued it had returned."""


class Launch:
    """A call that a stream carries out.

    Args:
        call: what to call.
        args: its arguments.
        kwargs: its named arguments.
        site: line of the program.
        writes: memory that it writes and others may use.
    """

    __slots__ = ("args", "call", "kwargs", "site", "writes")

    def __init__(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        site: str,
        writes: Sequence[Tensor] = (),
    ) -> None:
        self.call, self.args, self.kwargs, self.site, self.writes = call, args, kwargs, site, writes

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

    Attributes:
        under_way: for each collective that has started and not ended, its call and memory that nobody else may write.
    """

    def __init__(self, seed: int, late: bool) -> None:
        self.lock = threading.RLock()
        self.under_way: dict[object, tuple[str, Sequence[Tensor]]] = {}
        self.step = 0
        self.failure: DeviceError | None = None
        self.kept_failures: list[DeviceError] | None = None
        self._busy: dict[int, Queue] = {}
        self._free: dict[int, list[tuple[Tensor, list[Marker]]]] = {}  # by stream
        self._running = False
        self._puts = self._puts_seen = 0
        self._background: threading.Thread | None = None
        self._ended = threading.Event()
        self.restart(seed, late)

    def restart(self, seed: int, late: bool = True, hold_back: int | None = None) -> None:
        """Begin another order, that of `seed`; nothing may be queued.

        Args:
            seed: of the order.
            late: False runs everything at the call.
            hold_back: let one stream run only while the host waits and nothing else can run: the n-th that is used,
                where the default stream is number 0.
        """
        with self.lock:
            self.random = random.Random(seed)
            self.late = late
            self.all: dict[int, Queue] = {}
            self._held_back = hold_back
            self._tick_rate = self.random.choice((0.0, 0.02, 0.1, 0.4))
            self._tick_length = self.random.choice((1, 3, 10))
            self.queue(0)

    def queue(self, number: int) -> Queue:
        """Return the queue of stream `number`, made when first asked for."""
        found = self.all.get(number)
        if found is None:
            found = Queue(number, 10 ** self.random.uniform(-2, 0))
            found.last = len(self.all) == self._held_back
            self.all[number] = found
        return found

    def run_last(self, number: int) -> None:
        """Let stream `number` run only while the host waits and nothing else can run."""
        self.queue(number).last = True

    def put(self, number: int, entry: Any) -> None:
        """Queue `entry` on stream `number`."""
        with self.lock:
            if memory.freed:
                self.collect_freed()
            self._puts += 1
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
        """Take back the memory of storages that died on the host."""
        with self.lock:
            while memory.freed:
                self.take_back(memory.release(memory.freed.popleft()))

    def take_back(self, allocation: memory.Allocation) -> None:
        """Keep memory for later allocations of its stream, as a caching allocator does.

        Streams named by ``record_stream`` have to get past where they are now first.
        """
        markers = []
        for number in allocation.used_on:
            if number in self._busy:
                markers.append(Marker(self.step))
                self._append(number, markers[-1])
        self._free.setdefault(allocation.stream, []).append((allocation.twin, markers))

    def hand_out(self, number: int) -> None:
        """Poison, in the order of stream `number`, all free memory that an allocation there now could return."""
        with self.lock:
            if memory.freed:
                self.collect_freed()
            free = self._free.pop(number, [])
            kept = [block for block in free if not all(marker.done for marker in block[1])]
            if kept:
                self._free[number] = kept
            if self.only_busy(number):
                return  # what could still read it is before
            for twin, markers in free:
                if all(marker.done for marker in markers):
                    self._append(number, Launch(memory.poison, (twin,), {}, "reused memory", (twin,)))

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
            if self.kept_failures is None:
                raise failure
            self.kept_failures.append(failure)

    def everything_ran(self) -> bool:
        """Return whether no stream has anything to do."""
        return not self._busy and not memory.freed

    def advance_in_background(self) -> None:
        """Let the device get on while the host stands still elsewhere, as in a collective of the CPU.

        Other ranks may wait for this one's device. The order stays legal, but depends on the time.
        """
        if self._background is None:
            self._background = threading.Thread(target=self._advance, name="simulated device", daemon=True)
            self._background.start()

    def _advance(self) -> None:
        while not self._ended.wait(BACKGROUND_SECONDS):
            seen, self._puts_seen = self._puts_seen, self._puts
            if seen == self._puts and self._busy and self.lock.acquire(blocking=False):
                try:
                    if not self._running:
                        self._run(lambda: False, idle=False)
                finally:
                    self.lock.release()

    def check_written(self, twins: Sequence[Tensor]) -> None:
        """Check that no collective under way uses memory that is to be written.

        Raises:
            RuntimeError: one does.
        """
        for twin in twins:
            start, end = memory.extent(twin)
            for call, used in self.under_way.values():
                if any(start < memory.extent(other)[1] and memory.extent(other)[0] < end for other in used):
                    raise RuntimeError(f"it writes to memory of {call}, which is under way")

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
            with torch._C._AutoDispatchBelowADInplaceOrView():  # type: ignore[attr-defined]
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
        if memory.freed:
            self.collect_freed()
            return deadline
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
            if self.under_way and isinstance(entry, Launch):
                self.check_written(entry.writes)
            entry.run()
        except Exception as error:  # noqa: BLE001 — it surfaces where the host waits next, as on a device
            if self.failure is None:
                self.failure = DeviceError(
                    f"{_name(entry)} queued at {entry.site} failed on the device: {error}"
                )
                self.failure.__cause__ = error

    def end(self) -> None:
        """End the simulation, and forget what is left of one that failed."""
        self._ended.set()
        if self._background is not None:
            self._background.join()
        with self.lock:
            for queue in self.all.values():
                queue.entries.clear()
            self._busy.clear()
            self._free.clear()


def _name(entry: Any) -> str:
    """Return what an entry does, for messages: an operator, or a collective."""
    call = getattr(entry, "call", entry)
    if call.__class__.__name__ == "function" and entry.args and not isinstance(entry.args[0], torch.Tensor):
        call = entry.args[0]  # runs another call
    owner = getattr(call, "__self__", None)
    return str(getattr(owner, "call", call))
