"""State of this process in its training step: step, phase, and whether it waits for other ranks.

Engine, optimizer, loader and checkpoints write it; whatever monitors the ranks reads it from another thread. A write
sets a few attributes and reads the clock, takes some hundred nanoseconds, and never blocks.

[Note: numbering] `step` is the number of the present round of synchronisation, counted from 0 as the engine's ``step``:
with one round per optimizer step, the number of updates made before. The optimizer's update and everything up to the
next forward belong to the step whose round they follow: the number changes with the next forward. (``paceline train``
and its log count from 1, and call this step ``step + 1``.)

    step k   forward → backward → exchange → optimizer → outside, data …   step k + 1   forward → …

`WaitCounters` connects the loader and the engine of a process. The engine counts the seconds in which this rank only
waited for others: in a synchronous step all ranks need the same time and the fast ones spend it waiting, so the loader
subtracts them to learn a rank's speed. The loader sets the number of samples of the latest batch: a batch without
samples must not count as if it were full. With virtual ranks it also sets which leaf the batch is of.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["PHASES", "Recorder", "StepState", "WaitCounters", "step_state", "wait_counters"]

PHASES = ("forward", "backward", "exchange", "optimizer", "outside", "data")
"""The phases of a step, in order; the loader fetches the next step's batch in the present one."""


class Recorder(Protocol):
    """Receives every phase, wait, task and call of the process while a timeline is recorded.

    `paceline.profiling.step_recorder` implements it.
    """

    quiet: bool
    samples: float

    def records(self, comm: object) -> bool: ...

    def phase(self, phase: str, now: float) -> None: ...

    def waited(self, bucket: int, since: float, until: float) -> None: ...

    def task_ended(self, task: str, since: float, until: float) -> None: ...

    def planned(self, buckets: Sequence[object], describe: Callable[[], dict[str, object]]) -> None: ...

    def launched(
        self, kind: str, bucket: int, nbytes: float, sent: float, ready: float | None, since: float
    ) -> None: ...

    def completed(self, kind: str, bucket: int, done: float | None, seen: float) -> None: ...

    def flush(self, now: float | None = None) -> None: ...


class StepState:
    """State of one process.

    Attributes:
        step: the present step, counted from 0; see [Note: numbering].
        phase: one of `PHASES`; ``"outside"`` is the user's code between the others.
        task: ``"eval"`` or ``"checkpoint"`` during one, whatever phases that passes through; else empty.
        bucket: the bucket that is waited for, in launch order; −1: none.
        waiting: whether this process only waits for other ranks.
        since: when phase, bucket or waiting changed last, in seconds of ``time.perf_counter()``.
        rounds: rounds of synchronisation that ended in this process, over all its models.
        busy_seconds: time of all those rounds that was not spent waiting.
        latest_busy_seconds: of the latest round.
        sees_waiting: whether these two are meaningful: the host's clock can't separate waiting from computing on a
            GPU, or inside FSDP2.
        recorder: receives all changes while a timeline is recorded.
    """

    __slots__ = (
        "_ended",
        "_waited",
        "bucket",
        "busy_seconds",
        "latest_busy_seconds",
        "phase",
        "recorder",
        "rounds",
        "sees_waiting",
        "since",
        "step",
        "task",
        "waiting",
    )

    def __init__(self) -> None:
        self.step, self.phase, self.task, self.bucket = 0, "outside", "", -1
        self.waiting, self.since = False, perf_counter()
        self.rounds, self.busy_seconds, self.latest_busy_seconds = 0, 0.0, 0.0
        self.sees_waiting = True
        self.recorder: Recorder | None = None
        self._ended, self._waited = 0.0, 0.0  # when the latest round ended, and seconds waited since

    def enter_phase(self, phase: str) -> None:
        """Begin a phase of the present step."""
        self.begin_phase(self.step, phase)

    def begin_phase(self, step: int, phase: str) -> None:
        """Begin a phase of step number `step`."""
        self.step = step
        self.phase = phase
        self.waiting = False
        self.since = now = perf_counter()
        if self.recorder is not None:
            self.recorder.phase(phase, now)

    def begin_wait(self, bucket: int = -1) -> None:
        """Begin to wait for other ranks."""
        self.bucket = bucket
        self.since = perf_counter()
        self.waiting = True

    def end_wait(self) -> None:
        """Stop waiting."""
        now = perf_counter()
        if self.waiting:
            self._waited += now - self.since
            if self.recorder is not None:
                self.recorder.waited(self.bucket, self.since, now)
        self.waiting = False
        self.bucket = -1
        self.since = now

    def recorder_of(self, comm: object) -> Recorder | None:
        """Return the recorder of the model with these ranks, None if its steps are not recorded."""
        return self.recorder if self.recorder is not None and self.recorder.records(comm) else None

    @contextmanager
    def waiting_for_peers(self, bucket: int = -1) -> Iterator[None]:
        """Wait for other ranks in this block; an exception leaves the state waiting, for the error's report."""
        self.begin_wait(bucket)
        yield
        self.end_wait()

    def end_round(self, *, sees_waiting: bool = True) -> None:
        """Count a round of synchronisation that has ended; the first one only starts the clock."""
        now = perf_counter()
        self.sees_waiting = sees_waiting
        if self._ended:
            self.latest_busy_seconds = max(0.0, now - self._ended - self._waited)
            self.busy_seconds += self.latest_busy_seconds
            self.rounds += 1
        self._ended, self._waited = now, 0.0

    @contextmanager
    def running_task(self, task: str) -> Iterator[None]:
        """Run a task such as ``"checkpoint"`` in this block; it ends also if the block raises.

        Example:
            >>> with step_state.running_task("checkpoint"):
            ...     step_state.task
            'checkpoint'
        """
        before, self.task = self.task, task
        self.since = started = perf_counter()
        try:
            yield
        finally:
            self.task = before
            self.since = perf_counter()
            if self.recorder is not None:
                self.recorder.task_ended(task, started, self.since)


step_state = StepState()
"""The state of this process."""


@dataclass
class WaitCounters:
    """Counters that the engine and the loader of a process share.

    Attributes:
        waited_seconds: time in which this rank waited for others, since the process began.
        waits: how often that was counted.
        samples: of the loader's batch in training; None: no loader is in use.
        leaf: with virtual ranks (their number, the one that this batch is of, and the seed of the random numbers that
            all ranks have in common after this step); None: without.
    """

    waited_seconds: float = 0.0
    waits: int = 0
    samples: float | None = None
    leaf: tuple[int, int, int] | None = None

    def add(self, seconds: float) -> None:
        """Count `seconds` in which this rank waited."""
        self.waited_seconds += seconds
        self.waits += 1


wait_counters = WaitCounters()
"""The counters of this process."""
