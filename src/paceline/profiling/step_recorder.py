"""Gathers what a rank does in a step, and writes it as one line of the trace.

All code that sets `paceline._core.step_state` reports to the recorder too, while there is one; the engine adds when
each bucket was ready, launched and done. All times are those of the host. A line reads, shortened::

    {"name": "step", "start": 1760000000.123456, "seconds": 0.0421, "rank": 0, "step": 7,
     "phases": [["forward", 0], ["outside", 9120], ["backward", 9340], ["exchange", 33010], …],
     "waits": [[2, 33080, 36920], …], "tasks": [["checkpoint", 40100, 41870]],
     "calls": [["reduce", 0, 5242880, 5242880, 15020, 15080, 15210, 24410, 33090], …],
     "samples": 16.0, "cpu": 0.0391, "preempted": 3, "quiet": false}

Times in lists are microseconds since `start`.

    phases     [name, begin]; each lasts until the next one, the last one until the line ends, where the next step's
               forward begins
    waits      [bucket, begin, end]; −1: not for a bucket
    calls      [kind, bucket, bytes, sent, ready, launched, posted, done, seen]: the bytes of its buffer, and those that
               this rank sends for it; when the last gradient was ready (null: not known, or a call without gradients),
               when this rank began and ended to launch it, when it was done (null: not reported), and when this rank
               saw that
    samples    behind this rank's gradient; 0 if they are not counted
    cpu        processor seconds of all threads of this process
    preempted  how often the system took a processor from one of them

Time before a rank's first step and after its last one is not recorded.

[Note: quiet steps] Communication that is hidden behind backward still slows it where both share processors, caches or
memory, and no clock shows by how much. So in a few steps, marked as quiet, nothing is launched before backward has
ended, which shows the duration of backward alone. All ranks have the same quiet steps, and results are the same to the
bit.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.profiling import trace_file

__all__ = ["RecordedEngine", "StepRecorder", "is_quiet"]

_QUIET_EVERY = 128
_BEGIN = frozenset({"forward", "backward", "exchange"})


class RecordedEngine(Protocol):
    """The engine of the model whose steps are recorded."""

    @property
    def step(self) -> int: ...

    @property
    def comm(self) -> object: ...


class StepRecorder:
    """Gathers the present step, and writes it when the next one begins.

    Args:
        rounds: the engine whose steps these are. Phases and waits of other models in this process are part of these
            steps; their calls are not recorded.

    Attributes:
        quiet: nothing is to be launched before backward has ended; see [Note: quiet steps].
        samples: behind this rank's gradient.
        waited_seconds: of all waits since it was created.
    """

    __slots__ = (
        "_calls",
        "_cpu",
        "_in_flight",
        "_open",
        "_phases",
        "_plan",
        "_preempted",
        "_rounds",
        "_start",
        "_step",
        "_tasks",
        "_waits",
        "quiet",
        "samples",
        "waited_seconds",
    )

    def __init__(self, rounds: RecordedEngine) -> None:
        self._rounds = rounds
        self._plan: object = None
        self._open = False
        self.waited_seconds = 0.0
        self._begin(0, 0.0)

    def _begin(self, step: int, start: float) -> None:
        self._step, self._start, self.samples = step, start, 0.0
        self.quiet = is_quiet(step)
        self._cpu, self._preempted = _usage()
        self._phases: list[tuple[str, float]] = []
        self._waits: list[tuple[int, float, float]] = []
        self._tasks: list[tuple[str, float, float]] = []
        self._calls: list[list[object]] = []
        self._in_flight: dict[tuple[str, int], list[object]] = {}

    # ------------------------------------------------------------------ called by `step_state`

    def records(self, comm: object) -> bool:
        """Return whether `comm` is that of the recorded model."""
        return self._rounds.comm is comm

    def phase(self, phase: str, now: float) -> None:
        """Begin a phase; forward, backward and exchange of the next round begin its step."""
        if not self._open or (phase in _BEGIN and self._rounds.step != self._step):
            self.flush(now)
            self._begin(self._rounds.step, now)
            self._open = True
        if not self._phases or self._phases[-1][0] != phase:
            self._phases.append((phase, now))

    def waited(self, bucket: int, since: float, until: float) -> None:
        """Record a wait for other ranks; `bucket` −1: not for a bucket."""
        self._waits.append((bucket, since, until))
        self.waited_seconds += until - since

    def task_ended(self, task: str, since: float, until: float) -> None:
        """Record a task outside the phases, such as ``"checkpoint"``."""
        self._tasks.append((task, since, until))

    # ------------------------------------------------------------------ called by the engine

    def planned(self, buckets: Sequence[object], describe: Callable[[], dict[str, object]]) -> None:
        """Write what `describe` returns of the buckets, if they are not those of the previous call."""
        if buckets is not self._plan:
            self._plan = buckets
            trace_file.mark("plan", **describe())

    def launched(
        self, kind: str, bucket: int, nbytes: float, sent: float, ready: float | None, since: float
    ) -> None:
        """Record a call that was launched from `since` until now.

        Args:
            kind: ``"reduce"`` or ``"gather"``.
            bucket: in launch order.
            nbytes: size of its buffer.
            sent: bytes to other ranks, as `paceline.parallel.engine.launch_queue.SyncTimings` counts them.
            ready: when its last gradient was ready, in seconds of ``time.perf_counter()``; None: not known.
            since: when launching began, likewise.
        """
        now = time.perf_counter()
        call: list[object] = [kind, bucket, round(nbytes), round(sent), ready, since, now, None, None]
        self._calls.append(call)
        self._in_flight[kind, bucket] = call

    def completed(self, kind: str, bucket: int, done: float | None, seen: float) -> None:
        """Record when a call was done (None: not known), and when this rank saw that."""
        call = self._in_flight.pop((kind, bucket), None)
        if call is not None:
            call[-2:] = [done, seen]

    # ------------------------------------------------------------------ the line

    def flush(self, now: float | None = None) -> None:
        """Write the present step, if there is one, which ends `now`."""
        if not self._open:
            return
        self._open = False
        start, end = self._start, time.perf_counter() if now is None else now
        cpu, preempted = _usage()

        def at(moment: object) -> int | None:
            return round((moment - start) * 1e6) if isinstance(moment, float) else None

        trace_file.add(
            "step",
            start,
            end - start,
            step=self._step,
            phases=[(phase, at(since)) for phase, since in self._phases],
            waits=[(bucket, at(since), at(until)) for bucket, since, until in self._waits],
            tasks=[(task, at(since), at(until)) for task, since, until in self._tasks],
            calls=[[*call[:4], *map(at, call[4:])] for call in self._calls],
            samples=self.samples,
            cpu=round(cpu - self._cpu, 6),
            preempted=preempted - self._preempted,
            quiet=self.quiet,
        )


def is_quiet(step: int) -> bool:
    """Return whether a step is quiet: some at the beginning, then one of 128.

    Example:
        >>> [step for step in range(200) if is_quiet(step)]
        [2, 4, 8, 16, 32, 64, 128]
    """
    return step > 1 and (step & (step - 1) == 0 if step < _QUIET_EVERY else step % _QUIET_EVERY == 0)


def _usage() -> tuple[float, int]:
    """Return this process's processor seconds so far, and how often it was preempted."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_nivcsw
