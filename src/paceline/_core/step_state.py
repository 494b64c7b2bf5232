"""What this process is doing: which step, which phase of it, and whether it waits for other ranks.

Engine, optimizer, loader and checkpoints write it, each for itself; who watches the ranks reads it, from another
thread. Writing is a few attributes and one look at the clock, some hundred nanoseconds, and never blocks.

[Note: numbering] `step` is the number of the round of synchronisation that is under way, counted from 0 as the
engine's own ``step``: with one round for each optimizer step, the number of updates made before. The optimizer's update
and everything up to the next forward still belong to the step whose round they follow: the number moves on with the
next forward. (``paceline train`` and its log count from 1, so they call this step ``step + 1``.)

    step k   forward → backward → exchange → optimizer → outside, data …   step k + 1   forward → …

What the loader and the engine of one process tell each other, without knowing each other.

The engine counts the seconds in which this rank did nothing but wait for others: in a synchronous step all ranks need
the same time, and the fast ones spend it waiting, so who learns how fast a rank is takes them off. The loader says
how many samples the latest batch has: a batch without any must not be counted as if it were full.
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
"""The phases of a step, in their order; the loader fetches the next step's batch in the present one."""


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
    """Of one process.

    Attributes:
        step: the step under way, counted from 0; see [Note: numbering].
        phase: one of `PHASES`; ``"outside"`` is the user's own code between them.
        task: ``"eval"`` or ``"checkpoint"`` while one is made, whatever phases that passes through; else empty.
        bucket: what is waited for, in launch order; −1: no bucket.
        waiting: whether this process waits for other ranks, and does nothing else.
        since: when phase, bucket or waiting changed last, in seconds of ``time.perf_counter()``.
        rounds: rounds of synchronisation that ended in this process, of all its models.
        busy_seconds: of all those rounds, spent on anything but waiting.
        latest_busy_seconds: of the latest round.
        sees_waiting: whether the two above mean anything: the host's clock does not tell waiting from computing on
            a GPU, nor inside FSDP2.
        recorder: hears of everything too, while a timeline is recorded.
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
        self._ended, self._waited = 0.0, 0.0  # when the latest round ended, and what was waited since

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
        """Return what records the steps of the model with these ranks, None if nothing does."""
        return self.recorder if self.recorder is not None and self.recorder.records(comm) else None

    @contextmanager
    def waiting_for_peers(self, bucket: int = -1) -> Iterator[None]:
        """Wait for other ranks in this block; what raises in it leaves it marked, for whoever tells of that."""
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
        """Do a task in this block that takes its own time, such as ``"checkpoint"``; also where it raises.

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
"""Of this process."""


@dataclass
class WaitCounters:
    """Of one process.

    Attributes:
        waited_seconds: in which this rank waited for others, since the process began.
        waits: how often that was counted.
        samples: of the batch that a loader handed out and that is being trained on; None: no loader is serving.
    """

    waited_seconds: float = 0.0
    waits: int = 0
    samples: float | None = None

    def add(self, seconds: float) -> None:
        """Count `seconds` in which this rank waited."""
        self.waited_seconds += seconds
        self.waits += 1


wait_counters = WaitCounters()
"""Of this process."""
