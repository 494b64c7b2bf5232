"""Rows of `paceline bench step`: from seconds to columns, as JSON, CSV and a table.

- `step_ms`, `rounds`: the whole step; see [Note: turns] in `paceline.tools.bench.turn_statistics`.
- `ratio_to_ddp`: to torch DDP's best row, that with the least `step_ms` of all its bucket sizes and with or without a
  static graph. `ratio_to_peer`: to torch doing the same kind of work
  (`paceline.tools.bench.step.step_strategies`).
- `forward_ms`, `backward_ms`: computing; `exposed_ms`: waiting for communication; `optimizer_ms`: the update with
  `zero_grad`, without waiting. They add up to `step_ms`; see `paceline.tools.bench.turn_statistics.step_breakdown`.
  Waiting in the optimizer's step is measured by Paceline's own clock, for torch's ZeRO by the time of its broadcasts.
- `calls`, `mib`: collectives that one rank launches in a step, and their payload, counted by a dispatch mode in a step
  that is not timed. `ms_per_call`: the time in which any collective was pending on the rank that waited least for the
  others, measured by the profiler in five more untimed steps, divided by `calls`. See
  `paceline.tools.bench.step.comm_traffic`.
- `peak_mib`: the largest rank's peak memory for model, optimizer and three steps, in fresh processes per strategy,
  beyond that of its process after two steps of the model `tiny`, trained in the same way. Memory that ranks share
  counts in the one that allocated it. See `paceline.tools.bench.peak_memory`.
- `drift`: ‖a − b‖ / ‖b‖ between the row's parameters and those of torch DDP with its default buckets, after five steps
  from the same seed, the largest of all ranks. `exact`: whether that is at most 1e-4 (float32).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline._core.files import write_text
from paceline._core.units import MIB
from paceline.tools.bench.step.step_strategies import (
    DDP_STRATEGIES,
    NO_SYNC,
    STRATEGY_TITLES,
    StrategyVariant,
)
from paceline.tools.bench.turn_statistics import (
    RoundTimes,
    StepBreakdown,
    median_ratio,
    round_times,
    step_breakdown,
)
from paceline.tools.console_table import make_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LARGEST_DRIFT", "STEP_FOOTER", "StepRow", "make_step_rows", "step_table", "write_step_csv"]

LARGEST_DRIFT = 1e-4
"""Of a strategy whose results count as exact."""

_CSV_COLUMNS = (
    *("model", "strategy", "bucket_mib", "ranks", "step_ms", "ratio_to_ddp", "peer", "ratio_to_peer"),
    *("forward_ms", "backward_ms", "exposed_ms", "optimizer_ms"),
    *("calls", "ms_per_call", "mib", "peak_mib", "drift", "exact"),
)
_TABLE_COLUMNS = (
    *("strategy", "bucket", "step", "÷ DDP", "÷ peer", "forward", "backward", "exposed", "optimizer"),
    *("calls", "ms/call", "MiB", "peak MiB"),
)


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """Measurements of one strategy; the columns are described in the text of this module."""

    model: str
    variant: StrategyVariant
    ranks: int
    step_ms: float
    ratio_to_ddp: float
    peer: StrategyVariant | None
    ratio_to_peer: float | None
    breakdown_ms: StepBreakdown
    calls: float
    ms_per_call: float | None
    mib: float
    peak_mib: float | None
    drift: float
    best_ddp: bool
    rounds: tuple[float, ...]

    @property
    def exact(self) -> bool | None:
        """Whether the parameters agree with torch DDP's; None for a strategy that does not synchronise."""
        if not self.variant.synchronises:
            return None
        return math.isfinite(self.drift) and self.drift <= LARGEST_DRIFT

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON."""
        columns = ("calls", "ms_per_call", "mib", "peak_mib")
        return {
            "model": self.model,
            **self.variant.to_json(),
            "ranks": self.ranks,
            "step_ms": self.step_ms,
            "ratio_to_ddp": self.ratio_to_ddp,
            "peer": None if self.peer is None else self.peer.to_json(),
            "ratio_to_peer": self.ratio_to_peer,
            **{f"{name}_ms": value for name, value in vars(self.breakdown_ms).items()},
            **{name: getattr(self, name) for name in columns},
            "drift": self.drift if math.isfinite(self.drift) else None,
            "exact": self.exact,
            "best_ddp": self.best_ddp,
            "rounds": list(self.rounds),
        }


def make_step_rows(
    model: str,
    ranks: int,
    peer_of: Mapping[StrategyVariant, StrategyVariant | None],
    found: Mapping[str, Any],
    peaks: Sequence[float | None],
) -> list[StepRow]:
    """Return the rows of one model, in the order of `peer_of`.

    Args:
        model: its name.
        ranks: the world size.
        peer_of: the benchmarked variants, each with its peer.
        found: the result of `paceline.tools.bench.step.step_worker.time_strategies`.
        peaks: peak memory of each variant in bytes; None if it was not measured.
    """
    rounds_of = {
        variant: [round_times(turn) for turn in turns]
        for variant, turns in zip(peer_of, found["seconds"], strict=True)
    }
    fastest_first = sorted(peer_of, key=lambda variant: _step_ms(rounds_of[variant]))
    best_ddp = next(variant for variant in fastest_first if variant.strategy in DDP_STRATEGIES)
    rows = []
    for at, (variant, peer) in enumerate(peer_of.items()):
        rounds, calls, peak = rounds_of[variant], found["calls"][at], peaks[at]
        parts = step_breakdown(rounds, rounds_of[StrategyVariant(NO_SYNC)])
        rows.append(
            StepRow(
                model=model,
                variant=variant,
                ranks=ranks,
                step_ms=_step_ms(rounds),
                ratio_to_ddp=median_ratio(rounds, rounds_of[best_ddp]),
                peer=peer,
                ratio_to_peer=None if peer is None else median_ratio(rounds, rounds_of[peer]),
                breakdown_ms=StepBreakdown(*(1e3 * seconds for seconds in vars(parts).values())),
                calls=calls,
                ms_per_call=1e3 * found["comm_seconds"][at] / calls if calls else None,
                mib=found["nbytes"][at] / MIB,
                peak_mib=None if peak is None else peak / MIB,
                drift=found["drift"][at],
                best_ddp=variant == best_ddp,
                rounds=tuple(1e3 * each.step for each in rounds),
            )
        )
    return rows


def _step_ms(rounds: Sequence[RoundTimes]) -> float:
    return 1e3 * median(each.step for each in rounds)


def write_step_csv(path: Path, rows: Sequence[StepRow]) -> None:
    """Write the rows as CSV, one line each, without the single rounds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = StringIO()
    writer = csv.DictWriter(text, _CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row.to_json() | {"peer": None if row.peer is None else row.peer.label})
    write_text(path, text.getvalue())


STEP_FOOTER = (
    "Milliseconds are medians over rounds of interleaved runs; the slowest rank counts.\n"
    "÷ DDP: ratio to torch DDP's best row (*), round by round. ÷ peer: ratio to torch doing the same kind of work.\n"
    "Forward and backward: computing, as without synchronisation; exposed: the excess over that, and waiting in\n"
    "the optimizer's step. Calls, milliseconds per call and MiB: one rank, one step.\n"
    "Peak: memory of model, optimizer and training, beyond that of the process before."
)


def step_table(rows: Sequence[StepRow]) -> Table:
    """Return the rows of one model as a table; the fastest synchronised row is bold, a wrong one red."""
    table = make_table(_TABLE_COLUMNS, title=f"{rows[0].model}, {rows[0].ranks} ranks")
    fastest = min((row for row in rows if row.variant.synchronises), key=lambda row: row.step_ms)
    for row in rows:
        wrong = row.exact is False
        table.add_row(*_cells(row), style="red" if wrong else "bold" if row is fastest else "")
        if wrong:
            table.add_row(f"  WRONG: {row.drift:.1e} > {LARGEST_DRIFT:g}", style="red")
    return table


def _cells(row: StepRow) -> list[str]:
    return [
        STRATEGY_TITLES[row.variant.strategy] + (" *" if row.best_ddp else ""),
        row.variant.bucket,
        f"{row.step_ms:.1f}",
        f"{row.ratio_to_ddp:.2f}",
        "" if row.ratio_to_peer is None else f"{row.ratio_to_peer:.2f}",
        *(f"{value:.1f}" for value in vars(row.breakdown_ms).values()),
        f"{row.calls:g}",
        "" if row.ms_per_call is None else f"{row.ms_per_call:.2f}",
        f"{row.mib:.2f}",
        "" if row.peak_mib is None else f"{row.peak_mib:.1f}",
    ]
