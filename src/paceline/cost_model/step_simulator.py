"""When what happens on a rank that computes, launches calls and waits for them (pure).

A rank's *program* is a list of `Compute`, `Launch` and `Wait`, one after another; calls run beside it.
`simulate_step` finds the
seconds at which each begins and ends. All ranks are taken to do the same at the same time, so one stands for all.

[Note: two clocks] Ranks often share cores with what carries their messages. While a call is under way, computing goes
`computing_slows` times slower; while the rank computes, calls go `calls_slow` times slower. So computing and calls
have a clock each, and an event on either one changes how fast the other goes.

[Note: lanes and gaps] Calls start in the order in which they were launched. At most `lanes` of them are under way,
and the next one starts a *gap* after the one before, the time in which that one keeps what they share to itself: the
latency of a call may be hidden behind another, its bytes can't be. (o, L, g and G of LogGP: Alexandrov et al., SPAA
1995.) One lane is a queue.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.errors import UsageError

__all__ = ["Call", "Compute", "Launch", "SimulatedStep", "Wait", "simulate_step"]


@dataclass(frozen=True)
class Compute:
    """Computing that takes so many `seconds` while no call is under way."""

    seconds: float
    phase: str = ""


@dataclass(frozen=True)
class Launch:
    """A call handed over to what carries it.

    Attributes:
        key: names the call; `Wait` refers to it.
        seconds: that it takes while the rank does nothing else and no other call is under way.
        gap: seconds from its start until the next call can start; at most `seconds`.
        host: seconds for which the rank itself is busy with launching it.
        nbytes: what it moves, for the record.
    """

    key: int
    seconds: float
    gap: float = math.inf
    host: float = 0.0
    nbytes: float = 0.0
    phase: str = ""


@dataclass(frozen=True)
class Wait:
    """Standing still until call `key` has ended."""

    key: int
    phase: str = ""


@dataclass(frozen=True)
class Call:
    """When a call was launched, started and ended, in seconds since the program began."""

    key: int
    nbytes: float
    launched: float
    started: float
    ended: float


@dataclass(frozen=True)
class SimulatedStep:
    """What `simulate_step` found.

    Attributes:
        calls: in the order of their launch.
        spans: seconds at which each step of the program began and ended.
        end: of the program.
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
    """Return when each step of a program and each of its calls begins and ends.

    Args:
        program: what the rank does; keys of calls differ.
        lanes: calls that can be under way at once, 1 or more; ``math.inf``: all of them.
        computing_slows: how many times longer computing takes while a call is under way, 1 or more.
        calls_slow: how many times longer calls take while the rank computes, 1 or more.

    Raises:
        UsageError: a value is out of range, or a call is waited for that was not launched.

    Example:
        >>> program = [Compute(1.0), Launch(0, seconds=2.0), Compute(1.0), Launch(1, seconds=2.0), Wait(0), Wait(1)]
        >>> simulate_step(program).end, simulate_step(program, lanes=2).end
        (5.0, 5.0)
    """
    for name, value in (("lanes", lanes), ("computing_slows", computing_slows), ("calls_slow", calls_slow)):
        if not value >= 1:
            raise UsageError(f"{name}={value!r}", remedy="give a number of 1 or more")
    rank = _Rank(_Carried(lanes), computing_slows, calls_slow)
    spans = []
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


class _Carried:
    """Calls that wait or are under way, on a clock of their own."""

    def __init__(self, lanes: float) -> None:
        self.lanes = lanes
        self.clock = 0.0
        self.times: dict[int, list[float]] = {}  # launched, started, ended, on the rank's clock
        self._nbytes: dict[int, float] = {}
        self._waiting: deque[Launch] = deque()
        self._under_way: list[tuple[float, int]] = []  # (end on the clock, key), a heap
        self._free = 0.0  # on the clock, when the next call can start

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._under_way)

    def ended(self, key: int) -> bool:
        """Whether a call has ended."""
        return len(self.times[key]) == 3

    def launch(self, call: Launch, now: float) -> None:
        """Take a call over at second `now`."""
        if call.key in self.times:
            raise UsageError(f"two calls have the key {call.key}", remedy="give each its own")
        self.times[call.key], self._nbytes[call.key] = [now], call.nbytes
        self._waiting.append(call)
        self.reach(self.clock, now)

    def next_event(self) -> float:
        """Return the time on the clock at which a call ends or starts; infinite if none does."""
        end = self._under_way[0][0] if self._under_way else math.inf
        can_start = self._waiting and len(self._under_way) < self.lanes
        return min(end, max(self._free, self.clock)) if can_start else end

    def reach(self, clock: float, now: float) -> None:
        """Go on to a time on the clock, which is second `now`: end and start the calls whose time has come."""
        self.clock = clock
        self._end_calls(now)
        while self._waiting and len(self._under_way) < self.lanes and self._free <= clock:
            call = self._waiting.popleft()
            self.times[call.key].append(now)
            self._free = clock + min(call.gap, call.seconds)
            heapq.heappush(self._under_way, (clock + call.seconds, call.key))
            self._end_calls(now)  # a call may take no time

    def _end_calls(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= self.clock:
            self.times[heapq.heappop(self._under_way)[1]].append(now)

    def record(self) -> tuple[Call, ...]:
        """Return all calls, which have ended."""
        return tuple(Call(key, self._nbytes[key], *times) for key, times in self.times.items())


class _Rank:
    """One rank's second, and the calls beside it."""

    def __init__(self, calls: _Carried, computing_slows: float, calls_slow: float) -> None:
        self.calls, self._computing_slows, self._calls_slow = calls, computing_slows, calls_slow
        self.now = 0.0

    def compute(self, seconds: float) -> None:
        """Compute for so long; see [Note: two clocks]."""
        left = seconds
        while left > 0.0:
            slowed = self._computing_slows if self.calls.busy else 1.0
            event = (self.calls.next_event() - self.calls.clock) * self._calls_slow
            if event < left * slowed:
                left = max(0.0, left - event / slowed)
                self._to(self.calls.next_event(), event)
            else:
                self._to(self.calls.clock + left * slowed / self._calls_slow, left * slowed)
                left = 0.0

    def wait(self, key: int) -> None:
        """Stand still until a call has ended."""
        if key not in self.calls.times:
            raise UsageError(f"call {key} is waited for but was not launched", remedy="launch it first")
        while not self.calls.ended(key):
            self._next()

    def drain(self) -> None:
        """Let the calls end that nobody waits for; the rank's own end stays where it is."""
        end = self.now
        while self.calls.next_event() < math.inf:
            self._next()
        self.now = end

    def _next(self) -> None:
        event = self.calls.next_event()
        self._to(event, event - self.calls.clock)

    def _to(self, clock: float, seconds: float) -> None:
        self.now += seconds
        self.calls.reach(clock, self.now)
