"""The results that `step.py` and `peers.py` wrote, and what is derived from them (pure).

torch DDP at its best is the one of its bucket sizes with the least median step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench_harness.turns import Ratio, ratio_of

__all__ = [
    "BY_HAND",
    "DDP",
    "DDP_FP16",
    "HIVEMIND",
    "HIVEMIND_FP16",
    "HIVEMIND_FP32",
    "NO_SYNC",
    "OURS",
    "OURS_STREAMING",
    "SQUEEZED",
    "TORCHFT",
    "TORCHFT_STREAMING",
    "PeerResult",
    "PeerRow",
    "StepResult",
    "StepRow",
]

NO_SYNC = "no synchronisation"
DDP = {mib: f"torch DDP, {mib} MiB" for mib in (1, 5, 25, 100)}
SQUEEZED = {name: f"Paceline, {name}" for name in ("bf16", "int8", "int4", "powersgd")}
DDP_FP16 = {mib: f"torch DDP, fp16 hook, {mib} MiB" for mib in (1, 25)}

BY_HAND = "torch's all-reduce, by hand"
TORCHFT, TORCHFT_STREAMING = "torchft DiLoCo", "torchft DiLoCo, 2 fragments, delay 5"
HIVEMIND = "hivemind averager, 8 bits"
OURS, OURS_STREAMING = "Paceline DiLoCo, int4", "Paceline DiLoCo, int4, 2 fragments, delay 5"
HIVEMIND_FP16, HIVEMIND_FP32 = "hivemind averager, fp16", "hivemind averager, float32"


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
        return fmean(self.sent_by_host()) / self.expected_sent


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


@dataclass(frozen=True)
class PeerRow:
    """What was measured of one library: seconds of the slowest rank, bytes of the host that sends most.

    Attributes:
        name: which one.
        every: inner steps of a round.
        turns: what each turn found, see `peer_turn.py`.
    """

    name: str
    every: int
    turns: list[dict[str, Any]]

    def syncs(self) -> list[float]:
        """Return the seconds of a synchronisation alone in each turn; none if it goes on beside inner steps."""
        return [median(turn["syncs"]) for turn in self.turns if turn["syncs"]]

    def rounds(self) -> list[float]:
        """Return the seconds of a whole round in each turn: `every` inner steps, and the outer one."""
        return [median(turn["rounds"]) for turn in self.turns]

    @property
    def sync(self) -> float | None:
        """Seconds of a synchronisation alone: median over turns."""
        return median(self.syncs()) if self.syncs() else None

    @property
    def inner(self) -> float:
        """Seconds of a round per inner step: median over turns."""
        return median(self.rounds()) / self.every

    @property
    def alone(self) -> float:
        """Seconds of a step in the same processes that nobody synchronises: median over turns."""
        return median(turn["alone"] for turn in self.turns)

    @property
    def sent(self) -> float:
        """Bytes that the host that sends most sends in a round: median over rounds."""
        return median(max(sent for sent, _ in hosts) for turn in self.turns for hosts in turn["passed"])

    @property
    def sent_ratio(self) -> float:
        """What hosts send in a round beside what is expected: mean over hosts, median over rounds."""
        means = [fmean(sent for sent, _ in hosts) for turn in self.turns for hosts in turn["passed"]]
        return median(means) / self.expected_sent

    @property
    def expected_sent(self) -> float:
        """Bytes that its formula says a host sends in a round, without headers."""
        return self.turns[0]["expected_sent"]

    @property
    def apart(self) -> float:
        """How far ranks are apart after all rounds of a turn, ‖a − b‖ / ‖b‖; 0: equal bit for bit."""
        return max(turn["apart"] for turn in self.turns)


@dataclass(frozen=True)
class PeerResult:
    """What `peers.py` measured: its settings, what is installed where, and a row per contestant."""

    settings: dict[str, Any]
    versions: dict[str, dict[str, str]]
    rows: list[PeerRow]

    def speedup(self, row: PeerRow) -> Ratio | None:
        """Return how many times faster than torchft's a synchronisation alone is; None: one of them has none."""
        other = next((each for each in self.rows if each.name == TORCHFT), None)
        if other is None or row.sync is None:
            return None
        return ratio_of(other.syncs(), row.syncs())

    @classmethod
    def load(cls, path: Path) -> PeerResult:
        """Return the measurement that `peers.py` wrote."""
        record = json.loads(path.read_text(encoding="utf-8"))
        every = record["settings"]["every"]
        rows = [PeerRow(name, every, row["turns"]) for name, row in record["rows"].items()]
        return cls(record["settings"], record["versions"], rows)
