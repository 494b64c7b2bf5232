"""Numbers of two runs side by side: which is faster, by how much, and what differs in their settings.

[Note: interval of the ratio] Step times of one run are correlated (a busy host slows several steps in a row), so the
95 % interval of the ratio of medians comes from resampling blocks of consecutive steps (moving block bootstrap, Künsch
1989). It covers the spread within these two runs. It can't cover what changes from one run to the next, such as the
load of the machines: for that, both have to be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from paceline.tools.report.run.run_records import RecordedRun, read_run
from paceline.tools.report.run.run_summary import RunSummary, summarise_run
from paceline.tools.report.run.step_breakdown import PHASES

__all__ = ["ComparedRun", "SpeedRatio", "differing_facts", "mean_phases", "read_pair", "speed_ratio"]

_MIN_STEPS = 10
_MAX_STEPS = 4000  # of a run that are resampled
_RESAMPLES = 1000
_NOT_SETTINGS = {"command", "started", "sent", "result", "settings.out", "settings.existing", "world.rank"}


@dataclass(frozen=True)
class ComparedRun:
    """One of the two runs."""

    name: str
    run: RecordedRun
    summary: RunSummary


@dataclass(frozen=True, kw_only=True)
class SpeedRatio:
    """How much faster the second run is.

    Attributes:
        ratio: time of the first divided by time of the second, medians; above 1 if the second is faster.
        low: lower end of the 95 % interval.
        high: upper end.
        per: ``"step"``, or ``"sample"`` if the runs have different global batches.
        first: time of the first run in seconds per step or sample.
        second: the same of the second run.
    """

    ratio: float
    low: float
    high: float
    per: str
    first: float
    second: float

    @property
    def shown(self) -> bool:
        """Whether the interval excludes equal speed."""
        return self.low > 1 or self.high < 1


def read_pair(first: Path, second: Path) -> tuple[ComparedRun, ComparedRun]:
    """Read two runs; they are named by their folders.

    Raises:
        UsageError: a folder holds no run.
    """
    folders = [first.resolve(), second.resolve()]
    depth = 1
    while folders[0] != folders[1] and folders[0].parts[-depth:] == folders[1].parts[-depth:]:
        depth += 1
    runs = [read_run(folder) for folder in (first, second)]
    one, other = (
        ComparedRun("/".join(folder.parts[-depth:]), run, summarise_run(run))
        for folder, run in zip(folders, runs, strict=True)
    )
    return one, other


def speed_ratio(first: ComparedRun, second: ComparedRun) -> SpeedRatio | None:
    """Return how much faster the second run is; None with fewer than 10 timed steps in either.

    Time counts per sample if the global batches are known and differ by more than 1 %.
    """
    times = [np.array([seconds for _, seconds in each.summary.durations]) for each in (first, second)]
    if any(len(each) < _MIN_STEPS or not np.median(each) > 0 for each in times):
        return None
    batches = [_samples_per_step(each.run) for each in (first, second)]
    per = "step"
    if all(batches) and abs(batches[0] / batches[1] - 1) > 0.01:
        per = "sample"
        times = [each / batch for each, batch in zip(times, batches, strict=True)]
    one, other = (float(np.median(each)) for each in times)
    chance = np.random.default_rng(0)
    ratios = _resampled_medians(times[0], chance) / _resampled_medians(times[1], chance)
    low, high = (float(each) for each in np.percentile(ratios, [2.5, 97.5]))
    return SpeedRatio(ratio=one / other, low=low, high=high, per=per, first=one, second=other)


def _samples_per_step(run: RecordedRun) -> float:
    known = [step.samples for step in run.steps if step.samples]
    return float(median(known)) if known else 0.0


def _resampled_medians(times: np.ndarray, chance: np.random.Generator) -> np.ndarray:
    """Return the medians of resampled runs; see [Note: interval of the ratio]."""
    times = times[:: -(-len(times) // _MAX_STEPS)]
    length = max(2, math.isqrt(len(times)))
    blocks = -(-len(times) // length)
    medians = np.empty(_RESAMPLES)
    for index in range(_RESAMPLES):
        starts = chance.integers(0, len(times) - length + 1, blocks)
        medians[index] = np.median(times[(starts[:, None] + np.arange(length)).ravel()[: len(times)]])
    return medians


def mean_phases(summary: RunSummary) -> dict[str, float]:
    """Return the seconds of each phase of a step, mean over ranks; empty without a timeline."""
    if not summary.ranks:
        return {}
    return {phase: fmean(rank.seconds[phase] for rank in summary.ranks) for phase in PHASES}


def differing_facts(first: RecordedRun, second: RecordedRun) -> list[tuple[str, object, object]]:
    """Return (name, value of the first, value of the second) of what differs in ``run.json``; None if not there."""
    one, other = dict(_flat(first.facts)), dict(_flat(second.facts))
    names = dict.fromkeys([*one, *other])
    return [
        (name, one.get(name), other.get(name))
        for name in names
        if one.get(name) != other.get(name) and not _is_hidden(name)
    ]


def _is_hidden(name: str) -> bool:
    return name in _NOT_SETTINGS or name.partition(".")[0] in _NOT_SETTINGS


def _flat(facts: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
