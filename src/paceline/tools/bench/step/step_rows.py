"""The rows of `paceline bench step`, and how each column is obtained.

- `step_ms`, `rounds`: the whole step; see [Note: rounds] in `paceline.tools.bench.turn_order`.
- `ratio_to_ddp`: against torch DDP's best row, that with the least `step_ms` of all its bucket sizes and with or
  without a static graph. `ratio_to_peer`: against torch doing the same kind of work
  (`paceline.tools.bench.step.step_strategies`).
- `forward_ms`, `backward_ms`: computing; `exposed_ms`: standing still for communication; `optimizer_ms`: the
  update with `zero_grad`, without waiting. They add up to `step_ms`; see `paceline.tools.bench.turn_order.split`.
  What the optimizer's step waits is told by Paceline's own clock, and for torch's ZeRO by the time of its broadcasts.
- `calls`, `mib`: collectives that one rank launches in a step, and their payload, seen by a dispatch mode in a
  step that is not timed. `ms_per_call`: the time in which some call was under way on the rank that waited least
  for the others, seen by the profiler in five more untimed steps, divided by `calls`. See
  `paceline.tools.bench.step.comm_traffic`.
- `peak_mib`: the largest rank's peak memory for model, optimizer and three steps, beyond what its process held
  before, in fresh processes with nobody else in them. See `paceline.tools.bench.peak_memory`.
- `drift`: ‖a − b‖ / ‖b‖ between the row's parameters and those of torch DDP with its default buckets, after
  five steps from the same seed, the largest of all ranks. `exact`: whether that is at most 1e-4 (float32).

Rows as a table for a terminal.
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

from rich.table import Table

from paceline._core.files import write_text
from paceline._core.units import MIB
from paceline.tools.bench.step.step_strategies import DDP, NO_SYNC, TITLES, Entry
from paceline.tools.bench.turn_order import Round, Split, ratio, round_of, split

__all__ = ["FOOTER", "LARGEST_DRIFT", "Row", "make_rows", "table", "write_csv"]

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
        found: what the ranks measured, as `paceline.tools.bench.step.step_worker.time_contestants` returns it.
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


FOOTER = (
    "Milliseconds are medians over rounds in which all contestants took turns; the slowest rank counts.\n"
    "÷ DDP: against torch DDP's best row (*), round by round. ÷ peer: against torch doing the same kind of work.\n"
    "Forward and backward are computing, as without synchronisation; exposed is what they take beyond that, and\n"
    "waiting in the optimizer's step. Calls, milliseconds per call and MiB: one rank, one step.\n"
    "Peak: memory of model, optimizer and training, beyond what the process held before."
)


def table(rows: Sequence[Row]) -> Table:
    """Return the rows of one model as a table; the fastest synchronised row is bold, a wrong one red."""
    first = rows[0]
    made = Table(title=f"{first.model}, {first.ranks} ranks", title_justify="left", pad_edge=False, box=None)
    made.add_column("strategy", no_wrap=True)
    for name in ("bucket", "step", "÷ DDP", "÷ peer", "forward", "backward", "exposed", "optimizer"):
        made.add_column(name, justify="right", no_wrap=True)
    for name in ("calls", "ms/call", "MiB", "peak MiB"):
        made.add_column(name, justify="right", no_wrap=True)
    fastest = min((row for row in rows if row.entry.synchronises), key=lambda row: row.step_ms)
    for row in rows:
        wrong = row.exact is False
        style = "red" if wrong else "bold" if row is fastest else ""
        made.add_row(*_cells(row), style=style)
        if wrong:
            made.add_row(f"  WRONG: {row.drift:.1e} > {LARGEST_DRIFT:g}", style="red")
    return made


def _cells(row: Row) -> list[str]:
    split = row.split_ms
    times = [f"{value:.1f}" for value in (split.forward, split.backward, split.exposed, split.optimizer)]
    return [
        TITLES[row.entry.strategy] + (" *" if row.best_ddp else ""),
        row.entry.bucket,
        f"{row.step_ms:.1f}",
        f"{row.ratio_to_ddp:.2f}",
        "" if row.ratio_to_peer is None else f"{row.ratio_to_peer:.2f}",
        *times,
        f"{row.calls:g}",
        "" if row.ms_per_call is None else f"{row.ms_per_call:.2f}",
        f"{row.mib:.2f}",
        "" if row.peak_mib is None else f"{row.peak_mib:.1f}",
    ]
