"""Event simulation of a rank that computes, launches calls and waits for them.

A rank's *program* is a sequence of `Compute`, `Launch` and `Wait`; calls run concurrently with it. `simulate_step`
returns when each step and call begins and ends. All ranks are assumed to do the same at the same time, so one stands
for all.

[Note: two clocks] Ranks often share cores with what carries their messages. While a call runs, computing is
`computing_slows` times slower; while the rank computes, calls are `calls_slow` times slower. So computing and calls
have one clock each, and an event on either changes the speed of the other.

[Note: lanes and gaps] Calls start in the order of their launch. At most `lanes` of them run at once, and the next one
starts a *gap* after the one before, the time in which that one occupies the shared link: another call can hide its
latency but not its bytes. (o, L, g and G of LogGP: Alexandrov et al., SPAA 1995.) One lane is a queue.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

from paceline.errors import UsageError

__all__ = ["Call", "Compute", "Launch", "SimulatedStep", "Wait", "simulate_step"]


@dataclass(frozen=True)
class Compute:
    """Computing that takes `seconds` while no call runs."""

    seconds: float
    phase: str = ""


@dataclass(frozen=True)
class Launch:
    """Launch of a call.

    Attributes:
        key: identifies the call for `Wait`.
        seconds: duration of the call if the rank is idle and no other call runs.
        gap: seconds from its start until the next call can start; at most `seconds`.
        host: seconds for which the launch occupies the rank.
        nbytes: size of the message, for the record.
        phase: whose time it is, for the record.
    """

    key: int
    seconds: float
    gap: float = math.inf
    _: KW_ONLY
    host: float = 0.0
    nbytes: float = 0.0
    phase: str = ""


@dataclass(frozen=True)
class Wait:
    """Idle until call `key` has ended."""

    key: int
    phase: str = ""


@dataclass(frozen=True)
class Call:
    """Times of a call in seconds since the program began."""

    key: int
    nbytes: float
    launched: float
    started: float
    ended: float


@dataclass(frozen=True)
class SimulatedStep:
    """Timeline of a program.

    Attributes:
        calls: in launch order.
        spans: begin and end of each step of the program, in seconds.
    """

    calls: tuple[Call, ...]
    spans: tuple[tuple[float, float], ...]

    @property
    def end(self) -> float:
        """Seconds at which the program ends."""
        return self.spans[-1][1] if self.spans else 0.0


def simulate_step(
    program: Iterable[Compute | Launch | Wait],
    *,
    lanes: float = 1,
    computing_slows: float = 1.0,
    calls_slow: float = 1.0,
) -> SimulatedStep:
    """Simulate a program and its calls.

    Args:
        program: steps of the rank; the keys of calls differ.
        lanes: limit of concurrent calls, 1 or more; ``math.inf``: none.
        computing_slows: factor by which computing is slower while a call runs, 1 or more.
        calls_slow: factor by which calls are slower while the rank computes, 1 or more.

    Raises:
        UsageError: a value is out of range, a key is used twice, or a `Wait` has no earlier launch.

    Example:
        >>> program = [Compute(1.0), Launch(0, seconds=2.0), Compute(1.0), Launch(1, seconds=2.0), Wait(0), Wait(1)]
        >>> simulate_step(program).end, simulate_step(program, lanes=2).end
        (5.0, 5.0)
    """
    for name, value in (("lanes", lanes), ("computing_slows", computing_slows), ("calls_slow", calls_slow)):
        if not value >= 1:
            raise UsageError(f"{name}={value}", remedy="give 1 or more")
    rank, spans = _Rank(_CallQueue(lanes), computing_slows, calls_slow), []
    for step in program:
        began = rank.now
        match step:
            case Compute():
                rank.compute(step.seconds)
            case Launch():
                rank.compute(step.host)
                rank.calls.launch(step, rank.now)
            case Wait():
                rank.wait(step.key)
        spans.append((began, rank.now))
    rank.drain()
    return SimulatedStep(rank.calls.record(), tuple(spans))


class _CallQueue:
    """Pending and running calls, on a clock of their own."""

    def __init__(self, lanes: float) -> None:
        self.lanes = lanes
        self.clock = 0.0
        self.times: dict[int, list[float]] = {}  # launched, started, ended, on the rank's clock
        self._nbytes: dict[int, float] = {}
        self._pending: deque[Launch] = deque()
        self._running: list[tuple[float, int]] = []  # (end on the clock, key), a heap
        self._free = 0.0  # on the clock, when the next call can start

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def ended(self, key: int) -> bool:
        return len(self.times[key]) == 3

    def launch(self, call: Launch, now: float) -> None:
        if call.key in self.times:
            raise UsageError(f"two calls have the key {call.key}", remedy="give each call its own key")
        self.times[call.key], self._nbytes[call.key] = [now], call.nbytes
        self._pending.append(call)
        self.advance(self.clock, now)

    def next_event(self) -> float:
        """Return the time on the clock at which a call ends or starts; infinite if none does."""
        end = self._running[0][0] if self._running else math.inf
        can_start = self._pending and len(self._running) < self.lanes
        return min(end, max(self._free, self.clock)) if can_start else end

    def advance(self, clock: float, now: float) -> None:
        """Advance to a time on the clock, which is second `now` of the rank: end and start calls that are due."""
        self.clock = clock
        self._end_calls(now)
        while self._pending and len(self._running) < self.lanes and self._free <= clock:
            call = self._pending.popleft()
            self.times[call.key].append(now)
            self._free = clock + min(call.gap, call.seconds)
            heapq.heappush(self._running, (clock + call.seconds, call.key))
            self._end_calls(now)  # a call may take no time

    def _end_calls(self, now: float) -> None:
        while self._running and self._running[0][0] <= self.clock:
            self.times[heapq.heappop(self._running)[1]].append(now)

    def record(self) -> tuple[Call, ...]:
        """Return all calls, which have ended."""
        return tuple(Call(key, self._nbytes[key], *times) for key, times in self.times.items())


class _Rank:
    """Clock of the rank."""

    def __init__(self, calls: _CallQueue, computing_slows: float, calls_slow: float) -> None:
        self.calls, self._computing_slows, self._calls_slow = calls, computing_slows, calls_slow
        self.now = 0.0

    def compute(self, seconds: float) -> None:
        """Compute; see [Note: two clocks]."""
        left = seconds
        while left > 0.0:
            slowdown = self._computing_slows if self.calls.busy else 1.0
            event = (self.calls.next_event() - self.calls.clock) * self._calls_slow
            if event < left * slowdown:
                left = max(0.0, left - event / slowdown)
                self._advance(self.calls.next_event(), event)
            else:
                self._advance(self.calls.clock + left * slowdown / self._calls_slow, left * slowdown)
                left = 0.0

    def wait(self, key: int) -> None:
        if key not in self.calls.times:
            raise UsageError(f"call {key} is waited for but was not launched", remedy="launch it first")
        while not self.calls.ended(key):
            self._advance_to_event()

    def drain(self) -> None:
        """Let calls end that the program does not wait for; its own end stays."""
        end = self.now
        while self.calls.next_event() < math.inf:
            self._advance_to_event()
        self.now = end

    def _advance_to_event(self) -> None:
        event = self.calls.next_event()
        self._advance(event, event - self.calls.clock)

    def _advance(self, clock: float, seconds: float) -> None:
        self.now += seconds
        self.calls.advance(clock, self.now)
