"""The results that `step.py` wrote, and what is derived from them (pure).

torch DDP at its best is the one of its bucket sizes with the least median step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from paceline.bench.paired import Ratio, ratio_of

__all__ = ["DDP", "DDP_FP16", "NO_SYNC", "StepResult", "StepRow"]

NO_SYNC = "no synchronisation"
DDP = {mib: f"torch DDP, {mib} MiB" for mib in (1, 5, 25, 100)}
DDP_FP16 = {mib: f"torch DDP, fp16 hook, {mib} MiB" for mib in (1, 25)}


@dataclass(frozen=True)
class StepRow:
    """What was measured of one contestant.

    Attributes:
        name: which one.
        seconds: of a step, the slowest rank's, in each round.
        passed: bytes (sent, received) of a step at each host's interface, headers included, ``[round][host]``.
        expected_sent: bytes that its formula says a host sends in a step, without headers.
        every: steps after which its ranks are equal.
    """

    name: str
    seconds: list[float]
    passed: list[list[tuple[float, float]]]
    expected_sent: float
    every: int

    @property
    def median(self) -> float:
        """Seconds of a step: median over rounds."""
        return median(self.seconds)

    def sent_by_host(self) -> list[float]:
        """Return what each host sent in a step: medians over rounds."""
        return [median(sent for sent, _ in turns) for turns in zip(*self.passed, strict=True)]

    @property
    def sent(self) -> float:
        """Bytes that the host that sent most sent in a step."""
        return max(self.sent_by_host())

    @property
    def sent_ratio(self) -> float:
        """What a host sent beside what was expected: mean over hosts."""
        every = self.sent_by_host()
        return sum(every) / len(every) / self.expected_sent


@dataclass(frozen=True)
class StepResult:
    """A measurement: its settings, and a row per contestant."""

    settings: dict[str, Any]
    rows: list[StepRow]

    def best_ddp(self) -> StepRow | None:
        """Return torch DDP with the bucket size that is fastest here; its hooks are contestants of their own."""
        tried = [row for row in self.rows if row.name in DDP.values()]
        return min(tried, key=lambda row: row.median, default=None)

    def speedup(self, row: StepRow) -> Ratio | None:
        """Return how many times faster than torch DDP at its best a contestant is; None: DDP took no part."""
        best = self.best_ddp()
        return None if best is None else ratio_of(best.seconds, row.seconds)

    @classmethod
    def load(cls, path: Path) -> StepResult:
        """Return the measurement that `step.py` wrote."""
        record = json.loads(path.read_text(encoding="utf-8"))
        return cls(record["settings"], [StepRow(name, **row) for name, row in record["rows"].items()])
