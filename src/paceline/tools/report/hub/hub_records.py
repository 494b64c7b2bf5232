"""Reads the decision ledger of a hub's folder into sums, downsampled curves and the newest decisions.

A ledger can have millions of lines and grow while it is read, so it is read once, in bounded memory.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline._core.format import format_seconds
from paceline.async_dp.hub.membership import StalenessHistogram
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.durable_files import read_checked_file
from paceline.async_dp.wal.hub_folder import LEDGER
from paceline.errors import DamagedCheckpoint
from paceline.tools.report.hub.bounded_decision_log import HUB_ITSELF, DecisionLog, HubDecision
from paceline.tools.report.hub.downsample import DownsampledCurve, QuantileSketch
from paceline.tools.report.hub.hub_downtime import DowntimeDetector
from paceline.tools.report.hub.hub_traffic import HubTraffic
from paceline.tools.report.hub.worker_statistics import WorkerStatistics, WorkerTable, printable

__all__ = ["GlobalScore", "HubRun", "WorkerReplacement", "is_hub_folder", "read_hub_run"]

_MAX_CURVES = 256
_POINTS, _WORKER_POINTS = 2000, 200
_MAX_REPLACEMENTS = 500
_MAX_WHY = 200


@dataclass(frozen=True)
class GlobalScore:
    """A score of the global model and its time."""

    score: float
    at: float


@dataclass(frozen=True)
class WorkerReplacement:
    """A replaced worker: time, number and last score."""

    at: float
    worker: int
    score: float | None


@dataclass(kw_only=True)
class HubRun:
    """An asynchronous run, read from its hub's ledger.

    Attributes:
        folder: the hub's folder.
        name: name of the run; empty if unknown.
        notes: sentences about missing or damaged data.
        begin: unix seconds of the first record.
        end: unix seconds of the last record.
        records: number of records.
        workers: statistics per worker.
        max_present: largest number of workers present at a time.
        parameters: parameters of the model, if known.
        initial_worker: the worker whose parameters all started from, if training has started.
        updates: accepted updates.
        samples: samples behind them.
        weight: sum of their weights.
        refused: refused updates by reason.
        merges: number of merges by quorum.
        merged: updates of these.
        late: those of them that had missed the merge before.
        grace: seconds that merges waited for more than the quorum.
        fragments: numbers of the fragments seen.
        staleness: staleness of all updates in rounds.
        staleness_bars: the same as a histogram.
        ddp_steps: sum over updates of 2 (N − 1) / N times their steps; see `hub_summary`.
        global_scores: score of the global model over time.
        first_score: the first of them.
        last_score: the last of them.
        best_score: the lowest of them.
        scores: scores of workers over time, by number.
        losses: training losses of workers over time, by number.
        merged_at: when all workers adopted one worker's parameters, if they did.
        replacements: the last replaced workers.
        traffic: traffic of the hub.
        downtime: when the hub was down.
        decisions: log of decisions.
    """

    folder: Path
    name: str = ""
    notes: list[str] = field(default_factory=list)
    begin: float = math.nan
    end: float = math.nan
    records: int = 0
    workers: WorkerTable = field(default_factory=WorkerTable)
    max_present: int = 0
    parameters: float | None = None
    initial_worker: int | None = None
    updates: int = 0
    samples: float = 0.0
    weight: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    merges: int = 0
    merged: int = 0
    late: int = 0
    grace: QuantileSketch = field(default_factory=QuantileSketch)
    fragments: set[int] = field(default_factory=set)
    staleness: QuantileSketch = field(default_factory=QuantileSketch)
    staleness_bars: StalenessHistogram = field(default_factory=StalenessHistogram)
    ddp_steps: float = 0.0
    global_scores: DownsampledCurve = field(default_factory=lambda: DownsampledCurve(_POINTS))
    first_score: GlobalScore | None = None
    last_score: GlobalScore | None = None
    best_score: GlobalScore | None = None
    scores: dict[int, DownsampledCurve] = field(default_factory=dict)
    losses: dict[int, DownsampledCurve] = field(default_factory=dict)
    merged_at: float | None = None
    replacements: deque[WorkerReplacement] = field(default_factory=lambda: deque(maxlen=_MAX_REPLACEMENTS))
    traffic: HubTraffic = field(default_factory=HubTraffic)
    downtime: DowntimeDetector = field(default_factory=DowntimeDetector)
    decisions: DecisionLog = field(default_factory=DecisionLog)

    @property
    def seconds(self) -> float:
        """Time between the first and the last record."""
        return self.end - self.begin if self.records else 0.0


def is_hub_folder(folder: Path) -> bool:
    """Return whether a hub writes to this folder."""
    return any((folder / name).exists() for name in (LEDGER, "hub.lock"))


def read_hub_run(folder: Path) -> HubRun:
    """Return the run recorded in a hub's folder.

    Raises:
        UsageError: the folder was written by a newer version of Paceline.
    """
    run = HubRun(folder=folder)
    try:
        run.name = printable(read_checked_file(folder / "run.json").get("run", ""))
    except FileNotFoundError:
        pass
    except DamagedCheckpoint:
        run.notes.append("run.json is damaged, so the name of the run is unknown.")
    try:
        read_records(run, read_ledger(folder))
    except DamagedCheckpoint as error:
        place = str(error).partition(": ")[0].partition(" of ")[0]
        run.notes.append(
            f"The ledger is damaged: {place} can't be read, and the records after it are skipped. A hub restarted "
            "with this folder repairs what it can."
        )
    return run


def read_records(run: HubRun, records: Iterable[Mapping[str, Any]]) -> None:
    """Add all records of a ledger to `run`."""
    reader, invalid = _RecordReader(run), 0
    try:
        for values in records:
            invalid += not reader.read(values)
    finally:
        run.workers.finish(run.end)
        if invalid:
            run.notes.append(f"Skipped {invalid} line(s) of the ledger without a valid time or worker.")


class _RecordReader:
    """Adds one record after another to a run."""

    def __init__(self, run: HubRun) -> None:
        self._run = run
        self._latest_scores: dict[int, float] = {}
        # Updates that wait for a merge, by fragment: worker, samples for which it counts, weight of such a sample.
        self._waiting: dict[str, list[tuple[WorkerStatistics, float, float]]] = {}
        self._of_worker: dict[str, Callable[[Mapping[str, Any], WorkerStatistics, float], None]] = {
            "join": self._join,
            "back": self._back,
            "silent": self._gone,
            "leave": self._gone,
            "begin": self._begin,
            "update": self._update,
            "refuse": self._refuse,
            "score": self._score,
            "replace": self._replace,
            "together": self._together,
            "global_score": self._global_score,
        }

    def read(self, values: Mapping[str, Any]) -> bool:
        """Add a record; return whether it is valid."""
        run, kind, t = self._run, values.get("kind"), _real(values, "t")
        if t is None:
            return False
        handle = self._of_worker.get(kind) if isinstance(kind, str) else None
        number = values.get("worker")
        if handle is not None and type(number) is not int:
            return False
        if not run.records:
            run.begin = run.end = t
        run.records += 1
        run.begin, run.end = min(run.begin, t), max(run.end, t)
        run.downtime.add_record(t)
        if handle is not None:
            handle(values, run.workers.get_or_add(number, t), t)  # type: ignore[arg-type]
        elif kind == "traffic":
            self._traffic(values, t)
        elif kind == "merge":
            self._merge(values)
        return True

    def _decide(self, t: float, worker: WorkerStatistics, what: str, why: str = "", **more: Any) -> None:
        important = more.pop("important", False)
        self._run.decisions.add(
            HubDecision(at=t, worker=worker.number, what=what, why=why, **more), important=important
        )

    # ------------------------------------------------------------------ presence

    def _join(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        worker.name = printable(values.get("name") or "") or worker.name
        worker.mark_present(t)
        every, delay = _real(values, "every"), _real(values, "delay")
        why = ""
        if every is not None and delay is not None:
            why = f"sends every {every:g} steps, merges {delay:g} steps later"
        self._decide(t, worker, "joined", why)

    def _back(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        worker.mark_present(t)
        self._decide(t, worker, "came back", "sent messages again after a silence")

    def _gone(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        worker.mark_gone(t)
        silent = values["kind"] == "silent"
        why = "no messages from it" if silent else "it signed off"
        self._decide(t, worker, "fell silent" if silent else "left", why)

    # ------------------------------------------------------------------ updates

    def _begin(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        run = self._run
        run.parameters, run.initial_worker = _real(values, "numbers"), worker.number
        self._decide(t, worker, "all share its parameters", "joint training begins", important=True)

    def _update(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        run = self._run
        samples, weight, steps, workers, age = (
            _real(values, name) or 0.0 for name in ("samples", "weight", "steps", "workers", "staleness")
        )
        for total in (worker, run):
            total.updates += 1
            total.samples += samples
            total.weight += weight
            total.staleness.add(age)
        worker.steps += steps
        run.staleness_bars.add(age)
        run.ddp_steps += steps * 2 * (workers - 1) / workers if workers > 1 else 0.0
        run.max_present = max(run.max_present, int(workers))
        fragment = values.get("fragment")
        if type(fragment) is int:
            run.fragments.add(fragment)
        counted, relative = _real(values, "counted"), _real(values, "relative")
        if counted is not None and relative is not None:
            self._waiting.setdefault(str(fragment), []).append((worker, counted, relative))
        run.workers.mark_seen(worker.number, t)
        self._own_score(values, worker, t)

    def _merge(self, values: Mapping[str, Any]) -> None:
        """Count a merge by quorum, and give its updates' workers their weights: their samples' share of it."""
        run, late = self._run, values.get("late")
        run.merges += 1
        run.merged += int(_real(values, "updates") or 0)
        run.late += len(late) if isinstance(late, list) else 0
        run.grace.add(_real(values, "grace") or 0.0)
        waiting = self._waiting.pop(str(values.get("fragment")), [])
        total = sum(counted for _, counted, _ in waiting)
        for worker, counted, relative in waiting:
            weight = (_real(values, "scale") or 0.0) * counted * relative / (total or 1.0)
            run.weight += weight
            worker.weight += weight

    def _refuse(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        why = printable(values.get("why") or "no reason given", _MAX_WHY)
        reason = _refusal_kind(why)
        worker.refused[reason] += 1
        self._run.refused[reason] += 1
        self._run.workers.mark_seen(worker.number, t)
        self._decide(t, worker, "update refused", why, reason=reason)
        until = _real(values, "until") or 0.0
        if until > 0 and reason != "in quarantine":
            text = f"for {format_seconds(until)}; the last of several refusals: {why}"
            self._decide(t, worker, "put in quarantine", text, important=True)

    # ------------------------------------------------------------------ scores

    def _score(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        self._run.workers.mark_seen(worker.number, t)
        self._own_score(values, worker, t)

    def _own_score(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        score = _real(values, "score")
        if score is None:
            return
        latest, curves = self._latest_scores, self._run.scores
        latest[worker.number] = score
        _curve_of(curves, worker.number).add(t, score)
        if len(latest) > 2 * len(curves) + _MAX_CURVES:
            self._latest_scores = {number: latest[number] for number in curves if number in latest}

    def _global_score(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        run, score = self._run, _real(values, "score")
        run.workers.mark_seen(worker.number, t)
        if score is None:
            return
        run.global_scores.add(t, score)
        run.last_score = GlobalScore(score, t)
        run.first_score = run.first_score or run.last_score
        run.best_score = (
            run.last_score if run.best_score is None or score < run.best_score.score else run.best_score
        )

    def _replace(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        run = self._run
        worker.replacements += 1
        run.replacements.append(WorkerReplacement(t, worker.number, self._latest_scores.get(worker.number)))
        by, why = values.get("by"), printable(values.get("why") or "", _MAX_WHY)
        other = by if type(by) is int else None
        self._decide(t, worker, "replaced by the best", why, important=True, other=other)

    def _together(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        self._run.merged_at = t
        why = printable(values.get("why") or "", _MAX_WHY)
        self._decide(t, worker, "all adopt its parameters", why, important=True)

    # ------------------------------------------------------------------ traffic

    def _traffic(self, values: Mapping[str, Any], t: float) -> None:
        run = self._run
        sent, received, seconds = (
            max(0.0, _real(values, name) or 0.0) for name in ("sent", "received", "seconds")
        )
        run.traffic.add(t, sent, received, seconds, _real(values, "bandwidth"))
        downtime = run.downtime.add_covered(t - seconds, t)
        if downtime is not None:
            run.workers.mark_hub_down(downtime.since)
            length = format_seconds(max(0.1, downtime.until - downtime.since))
            restart = HubDecision(
                at=downtime.until,
                worker=HUB_ITSELF,
                what="was down",
                why=f"for about {length}, then restarted",
            )
            run.decisions.add(restart, important=True)
        run.max_present = max(run.max_present, int(_real(values, "alive") or 0))
        workers = values.get("workers")
        for key, report in workers.items() if isinstance(workers, Mapping) else ():
            if isinstance(report, Mapping) and str(key).isdecimal() and len(str(key)) < 20:
                self._worker_report(report, int(key), t)

    def _worker_report(self, report: Mapping[str, Any], number: int, t: float) -> None:
        worker = self._run.workers.mark_seen(number, t)
        speed, loss = _real(report, "speed"), _real(report, "loss")
        if speed:
            worker.speeds = worker.speeds[0] + speed, worker.speeds[1] + 1
        if loss is not None:
            _curve_of(self._run.losses, number).add(t, loss)


def _curve_of(curves: dict[int, DownsampledCurve], number: int) -> DownsampledCurve:
    """Return a worker's curve; of too many, the half with the fewest points is dropped."""
    curve = curves.get(number)
    if curve is None:
        if len(curves) >= _MAX_CURVES:
            for short in sorted(curves, key=lambda each: curves[each].count)[: _MAX_CURVES // 2]:
                del curves[short]
        curve = curves[number] = DownsampledCurve(_WORKER_POINTS)
    return curve


def _refusal_kind(why: str) -> str:
    kind = why.partition(":")[0]
    return "in quarantine" if kind.startswith("in quarantine") else kind


def _real(values: Mapping[str, Any], name: str) -> float | None:
    """Return a field as a finite number, None if it is none."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
