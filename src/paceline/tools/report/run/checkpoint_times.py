"""What saves, restarts and failures of a run cost: from its traces, its log of restarts and its checkpoints.

Training waits for a save in the task ``"checkpoint"`` of a step. The manifest, which is written last, dates from when
the checkpoint was complete. A restart ends with the first step after it, without the time that a step takes anyway. It
begins one step after the begin of the last one that was traced before it: about then the failure happened, since the
step in which a process is killed is not traced, and the one in which another process waits for it takes long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.checkpoint.format.manifest import Manifest
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.errors import DamagedCheckpoint, UsageError
from paceline.tools.report.run.restart_records import DepartureRecord
from paceline.tools.report.run.run_records import RecordedRun, TraceSpan

__all__ = ["CheckpointTimes", "measure_checkpoints"]

_COARSE = 0.02
"""Seconds by which the date of a file may be too early: file systems use a coarse clock."""


@dataclass(frozen=True, kw_only=True)
class CheckpointTimes:
    """What saves, restarts and failures of a run cost; None if not recorded.

    Attributes:
        stall: mean seconds that training waited for a save, on the rank that waited longest; without the first save of
            each start, which takes its memory, if there are others.
        saves: number of saves that this is the mean of.
        complete: mean seconds from the begin of a save until the checkpoint was complete.
        completed: number of checkpoints that this is the mean of: those that are still there.
        interval: median seconds of training between two saves.
        interval_steps: median number of steps between two saves.
        step: mean seconds of a step with what comes between steps, such as held-out losses, but without saves.
        restart: mean seconds from a failure until training went on.
        restarted: number of restarts that this is the mean of.
        failures: number of failures after which all ranks restarted or the run ended.
        seconds: in which these happened: of all starts, with restarts between them.
        departures: number of ranks that ended while the others trained on, from the same state.
    """

    stall: float | None = None
    saves: int = 0
    complete: float | None = None
    completed: int = 0
    interval: float | None = None
    interval_steps: float | None = None
    step: float | None = None
    restart: float | None = None
    restarted: int = 0
    failures: int = 0
    seconds: float = 0.0
    departures: int = 0


@dataclass(frozen=True)
class _Save:
    """A save on one rank: its step, begin and end of the wait in unix seconds, whether it is the first of a start."""

    step: int
    begin: float
    end: float
    is_first: bool


@dataclass
class _Session:
    """Spans of one rank from one start, or from one change of the world, to the next.

    Attributes:
        start: unix seconds.
        is_start: a process was started; false: it went on in another world.
        steps: (begin, end) of its steps in unix seconds.
        saves: its saves.
        end: of the last span.
    """

    start: float
    is_start: bool
    steps: list[tuple[float, float]] = field(default_factory=list)
    saves: list[_Save] = field(default_factory=list)
    end: float = 0.0


def measure_checkpoints(run: RecordedRun) -> CheckpointTimes:
    """Return what saves, restarts and failures of a run cost."""
    sessions_of = {rank: _sessions(spans) for rank, spans in run.spans_of_rank.items()}
    sessions = sessions_of.get(0, [])
    stalls = _stalls(sessions_of.values())
    gaps = [pair for session in sessions for pair in pairwise(session.saves)]
    interval = median(later.begin - save.end for save, later in gaps) if gaps else None
    step = _step_seconds(sessions)
    failed_at = [time for record in run.restarts if (time := _timestamp(record.time)) is not None]
    restarts = [] if step is None else list(_restarts(sessions, sorted(failed_at), step))
    complete = list(_completions(run.folder / "checkpoint", sessions, interval))
    return CheckpointTimes(
        stall=fmean(stalls) if stalls else None,
        saves=len(stalls),
        complete=fmean(complete) if complete else None,
        completed=len(complete),
        interval=interval,
        interval_steps=median(later.step - save.step for save, later in gaps) if gaps else None,
        step=step,
        restart=fmean(restarts) if restarts else None,
        restarted=len(restarts),
        failures=len(failed_at),
        seconds=_seconds(sessions, failed_at),
        departures=sum(isinstance(record, DepartureRecord) for record in run.live),
    )


def _sessions(spans: Sequence[TraceSpan]) -> list[_Session]:
    sessions: list[_Session] = []
    has_saved = False
    for span in spans:
        if span.name == "session" or not sessions:
            is_start = "ranks" not in span.fields
            sessions.append(_Session(span.start, is_start))
            has_saved = has_saved and not is_start
        session = sessions[-1]
        session.end = max(session.end, span.end)
        if span.name != "step":
            continue
        number = span.fields.get("step")
        if any(name == "backward" for name, *_ in _lists(span.fields, "phases")):
            session.steps.append((span.start, span.end))
        for begin, end in _waits(span):
            session.saves.append(_Save(number if isinstance(number, int) else 0, begin, end, not has_saved))
            has_saved = True
    return sessions


def _lists(fields: Mapping[str, Any], name: str) -> list[list[Any]]:
    """Return the lists in a field, without anything else that is there."""
    found = fields.get(name)
    return [each for each in found if isinstance(each, list) and each] if isinstance(found, list) else []


def _waits(span: TraceSpan) -> Iterator[tuple[float, float]]:
    """Yield begin and end of the waits for saves during a step, in unix seconds."""
    for name, *times in _lists(span.fields, "tasks"):
        if name == "checkpoint" and len(times) == 2 and all(isinstance(time, int | float) for time in times):
            yield span.start + times[0] / 1e6, span.start + times[1] / 1e6


def _stalls(sessions_of_ranks: Iterable[Sequence[_Session]]) -> list[float]:
    """Return the seconds of each save on the rank that waited longest; of repeated ones, the last counts."""
    longest: dict[int, tuple[float, bool]] = {}
    for sessions in sessions_of_ranks:
        latest = {save.step: save for session in sessions for save in session.saves}
        for step, save in latest.items():
            seconds, is_first = longest.get(step, (0.0, False))
            longest[step] = max(seconds, save.end - save.begin), is_first or save.is_first
    later = [seconds for seconds, is_first in longest.values() if not is_first]
    return later or [seconds for seconds, _ in longest.values()]


def _step_seconds(sessions: Sequence[_Session]) -> float | None:
    """Return the mean seconds of a step; without the first one of each session, which includes one-time costs."""
    steps, seconds = 0, 0.0
    for session in sessions:
        if len(session.steps) < 2:
            continue
        begin, end = session.steps[0][1], session.steps[-1][1]
        saving = sum(save.end - save.begin for save in session.saves if begin <= save.begin < end)
        steps, seconds = steps + len(session.steps) - 1, seconds + end - begin - saving
    return seconds / steps if steps and seconds > 0 else None


# ---------------------------------------------------------------------- failures


def _restarts(sessions: Sequence[_Session], failed_at: Sequence[float], step: float) -> Iterator[float]:
    """Yield the seconds of each restart after which a step was made before the next failure."""
    spans = [(begin, begin + step) for session in sessions for begin, _ in session.steps]
    spans += [(save.begin, save.end) for session in sessions for save in session.saves]
    firsts = [session.steps[0] for session in sessions if session.is_start and session.steps]
    for before, at, until in zip([0.0, *failed_at], failed_at, [*failed_at[1:], math.inf], strict=False):
        first = next((end for begin, end in firsts if at < begin < until), None)
        if first is not None:
            began = max((min(end, at) for begin, end in spans if before < begin < at), default=at)
            yield max(0.0, first - step - began)


def _seconds(sessions: Sequence[_Session], failed_at: Sequence[float]) -> float:
    """Return the seconds of all sessions, with the time between two if it was a restart or a change of the world."""
    seconds = sum(session.end - session.start for session in sessions)
    for before, after in pairwise(sessions):
        if not after.is_start or any(before.end - 60 < at < after.start for at in failed_at):
            seconds += max(0.0, after.start - before.end)
    return seconds


# ---------------------------------------------------------------------- completion


def _completions(folder: Path, sessions: Sequence[_Session], interval: float | None) -> Iterator[float]:
    """Yield the seconds from begin to completion of the saves whose checkpoints are still in the folder."""
    saves = [save for session in sessions for save in session.saves]
    begins = [save.begin for save in saves]
    store = LocalFolder(folder)
    for name in store.names() if interval is not None else []:
        try:
            written = Manifest.read(store.files(name).read).written
        except (DamagedCheckpoint, UsageError):
            continue
        at, seconds = (
            _timestamp(written.get("at")),
            written.get("seconds"),
        )  # `at` in whole seconds, rounded down
        fitting = [save for save in saves if at is not None and save.begin - 1 <= at <= save.end]
        if not fitting or not isinstance(seconds, float):
            continue
        save = fitting[-1]
        following = min(
            (begin for begin in begins if begin > save.begin), default=save.end + (interval or 0.0)
        )
        if save.begin + seconds <= following:  # a save can't begin before the previous one is complete
            yield max(save.end - save.begin, seconds)


def _timestamp(text: object) -> float | None:
    """Return an ISO 8601 time in unix seconds; None if it is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
