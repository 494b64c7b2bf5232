"""What the folder of a hub tells of its run: the ledger, read once from its beginning to its end in little memory.

A ledger may have millions of lines, and grow while it is read. Nothing of it is kept but sums, thinned curves and the
newest decisions.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline._core.format import format_seconds
from paceline.async_dp.hub.update_screening import Histogram
from paceline.async_dp.wal.decision_ledger import read_ledger
from paceline.async_dp.wal.hub_folder import LEDGER
from paceline.async_dp.wal.json_values import read_checked_file
from paceline.errors import DamagedCheckpoint
from paceline.tools.report.hub.downsample import DownsampledCurve, QuantileSketch
from paceline.tools.report.hub.hub_decisions import HUB_ITSELF, DecisionLog, HubDecision
from paceline.tools.report.hub.link_usage import HubTraffic
from paceline.tools.report.hub.worker_statistics import WorkerStatistics, WorkerTable, printable

__all__ = ["CentreScore", "HubRun", "WorkerReplacement", "is_hub_folder", "read_hub_run"]

_CURVES = 256
_POINTS, _WORKER_POINTS = 2000, 200
_MARKS = 500
_WHY = 200


@dataclass(frozen=True)
class CentreScore:
    """A score of the centre and when it was told."""

    score: float
    at: float


@dataclass(frozen=True)
class WorkerReplacement:
    """A worker was replaced at a time, when its score was this one."""

    at: float
    worker: int
    score: float | None


@dataclass
class HubRun:
    """A run, as its hub's ledger tells it.

    Attributes:
        folder: of the hub. name: of the run, empty if it is not told. notes: what is missing, each one sentence.
        begin, end: time of day of the first and of the last record. records: that were read.
        crew: the workers. most_alive: at a time.
        numbers: parameters of the model, None: not told. first: whose parameters all began from, None: nobody's yet.
        updates, samples, weight: taken in. refused: by reason. fragments: of the model that came.
        staleness: of all updates in rounds. ages: the same as a histogram.
        exchanged: sum over updates of 2 (N − 1) / N times their steps; see `hub_summary`.
        centre: its scores over time. firstly, lastly, best: of them. scores, losses: of workers, by number.
        together: when all joined one worker, None: they did not. replaced: when which worker was, the last ones.
        link: traffic. decisions: what became of workers.
    """

    folder: Path
    name: str = ""
    notes: list[str] = field(default_factory=list)
    begin: float = math.nan
    end: float = math.nan
    records: int = 0
    workersers: WorkerTable = field(default_factory=WorkerTable)
    max_present: int = 0
    parameters: float | None = None
    initial_worker: int | None = None
    updates: int = 0
    samples: float = 0.0
    weight: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    fragments: set[int] = field(default_factory=set)
    staleness: QuantileSketch = field(default_factory=QuantileSketch)
    staleness_bars: Histogram = field(default_factory=Histogram)
    ddp_steps: float = 0.0
    centre_scores: DownsampledCurve = field(default_factory=lambda: DownsampledCurve(_POINTS))
    first_score: CentreScore | None = None
    last_score: CentreScore | None = None
    best_score: CentreScore | None = None
    scores: dict[int, DownsampledCurve] = field(default_factory=dict)
    losses: dict[int, DownsampledCurve] = field(default_factory=dict)
    merged_at: float | None = None
    replacements: deque[WorkerReplacement] = field(default_factory=lambda: deque(maxlen=_MARKS))
    traffic: HubTraffic = field(default_factory=HubTraffic)
    decisions: DecisionLog = field(default_factory=DecisionLog)

    @property
    def seconds(self) -> float:
        """How long it lasted, as far as it is told."""
        return self.end - self.begin if self.records else 0.0


def is_hub_folder(folder: Path) -> bool:
    """Tell whether a folder is one that a hub keeps."""
    return any((folder / name).exists() for name in (LEDGER, "hub.lock"))


def read_hub_run(folder: Path) -> HubRun:
    """Return the run of the hub that keeps `folder`.

    Raises:
        UsageError: a newer version of Paceline wrote it.
    """
    run = HubRun(folder)
    try:
        run.name = printable(read_checked_file(folder / "run.json").get("run", ""))
    except FileNotFoundError:
        pass
    except DamagedCheckpoint:
        run.notes.append("run.json is damaged, so the name of the run is not known.")
    try:
        read_records(run, read_ledger(folder))
    except DamagedCheckpoint as error:
        told = str(error).partition(": ")[0].partition(" of ")[0]
        run.notes.append(
            f"The ledger is damaged: {told} can't be read, and what follows is left out. A hub that is started "
            "again with this folder mends what it can."
        )
    return run


def read_records(run: HubRun, records: Iterable[Mapping[str, Any]]) -> None:
    """Take records of a ledger into `run`, and end it."""
    fold, odd = _Fold(run), 0
    try:
        for values in records:
            odd += not fold.take(values)
    finally:
        run.workersers.end(run.end)
        if odd:
            run.notes.append(f"{odd} line(s) of the ledger tell no time or worker and are left out.")


class _Fold:
    """Takes in one record after the other."""

    def __init__(self, run: HubRun) -> None:
        self._run = run
        self._latest: dict[int, float] = {}  # score of workers
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
            "centre": self._centre,
        }

    def take(self, values: Mapping[str, Any]) -> bool:
        """Take in a record; return whether it makes sense."""
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
        run.traffic.add_time(t)
        if handle is not None:
            handle(values, run.workersers.get_or_add(number, t), t)  # type: ignore[arg-type]
        elif kind == "traffic":
            self._traffic(values, t)
        return True

    def _decide(self, t: float, worker: WorkerStatistics, what: str, why: str = "", **more: Any) -> None:
        important = more.pop("weighty", False)
        self._run.decisions.add(HubDecision(t, worker.number, what, why, **more), important=important)

    # ------------------------------------------------------------------ who is there

    def _join(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        worker.name = printable(values.get("name") or "") or worker.name
        worker.mark_present(t)
        every, delay = _real(values, "every"), _real(values, "delay")
        told = every is not None and delay is not None
        why = f"it sends every {every:g} steps and takes in {delay:g} steps later" if told else ""
        self._decide(t, worker, "joined", why)

    def _back(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        worker.mark_present(t)
        self._decide(t, worker, "came back", "it was heard again after a silence")

    def _gone(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        worker.mark_gone(t)
        silent = values["kind"] == "silent"
        why = "nothing was heard of it" if silent else "it said so"
        self._decide(t, worker, "fell silent" if silent else "left", why)

    # ------------------------------------------------------------------ what is learnt

    def _begin(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        run = self._run
        run.parameters, run.initial_worker = _real(values, "numbers"), worker.number
        self._decide(t, worker, "all share its parameters", "training together begins", important=True)

    def _update(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        run = self._run
        samples, weight, steps, workers, age = (
            _real(values, name) or 0.0 for name in ("samples", "weight", "steps", "workers", "staleness")
        )
        for taken in (worker, run):
            taken.updates += 1
            taken.samples += samples
            taken.weight += weight
            taken.staleness.add(age)
        worker.steps += steps
        run.staleness_bars.add(age)
        run.ddp_steps += steps * 2 * (workers - 1) / workers if workers > 1 else 0.0
        run.max_present = max(run.max_present, int(workers))
        fragment = values.get("fragment")
        if type(fragment) is int:
            run.fragments.add(fragment)
        run.workersers.mark_seen(worker.number, t)
        self._own_score(values, worker, t)

    def _refuse(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        why = printable(values.get("why") or "no reason told", _WHY)
        reason = _reason(why)
        worker.refused[reason] += 1
        self._run.refused[reason] += 1
        self._run.workersers.mark_seen(worker.number, t)
        self._decide(t, worker, "update refused", why, reason=reason)
        until = _real(values, "until") or 0.0
        if until > 0 and reason != "in quarantine":
            told = f"for {format_seconds(until)}; the last of several refusals: {why}"
            self._decide(t, worker, "put in quarantine", told, important=True)

    # ------------------------------------------------------------------ scores

    def _score(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        self._run.workersers.mark_seen(worker.number, t)
        self._own_score(values, worker, t)

    def _own_score(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        score = _real(values, "score")
        if score is not None:
            self._latest[worker.number] = score
            _curve_of(self._run.scores, worker.number).add(t, score)
            if len(self._latest) > 2 * len(self._run.scores) + _CURVES:
                self._latest = {key: self._latest[key] for key in self._run.scores if key in self._latest}

    def _centre(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        run, score = self._run, _real(values, "score")
        run.workersers.mark_seen(worker.number, t)
        if score is None:
            return
        run.centre_scores.add(t, score)
        run.last_score = CentreScore(score, t)
        run.first_score = run.first_score or run.last_score
        run.best_score = run.last_score if run.best_score is None or score < run.best_score.score else run.best_score

    def _replace(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        run = self._run
        worker.replacements += 1
        run.replacements.append(WorkerReplacement(t, worker.number, self._latest.get(worker.number)))
        by, why = values.get("by"), printable(values.get("why") or "", _WHY)
        other = by if type(by) is int else None
        self._decide(t, worker, "replaced by the best", why, important=True, other=other)

    def _together(self, values: Mapping[str, Any], worker: WorkerStatistics, t: float) -> None:
        self._run.merged_at = t
        why = printable(values.get("why") or "", _WHY)
        self._decide(t, worker, "all join it", why, important=True)

    # ------------------------------------------------------------------ traffic

    def _traffic(self, values: Mapping[str, Any], t: float) -> None:
        run = self._run
        sent, received, seconds = (
            max(0.0, _real(values, name) or 0.0) for name in ("sent", "received", "seconds")
        )
        away = run.traffic.add(t, sent, received, seconds, _real(values, "bandwidth"))
        if away is not None:
            run.workersers.downtimes(away.since)
            why = f"for about {format_seconds(max(0.1, away.until - away.since))}, then it was started again"
            hub = HubDecision(away.until, HUB_ITSELF, "was away", why)
            run.decisions.add(hub, important=True)
        run.max_present = max(run.max_present, int(_real(values, "alive") or 0))
        workers = values.get("workers")
        for key, told in workers.items() if isinstance(workers, Mapping) else ():
            if isinstance(told, Mapping) and str(key).isdecimal() and len(str(key)) < 20:
                self._speed(told, int(key), t)

    def _speed(self, told: Mapping[str, Any], number: int, t: float) -> None:
        worker = self._run.workersers.mark_seen(number, t)
        speed, loss = _real(told, "speed"), _real(told, "loss")
        if speed:
            worker.speeds = worker.speeds[0] + speed, worker.speeds[1] + 1
        if loss is not None:
            _curve_of(self._run.losses, number).add(t, loss)


def _curve_of(curves: dict[int, DownsampledCurve], number: int) -> DownsampledCurve:
    """Return a worker's curve; of too many the half that has fewest points is dropped."""
    curve = curves.get(number)
    if curve is None:
        if len(curves) >= _CURVES:
            for short in sorted(curves, key=lambda each: curves[each].count)[: _CURVES // 2]:
                del curves[short]
        curve = curves[number] = DownsampledCurve(_WORKER_POINTS)
    return curve


def _reason(why: str) -> str:
    """Return what kind of refusal it is: its words without what is particular."""
    kind = why.partition(":")[0]
    return "in quarantine" if kind.startswith("in quarantine") else kind


def _real(values: Mapping[str, Any], name: str) -> float | None:
    """Return a finite number that was told, None if none was."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
