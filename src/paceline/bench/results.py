"""The rows of `paceline bench step`, and how each column is obtained.

- `step_ms`, `rounds`: the whole step; see [Note: rounds] in `paceline.bench.rounds`.
- `ratio_to_ddp`: against torch DDP's best row, that with the least `step_ms` of all its bucket sizes and with or
  without a static graph. `ratio_to_peer`: against torch doing the same kind of work (`paceline.bench.entries`).
- `forward_ms`, `backward_ms`: computing; `exposed_ms`: standing still for communication; `optimizer_ms`: the
  update with `zero_grad`, without waiting. They add up to `step_ms`; see `paceline.bench.rounds.split`. What the
  optimizer's step waits is told by Paceline's own clock, and for torch's ZeRO by the time of its broadcasts.
- `calls`, `mib`: collectives that one rank launches in a step, and their payload, seen by a dispatch mode in a
  step that is not timed. `ms_per_call`: the time in which some call was under way on the rank that waited least
  for the others, seen by the profiler in five more untimed steps, divided by `calls`. See
  `paceline.bench.traffic`.
- `peak_mib`: the largest rank's peak memory for model, optimizer and three steps, beyond what its process held
  before, in fresh processes with nobody else in them. See `paceline.bench.memory`.
- `drift`: ‖a − b‖ / ‖b‖ between the row's parameters and those of torch DDP with its default buckets, after
  five steps from the same seed, the largest of all ranks. `exact`: whether that is at most 1e-4 (float32).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from paceline.bench.entries import DDP, NO_SYNC, Entry
from paceline.bench.rounds import Round, Split, ratio, round_of, split
from paceline.durable import write_text
from paceline.units import MIB

__all__ = ["LARGEST_DRIFT", "Row", "make_rows", "write_csv"]

LARGEST_DRIFT = 1e-4

_COLUMNS = (
    *("model", "strategy", "bucket_mib", "ranks", "step_ms", "ratio_to_ddp", "peer", "ratio_to_peer"),
    *("forward_ms", "backward_ms", "exposed_ms", "optimizer_ms"),
    *("calls", "ms_per_call", "mib", "peak_mib", "drift", "exact"),
)


@dataclass(frozen=True)
class Row:
    """What was measured of one contestant; see this module's text for the columns."""

    model: str
    entry: Entry
    ranks: int
    step_ms: float
    ratio_to_ddp: float
    peer: Entry | None
    ratio_to_peer: float | None
    split_ms: Split
    calls: float
    ms_per_call: float | None
    mib: float
    peak_mib: float | None
    drift: float
    best_ddp: bool
    rounds: tuple[float, ...]

    @property
    def exact(self) -> bool | None:
        """Whether the parameters agree with torch DDP's; None for a contestant that need not."""
        if not self.entry.synchronises:
            return None
        return math.isfinite(self.drift) and self.drift <= LARGEST_DRIFT

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "model": self.model,
            **self.entry.to_json(),
            "ranks": self.ranks,
            "step_ms": self.step_ms,
            "ratio_to_ddp": self.ratio_to_ddp,
            "peer": None if self.peer is None else self.peer.to_json(),
            "ratio_to_peer": self.ratio_to_peer,
            **{f"{name}_ms": value for name, value in vars(self.split_ms).items()},
            "calls": self.calls,
            "ms_per_call": self.ms_per_call,
            "mib": self.mib,
            "peak_mib": self.peak_mib,
            "drift": self.drift if math.isfinite(self.drift) else None,
            "exact": self.exact,
            "best_ddp": self.best_ddp,
            "rounds": list(self.rounds),
        }


def make_rows(
    model: str,
    ranks: int,
    peer_of: Mapping[Entry, Entry | None],
    found: Mapping[str, Any],
    peaks: Sequence[float | None],
) -> list[Row]:
    """Return the rows of one model, in the order of `peer_of`.

    Args:
        model: its name.
        ranks: the world size.
        peer_of: the contestants, each with its peer.
        found: what the ranks measured, as `paceline.bench.worker.time_contestants` returns it.
        peaks: peak memory of each contestant in bytes; None where it was not measured.
    """
    rounds_of = {
        entry: [round_of(turn) for turn in turns]
        for entry, turns in zip(peer_of, found["seconds"], strict=True)
    }
    fastest_first = sorted(peer_of, key=lambda entry: _step_ms(rounds_of[entry]))
    champion = next(entry for entry in fastest_first if entry.strategy in DDP)
    rows = []
    for at, (entry, peer) in enumerate(peer_of.items()):
        rounds, calls, peak = rounds_of[entry], found["calls"][at], peaks[at]
        parts = split(rounds, rounds_of[Entry(NO_SYNC)])
        rows.append(
            Row(
                model=model,
                entry=entry,
                ranks=ranks,
                step_ms=_step_ms(rounds),
                ratio_to_ddp=ratio(rounds, rounds_of[champion]),
                peer=peer,
                ratio_to_peer=None if peer is None else ratio(rounds, rounds_of[peer]),
                split_ms=Split(*(1e3 * seconds for seconds in vars(parts).values())),
                calls=calls,
                ms_per_call=1e3 * found["under_way"][at] / calls if calls else None,
                mib=found["nbytes"][at] / MIB,
                peak_mib=None if peak is None else peak / MIB,
                drift=found["drift"][at],
                best_ddp=entry == champion,
                rounds=tuple(1e3 * each.step for each in rounds),
            )
        )
    return rows


def _step_ms(rounds: Sequence[Round]) -> float:
    return 1e3 * median(each.step for each in rounds)


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as CSV, one line each, without the single rounds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = StringIO()
    writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        peer = None if row.peer is None else row.peer.label
        writer.writerow(row.to_json() | {"peer": peer})
    write_text(path, text.getvalue())
