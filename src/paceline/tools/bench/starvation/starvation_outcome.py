"""Outcomes of the starvation benchmark: what each rank wrote while it trained, and how its process ended.

A rank writes a line per event, which survives the end of its process by a signal::

    {"event": "started", "at": 12.1, "step": 0}
    {"event": "stepped", "at": 12.2, "step": 0, "samples": 64, "error": 1e-16}
    {"event": "dry", "at": 12.3}                             no batches left, while others have some
    {"event": "finished", "at": 12.4, "parameters": […]}     the end, as planned
    {"event": "raised", "at": 12.4, "kind": "RuntimeError", "text": "…"}

`at` is the machine's monotonic clock in seconds, the same for all processes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from paceline._core.json_codec import encode
from paceline._core.processes.process_exit import signal_name
from paceline.tools.bench.starvation.starvation_cases import StarvationCase
from paceline.tools.bench.starvation.starvation_settings import StarvationSettings

__all__ = [
    "CaseOutcome",
    "Event",
    "EventLog",
    "OutcomeKind",
    "ProcessEnd",
    "RankOutcome",
    "case_outcome",
    "read_events",
    "short_message",
]

Event = dict[str, Any]
OutcomeKind = Literal["finished", "error", "time-out", "signal", "hung"]

_NEARLY = 0.9  # share of the time-out: an exception after that is due to it
_MESSAGE_LENGTH = 200


class EventLog:
    """Writes the events of one rank to the file `path`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)  # what is written has left this process

    def write(self, event: str, **more: object) -> None:
        """Add an event."""
        self._file.write((json.dumps({"event": event, "at": time.monotonic(), **more}) + "\n").encode())


def read_events(path: Path) -> list[Event]:
    """Return the events of all whole lines; none if the file does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


@dataclass(frozen=True)
class ProcessEnd:
    """End of a rank's process.

    Attributes:
        code: its exit code, −n if signal n ended it; None: it was killed because nothing moved any more.
        at: time, on the machine's monotonic clock.
        stderr: its output.
    """

    code: int | None
    at: float
    stderr: str = ""


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """Outcome of a rank.

    Attributes:
        rank: its number.
        kind: ``"finished"``; ``"error"``: an exception at once; ``"time-out"``: one after the group's time-out;
            ``"signal"``: ended by one, without an exception; ``"hung"``: still waiting when all were ended.
        error: the exception's type, or the signal's name.
        message: its first line, or the last output on standard error.
        seconds: from the start of the step that failed, or from running dry, until the rank noticed.
        steps: completed.
        samples: of this epoch that it used in them.
        errors: relative errors of the gradient in each of its steps; None if not known.
        parameters: at the end; empty if not known.
        parameter_error: distance of the parameters at the end from those of training in one process, relative to the
            distance that those have moved.
    """

    rank: int
    kind: OutcomeKind
    error: str = ""
    message: str = ""
    seconds: float | None = None
    steps: int = 0
    samples: int = 0
    errors: tuple[float | None, ...] = ()
    parameters: tuple[float, ...] = ()
    parameter_error: float | None = None

    @classmethod
    def of(cls, rank: int, events: Sequence[Event], end: ProcessEnd, timeout: float) -> RankOutcome:
        """Return the outcome of `rank`.

        Args:
            rank: its number.
            events: that it wrote.
            end: of its process.
            timeout: of the process group, in seconds.
        """
        steps = [event for event in events if event["event"] == "stepped"]
        known: dict[str, Any] = {
            "rank": rank,
            "steps": len(steps),
            "samples": sum(event["samples"] for event in steps),
            "errors": tuple(event["error"] for event in steps),
        }
        last = events[-1] if events else {"event": "nothing", "at": end.at}
        if last["event"] == "finished" and end.code == 0:
            parameters = tuple(last.get("parameters", ()))
            error = last.get("parameter_error")
            return cls(kind="finished", parameters=parameters, parameter_error=error, **known)
        if last["event"] == "raised":
            seconds = last["at"] - events[-2]["at"] if len(events) > 1 else None
            late = seconds is not None and seconds >= _NEARLY * timeout
            return cls(
                kind="time-out" if late else "error",
                error=last["kind"],
                message=short_message(last["text"]),
                seconds=seconds,
                **known,
            )
        known |= {"seconds": end.at - last["at"], "message": short_message(end.stderr)}
        if end.code is None:
            return cls(kind="hung", **known)
        if end.code < 0:
            return cls(kind="signal", error=signal_name(-end.code), **known)
        return cls(kind="error", error=f"exit code {end.code}", **known)


def short_message(text: str) -> str:
    """Return an error's message in one line, without places in the source and advice.

    Args:
        text: of an exception, or the output of a process that was ended.

    Example:
        >>> short_message("[/build/gloo/pair.cc:537] Read error [127.0.0.1]:420: Connection reset by peer. This is …")
        'Read error: Connection reset by peer'
    """
    lines = text.strip().splitlines() or [""]
    message = lines[0]
    for line, following in pairwise(lines):
        if line.startswith("terminate called after throwing an instance of"):
            message = f"{line.split(chr(39))[1]}: {following.partition('what():')[2]}"
    message = re.sub(r"\[(enforce fail at )?/[^\]]*\]", "", message)  # [/build/gloo/pair.cc:537]
    message = re.sub(r" \[[0-9a-f.:]+\]:\d+", "", message)  # [127.0.0.1]:420
    message = message.partition(" This is ")[0].partition(", while rank ")[0]
    message = message.removeprefix("Got the following error when running the callback: ")
    # Paceline's prefix; the message names the rank.
    message = re.sub(r"\[rank \d+(, step \d+)?\]", "", message)
    return re.sub(r"\s+", " ", message).strip().rstrip(".")[:_MESSAGE_LENGTH]


@dataclass(frozen=True)
class CaseOutcome:
    """Outcome of a case.

    Attributes:
        case: that was run.
        ranks: outcome of each rank.
        dry_ranks: the ranks that run dry first.
        samples: of the epoch.
        step_kinds: of each step of the epoch: see `StarvationSettings.step_kind`.
    """

    case: StarvationCase
    ranks: tuple[RankOutcome, ...]
    dry_ranks: tuple[int, ...]
    samples: int
    step_kinds: tuple[str, ...]

    @property
    def finished(self) -> bool:
        """Whether every rank ended as planned."""
        return all(one.kind == "finished" for one in self.ranks)

    @property
    def samples_lost(self) -> int:
        """Samples of the epoch that no step used."""
        return self.samples - sum(one.samples for one in self.ranks)

    @property
    def replica_difference(self) -> float | None:
        """Largest difference of any parameter between two ranks at the end; None if not all finished."""
        parameters = [one.parameters for one in self.ranks]
        if not self.finished or not all(parameters):
            return None
        return max(max(column) - min(column) for column in zip(*parameters, strict=True))

    @property
    def parameter_error(self) -> float | None:
        """The largest of any rank at the end; None if not all finished."""
        found = [one.parameter_error for one in self.ranks if one.parameter_error is not None]
        return max(found, default=None) if self.finished else None

    def gradient_error(self, *kinds: str) -> float | None:
        """Return the largest relative error of a gradient in steps of these `kinds`, or in any; None if not known."""
        found = [
            error
            for one in self.ranks
            for kind, error in zip(self.step_kinds, one.errors, strict=False)
            if error is not None and (kind in kinds or not kinds)
        ]
        return max(found, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the outcome for JSON, without the parameters."""
        return {
            "scene": self.case.name,
            "under": self.case.framework,
            "does": self.case.description,
            "dry_ranks": list(self.dry_ranks),
            "finished": self.finished,
            "gradient_error": self.gradient_error(),
            "gradient_error_with_a_dry_rank": self.gradient_error("dry"),
            "gradient_error_with_unequal_batches": self.gradient_error("unequal"),
            "gradient_error_with_equal_batches": self.gradient_error("equal"),
            "parameter_error": self.parameter_error,
            "replicas_apart": self.replica_difference,
            "samples": self.samples,
            "samples_lost": self.samples_lost,
            "ranks": [
                {name: value for name, value in encode(one).items() if name != "parameters"}
                for one in self.ranks
            ],
        }


def case_outcome(
    case: StarvationCase,
    settings: StarvationSettings,
    events: Mapping[int, Sequence[Event]],
    ends: Mapping[int, ProcessEnd],
) -> CaseOutcome:
    """Return the outcome of a case, from all ranks' events and ends."""
    ranks = range(settings.ranks)
    return CaseOutcome(
        case,
        tuple(RankOutcome.of(rank, events[rank], ends[rank], settings.timeout) for rank in ranks),
        tuple(settings.dry_ranks),
        settings.balance.dispatch.samples,
        tuple(settings.step_kind(step) for step in range(settings.steps)),
    )
