"""What a rank writes while it goes on: a line for each thing that happened, there even if it is ended by a signal.

    {"what": "began", "at": 12.1, "step": 0}              a step
    {"what": "made",  "at": 12.2, "step": 0, "samples": 64, "error": 1e-16}
    {"what": "dry",   "at": 12.3}                         no batches left, while others have some
    {"what": "finished", "at": 12.4, "parameters": […]}   the end, as planned
    {"what": "raised", "at": 12.4, "kind": "RuntimeError", "text": "…"}

`at` is the machine's monotonic clock in seconds, the same for all processes.

What became of each rank of a scene, from its notes and how its process ended (pure).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from paceline._core.process_exit import signal_name
from paceline.tools.bench.starvation.scene_setup import Setup
from paceline.tools.bench.starvation.starvation_scenes import Scene

__all__ = [
    "End",
    "Kind",
    "Note",
    "Notes",
    "RankOutcome",
    "SceneOutcome",
    "message_of",
    "outcome_of",
    "read_notes",
]

Note = dict[str, Any]


class Notes:
    """The notes of one rank.

    Args:
        path: where they are written.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)  # what is written has left this process

    def write(self, what: str, **more: object) -> None:
        """Add a line."""
        self._file.write((json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n").encode())


def read_notes(path: Path) -> list[Note]:
    """Return all whole lines of a file of notes; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


Kind = Literal["finished", "error", "time-out", "signal", "hung"]


ALMOST = 0.9  # of the time-out: who waited so long waited for it


_MESSAGE_LENGTH = 200


@dataclass(frozen=True)
class End:
    """How a rank's process ended, as seen from outside.

    Attributes:
        code: its exit code, −n if signal n ended it; None: it had to be killed, because nothing moved any more.
        at: when, on the machine's monotonic clock.
        stderr: what it had written.
    """

    code: int | None
    at: float
    stderr: str = ""


@dataclass(frozen=True)
class RankOutcome:
    """What became of a rank.

    Attributes:
        rank: which.
        kind: ``"finished"``; ``"error"``: an exception at once; ``"time-out"``: one after the group's time-out;
            ``"signal"``: ended by one, without an exception; ``"hung"``: still waiting when all were ended.
        error: the exception's type, or the signal's name.
        message: its first line, or what the process wrote last on standard error.
        seconds: from the beginning of the step that failed, or from running dry, until the rank knew.
        steps: that it made.
        samples: of this epoch that it used in them.
        errors: relative errors of the gradient that each of its steps applied; None where it was not looked at.
        parameters: at the end; empty where they are not known.
        parameter_error: at the end: their distance from those that one process finds, relative to the way
            that these have come.
    """

    rank: int
    kind: Kind
    error: str = ""
    message: str = ""
    seconds: float | None = None
    steps: int = 0
    samples: int = 0
    errors: tuple[float | None, ...] = ()
    parameters: tuple[float, ...] = ()
    parameter_error: float | None = None

    @classmethod
    def of(cls, rank: int, notes: Sequence[Note], end: End, timeout: float) -> RankOutcome:
        """Return what became of `rank`.

        Args:
            rank: which.
            notes: what it wrote.
            end: how its process ended.
            timeout: of the process group, in seconds.
        """
        made = [note for note in notes if note["what"] == "made"]
        known: dict[str, Any] = {
            "rank": rank,
            "steps": len(made),
            "samples": sum(note["samples"] for note in made),
            "errors": tuple(note["error"] for note in made),
        }
        last = notes[-1] if notes else {"what": "nothing", "at": end.at}
        if last["what"] == "finished" and end.code == 0:
            parameters = tuple(last.get("parameters", ()))
            error = last.get("parameter_error")
            return cls(kind="finished", parameters=parameters, parameter_error=error, **known)
        if last["what"] == "raised":
            seconds = last["at"] - notes[-2]["at"] if len(notes) > 1 else None
            late = seconds is not None and seconds >= ALMOST * timeout
            return cls(
                kind="time-out" if late else "error",
                error=last["kind"],
                message=message_of(last["text"]),
                seconds=seconds,
                **known,
            )
        how = {"seconds": end.at - last["at"], "message": message_of(end.stderr), **known}
        if end.code is None:
            return cls(kind="hung", **how)
        if end.code < 0:
            return cls(kind="signal", error=signal_name(-end.code), **how)
        return cls(kind="error", error=f"exit code {end.code}", **how)


def message_of(text: str) -> str:
    """Return what an error says, in one line, without the place in the source and advice.

    Args:
        text: of an exception, or what a process that was ended had written.

    Example:
        >>> message_of("[/build/gloo/pair.cc:537] Read error [127.0.0.1]:420: Connection reset by peer. This is …")
        'Read error: Connection reset by peer'
    """
    lines = text.strip().splitlines() or [""]
    said = lines[0]
    for line, following in pairwise(lines):
        if line.startswith("terminate called after throwing an instance of"):
            said = f"{line.split(chr(39))[1]}: {following.partition('what():')[2]}"
    said = re.sub(r"\[(enforce fail at )?/[^\]]*\]", "", said)  # [/build/gloo/pair.cc:537]
    said = re.sub(r" \[[0-9a-f.:]+\]:\d+", "", said)  # [127.0.0.1]:420
    said = said.partition(" This is ")[0].partition(", while rank ")[0]
    said = said.removeprefix("Got the following error when running the callback: ")
    said = re.sub(
        r"\[rank \d+(, step \d+)?\]", "", said
    )  # a prefix of ours; the rank is named again behind it
    return re.sub(r"\s+", " ", said).strip().rstrip(".")[:_MESSAGE_LENGTH]


@dataclass(frozen=True)
class SceneOutcome:
    """What became of a scene.

    Attributes:
        scene: which.
        ranks: of each rank.
        dry: the ranks that run dry first.
        samples: of the epoch.
        kinds: of each step of the epoch: see `Setup.kind`.
    """

    scene: Scene
    ranks: tuple[RankOutcome, ...]
    dry: tuple[int, ...]
    samples: int
    kinds: tuple[str, ...]

    @property
    def finished(self) -> bool:
        """Whether every rank came to its end as planned."""
        return all(one.kind == "finished" for one in self.ranks)

    @property
    def lost(self) -> int:
        """Samples of the epoch that no step used."""
        return self.samples - sum(one.samples for one in self.ranks)

    @property
    def apart(self) -> float | None:
        """Largest difference between any parameter of two ranks at the end; None where not all came to it."""
        found = [one.parameters for one in self.ranks]
        if not self.finished or not all(found):
            return None
        return max(max(column) - min(column) for column in zip(*found, strict=True))

    @property
    def parameter_error(self) -> float | None:
        """The largest of any rank at the end; None where not all came to it."""
        found = [one.parameter_error for one in self.ranks if one.parameter_error is not None]
        return max(found, default=None) if self.finished else None

    def error_in(self, *kinds: str) -> float | None:
        """Return the largest relative error of a gradient, in steps of these `kinds` or in any.

        None where there was no such step, or nobody looked.
        """
        found = [
            error
            for one in self.ranks
            for kind, error in zip(self.kinds, one.errors, strict=False)
            if error is not None and (kind in kinds or not kinds)
        ]
        return max(found, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON takes it, without the parameters."""
        return {
            "scene": self.scene.name,
            "under": self.scene.under,
            "does": self.scene.told,
            "dry_ranks": list(self.dry),
            "finished": self.finished,
            "gradient_error": self.error_in(),
            "gradient_error_with_a_dry_rank": self.error_in("dry"),
            "gradient_error_with_unequal_batches": self.error_in("unequal"),
            "gradient_error_with_equal_batches": self.error_in("equal"),
            "parameter_error": self.parameter_error,
            "replicas_apart": self.apart,
            "samples": self.samples,
            "samples_lost": self.lost,
            "ranks": [_without_parameters(one) for one in self.ranks],
        }


def _without_parameters(one: RankOutcome) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "parameters"}


def outcome_of(
    scene: Scene, setup: Setup, notes: Mapping[int, Sequence[Note]], ends: Mapping[int, End]
) -> SceneOutcome:
    """Return what became of a scene, from all ranks' notes and ends."""
    ranks = range(setup.ranks)
    return SceneOutcome(
        scene,
        tuple(RankOutcome.of(rank, notes[rank], ends[rank], setup.timeout) for rank in ranks),
        tuple(setup.dry),
        setup.balance.dispatch.samples,
        tuple(setup.kind(step) for step in range(setup.steps)),
    )
