"""What a run folder holds, read back: `run.json`, `steps.jsonl`, `trace/rank<k>.jsonl` and `logs/restarts.jsonl`.

A run may have been killed, or may still be running, so nothing here expects a file to be whole: a line
that is cut or damaged is left out and said in `RecordedRun.notes`. A folder without a readable ``run.json`` is
no run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import UsageError

__all__ = ["LoggedStep", "RecordedRun", "RestartRecord", "TraceSpan", "read_run"]

_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")
_SPEAKER = re.compile(r"^\[rank\d+\]: ")  # torch says who raised
_NAME_A_RUN = (
    "name a folder that `paceline train --out` or paceline.Profiler wrote, "
    "or that `paceline hub --folder` keeps"
)
_SPAN_FIELDS = ("name", "start", "seconds", "rank")
_SHOWN_ELSEWHERE = ("step", "samples", "sent_nbytes", "would_be_nbytes")
_OF_A_STEP = (
    "loss",
    "tokens_per_second",
    "samples_per_second",
    "step_seconds",
    "exposed_share",
    "val_loss",
)


@dataclass(frozen=True)
class LoggedStep:
    """One logged optimizer step, as rank 0 saw it.

    Attributes:
        step: number of the optimizer step, as the run counted it.
        loss: training loss of this step's global batch; NaN where it was not finite, None where none was logged.
        tokens_per_second, samples_per_second: of all ranks together.
        step_seconds: wall time of the step.
        exposed_share: share of the step in which rank 0 stood still for communication, 0 to 1.
        samples: samples of all ranks together.
        val_loss: loss on held-out text, where it was measured at this step.
        numbers: whatever else was logged, by name; means over all ranks.
    """

    step: int
    loss: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None
    exposed_share: float | None = None
    samples: int | None = None
    val_loss: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceSpan:
    """One line of a rank's trace; `start` in unix seconds, `fields` whatever else the line holds."""

    name: str
    start: float
    seconds: float
    rank: int
    fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """When it ended, in unix seconds."""
        return self.start + self.seconds


@dataclass(frozen=True)
class RestartRecord:
    """A failure, after which the ranks were started again, or the run ended.

    Attributes:
        number: how many failures there were with this one.
        time: when (ISO 8601).
        reason: what failed first, and how.
        ranks_before, ranks_after: world sizes; after the last failure of a run that ended, 0.
    """

    number: int
    time: str
    reason: str
    ranks_before: int
    ranks_after: int


@dataclass(frozen=True)
class RecordedRun:
    """A run, read from its folder.

    Attributes:
        folder: where it was read.
        facts: the content of ``run.json``: command, settings, world, versions, model, start.
        steps: the logged steps in ascending order, one per step number (the last one written).
        spans_of_rank: each rank's trace, in the order written.
        restarts: failures in the order they came.
        sample: text that the model generated at the end; empty where there is none.
        notes: what was cut, damaged or missing, each one sentence for the reader.
    """

    folder: Path
    facts: Mapping[str, object]
    steps: tuple[LoggedStep, ...]
    spans_of_rank: Mapping[int, tuple[TraceSpan, ...]]
    sample: str
    notes: tuple[str, ...]
    restarts: tuple[RestartRecord, ...] = ()


def read_run(folder: Path) -> RecordedRun:
    """Return the run that `folder` holds.

    Raises:
        UsageError: `folder` is no run folder.
    """
    facts = _read_facts(folder)
    notes: list[str] = []
    steps = _read_steps(folder / "steps.jsonl", notes)
    spans_of_rank = {
        rank: tuple(_spans(path, notes)) for rank, path in sorted(_trace_files(folder / "trace"))
    }
    if not spans_of_rank:
        notes.append("There is no trace, so the time can't be split into phases.")
    sample = folder / "sample.txt"
    text = sample.read_text(encoding="utf-8", errors="replace") if sample.is_file() else ""
    restarts = tuple(_restarts(folder / "logs" / "restarts.jsonl", notes))
    return RecordedRun(folder, facts, steps, spans_of_rank, text, tuple(notes), restarts)


def _read_facts(folder: Path) -> dict[str, object]:
    """Return the content of ``run.json``, or raise the error that tells why `folder` is no run."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is no folder",
            remedy=_NAME_A_RUN,
        )
    path = folder / "run.json"
    if not path.is_file():
        runs = sorted(found.parent for found in folder.glob("*/run.json"))
        remedy = f"did you mean {runs[0]}?" if runs else _NAME_A_RUN
        raise UsageError(f"{folder} is no run: it has no run.json", remedy=remedy)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} can't be read: {error}", remedy="the run is damaged; train again"
        ) from error
    if not isinstance(facts, dict):
        raise UsageError(
            f"{path} holds {type(facts).__name__}, not an object", remedy="the run is damaged; train again"
        )
    return facts


def _trace_files(folder: Path) -> Iterator[tuple[int, Path]]:
    if folder.is_dir():
        for path in folder.iterdir():
            if match := _RANK_FILE.fullmatch(path.name):
                yield int(match[1]), path


def _read_steps(path: Path, notes: list[str]) -> tuple[LoggedStep, ...]:
    steps = (_step(record) for record in _records(path, notes, needed=("step",)))
    step_of_number = {step.step: step for step in steps}
    if not step_of_number:
        notes.append("No step was logged: the run ended before its first one, or has just begun.")
    return tuple(step_of_number[number] for number in sorted(step_of_number))


def _step(record: Mapping[str, object]) -> LoggedStep:
    """Return the step that a line holds; a loss that JSON couldn't say (null) is NaN."""
    known = {name: value for name, value in record.items() if isinstance(value, int | float)}
    own = {name: float(known[name]) for name in _OF_A_STEP if name in known}
    if "loss" in record:
        own.setdefault("loss", math.nan)
    numbers = {
        name: float(value) for name, value in known.items() if name not in (*_OF_A_STEP, *_SHOWN_ELSEWHERE)
    }
    samples = known.get("samples")
    return LoggedStep(
        int(_number(record, "step")),
        **own,
        samples=None if samples is None else int(samples),
        numbers=numbers,
    )


def _spans(path: Path, notes: list[str]) -> Iterator[TraceSpan]:
    for record in _records(path, notes, needed=("start", "seconds", "rank")):
        yield TraceSpan(
            name=str(record.get("name")),
            start=_number(record, "start"),
            seconds=_number(record, "seconds"),
            rank=int(_number(record, "rank")),
            fields={key: value for key, value in record.items() if key not in _SPAN_FIELDS},
        )


def _restarts(path: Path, notes: list[str]) -> Iterator[RestartRecord]:
    for record in _records(path, notes, needed=("restart", "ranks_before", "ranks_after")):
        after = 0 if record.get("event") == "end" else int(_number(record, "ranks_after"))
        number, before = int(_number(record, "restart")), int(_number(record, "ranks_before"))
        yield RestartRecord(number, str(record.get("time", "")), _reason(record), before, after)


def _reason(record: Mapping[str, object]) -> str:
    """Return what failed first, by whatever of it the line holds."""
    first, parts = record.get("first"), []
    if isinstance(first, Mapping):
        who = (
            f"rank {first['rank']} on {first.get('host')}"
            if first.get("rank") is not None
            else first.get("host")
        )
        lines = [line for line in first.get("lines") or () if isinstance(line, str)]
        parts.append(f"{who} {first.get('how')}" + (f": {_SPEAKER.sub('', lines[-1])}" if lines else ""))
    for names, word in (("lost", "lost"), ("joined", "joined")):
        if isinstance(hosts := record.get(names), list) and hosts:
            parts.append(f"{', '.join(map(str, hosts))} {word}")
    if record.get("why"):
        parts.append(str(record["why"]))
    return "; ".join(parts) or "unknown"


def _number(record: Mapping[str, object], key: str) -> float:
    value = record[key]
    assert isinstance(value, int | float)
    return value


def _records(path: Path, notes: list[str], needed: tuple[str, ...]) -> Iterator[dict[str, object]]:
    """Yield the objects of `path` in which all of `needed` are numbers; `notes` hears what was left out."""
    if not path.is_file():
        return
    damaged: list[int] = []
    number_of_lines = 0
    with path.open("rb") as file:
        for number_of_lines, line in enumerate(file, start=1):
            record = _parse(line, needed)
            if record is not None:
                yield record
            elif line.strip():
                damaged.append(number_of_lines)
    where = f"{path.parent.name}/{path.name}" if path.parent.name == "trace" else path.name
    if damaged and damaged[-1] == number_of_lines:
        damaged.pop()
        notes.append(f"The last line of {where} is cut: the run was killed, or is still writing.")
    if damaged:
        notes.append(f"{where}: {len(damaged)} damaged line(s) left out, the first is line {damaged[0]}.")


def _parse(line: bytes, needed: tuple[str, ...]) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    numbers = all(isinstance(record.get(key), int | float) for key in needed)
    return record if numbers else None
