"""What a rank does in a step, gathered while it happens and written as one line of the trace.

Who says where this process is (`paceline._core.step_state`) says it to the recorder too, while there is one; the engine
adds when each bucket was ready, launched and done. All times are those of the host. A line reads, shortened::

    {"name": "step", "start": 1760000000.123456, "seconds": 0.0421, "rank": 0, "step": 7,
     "phases": [["forward", 0], ["outside", 9120], ["backward", 9340], ["exchange", 33010], …],
     "waits": [[2, 33080, 36920], …], "tasks": [["checkpoint", 40100, 41870]],
     "calls": [["reduce", 0, 5242880, 5242880, 15020, 15080, 15210, 24410, 33090], …],
     "samples": 16.0, "cpu": 0.0391, "preempted": 3, "quiet": false}

Times in lists are microseconds since the line's `start`. A phase lasts until the next one begins, the last one until
the line ends, where the next step's forward begins. A wait is ``[bucket, from, to]``, −1 for what is no bucket. A call
is ``[kind, bucket, bytes, sent, ready, launched, posted, done, seen]``: the bytes of its buffer and those that this
rank sends for it; when the last gradient was there (null: not known, or a call without gradients), when this rank began
and ended to launch it, when it was through (null: nobody told) and when this rank saw that. `samples` are those that
this rank's gradient stands for, 0 where nobody counts them; `cpu` is the processor time of all of this process's
threads, in seconds, and `preempted` how often the system took a processor away from one of them. What a rank did before
its first step and after its last one is no step.

[Note: quiet steps] Communication that is hidden behind backward slows it all the same where both share processors,
caches or memory, and no clock shows by how much. So in a few steps nothing is launched before backward has ended; they
are marked as quiet. How long backward takes there is what it takes by itself. All ranks have the same quiet steps, and
what they compute is the same to the bit.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.profiling import trace_file

__all__ = ["RecordedEngine", "StepRecorder", "is_quiet"]


class RecordedEngine(Protocol):
    """The engine of the model whose steps are recorded: the number of its round, and its ranks."""

    @property
    def step(self) -> int: ...

    @property
    def comm(self) -> object: ...


class StepRecorder:
    """Gathers the step that is under way, and writes it when the next one begins.

    Args:
        rounds: of the model whose steps these are. What other models of this process do is part of its steps: phases
            and waits count, calls are left out.

    Attributes:
        quiet: whether nothing is to be launched before backward has ended; see [Note: quiet steps].
        samples: that this rank's gradient stands for.
    """

    __slots__ = (
        "_calls",
        "_cpu",
        "_open",
        "_phases",
        "_plan",
        "_preempted",
        "_rounds",
        "_start",
        "_step",
        "_tasks",
        "_under_way",
        "_waits",
        "quiet",
        "samples",
    )

    def __init__(self, rounds: RecordedEngine) -> None:
        self._rounds = rounds
        self._plan: object = None
        self._open = False
        self._begin(0, 0.0)

    def _begin(self, step: int, start: float) -> None:
        self._step, self._start, self.samples = step, start, 0.0
        self.quiet = is_quiet(step)
        self._cpu, self._preempted = _used()
        self._phases: list[tuple[str, float]] = []
        self._waits: list[tuple[int, float, float]] = []
        self._tasks: list[tuple[str, float, float]] = []
        self._calls: list[list[object]] = []
        self._under_way: dict[tuple[str, int], list[object]] = {}

    # ------------------------------------------------------------------ what this process tells

    def records(self, comm: object) -> bool:
        """Tell whether these are the ranks of the model whose steps are recorded."""
        return self._rounds.comm is comm

    def phase(self, phase: str, now: float) -> None:
        """Begin a phase; with one of `_BEGIN` that the next round has begun with, its step."""
        if not self._open or (phase in _BEGIN and self._rounds.step != self._step):
            self.flush(now)
            self._begin(self._rounds.step, now)
            self._open = True
        if not self._phases or self._phases[-1][0] != phase:
            self._phases.append((phase, now))

    def waited(self, bucket: int, since: float, until: float) -> None:
        """Note that this process did nothing but wait for other ranks; `bucket` −1: for no bucket."""
        self._waits.append((bucket, since, until))

    def task_ended(self, task: str, since: float, until: float) -> None:
        """Note a task that took its own time, such as ``"checkpoint"``."""
        self._tasks.append((task, since, until))

    # ------------------------------------------------------------------ what the engine tells

    def planned(self, buckets: Sequence[object], describe: Callable[[], dict[str, object]]) -> None:
        """Write what the buckets are, where they changed; `describe` returns them."""
        if buckets is not self._plan:
            self._plan = buckets
            trace_file.mark("plan", **describe())

    def launched(
        self, kind: str, bucket: int, nbytes: float, sent: float, ready: float | None, since: float
    ) -> None:
        """Note a call that was launched from `since` until now.

        Args:
            kind: ``"reduce"`` or ``"gather"``.
            bucket: in launch order.
            nbytes: that were handed over. sent: of them, to other ranks, as in `paceline.parallel.engine.launch_queue`.
            ready: when its last gradient was there; None: not known.
            since: when launching began; all in seconds of ``time.perf_counter()``.
        """
        call: list[object] = [
            kind,
            bucket,
            round(nbytes),
            round(sent),
            ready,
            since,
            time.perf_counter(),
            None,
            None,
        ]
        self._calls.append(call)
        self._under_way[kind, bucket] = call

    def completed(self, kind: str, bucket: int, done: float | None, seen: float) -> None:
        """Note when a call was through, as far as anybody knows, and when this rank saw it."""
        call = self._under_way.pop((kind, bucket), None)
        if call is not None:
            call[-2:] = [done, seen]

    # ------------------------------------------------------------------ the line

    def flush(self, now: float | None = None) -> None:
        """Write the step that is under way, which ends `now`; nothing where there is none."""
        if not self._open:
            return
        self._open = False
        start, end = self._start, time.perf_counter() if now is None else now

        cpu, preempted = _used()

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
    """Return whether a step is one of the quiet ones: some at the beginning, then one of 128.

    Example:
        >>> [step for step in range(200) if is_quiet(step)]
        [2, 4, 8, 16, 32, 64, 128]
    """
    return step > 1 and (step & (step - 1) == 0 if step < _QUIET_EVERY else step % _QUIET_EVERY == 0)


_QUIET_EVERY = 128
_BEGIN = frozenset({"forward", "backward", "exchange"})


def _used() -> tuple[float, int]:
    """Return the processor seconds of this process so far, and how often it was preempted."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_nivcsw
