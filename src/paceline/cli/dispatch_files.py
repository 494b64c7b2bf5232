"""What ``paceline dispatch`` writes: JSON, the table as CSV, two charts."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

from paceline.cli.dispatch_show import amounts, title
from paceline.cli.writable import check_writable
from paceline.data.forecast import SCHEMA, Asked, Forecast
from paceline.durable import write_json, write_text
from paceline.report.canvas import Chart, require_matplotlib

__all__ = ["plan_files", "result"]

_Writer = Callable[[Sequence[Path], Asked, Sequence[Forecast], str], object]


def plan_files(json_file: Path | None, out: Path | None) -> dict[tuple[Path, ...], _Writer]:
    """Return what writes which files, once it is clear that they can be written.

    Raises:
        UsageError: a file can't be written, or charts can't be drawn.
    """
    writer_of: dict[tuple[Path, ...], _Writer] = {} if json_file is None else {(json_file,): _write_json}
    if out is not None:
        require_matplotlib()
        writer_of |= {(out / "dispatch.json",): _write_json, (out / "dispatch.csv",): _write_csv}
        for name, draw in (("imbalance", _draw_imbalance), ("end", _draw_end)):
            writer_of[out / f"dispatch-{name}.png", out / f"dispatch-{name}.svg"] = draw
    for path in chain.from_iterable(writer_of):
        check_writable(path, make_folder=True)
    return writer_of


def result(asked: Asked, found: Sequence[Forecast], command: str) -> dict[str, Any]:
    """Return all of it for JSON."""
    return {
        "kind": "dispatch",
        "schema": SCHEMA,
        "command": command,
        "settings": asked.to_json(),
        "entries": [each.to_json() for each in found],
    }


def _write_json(paths: Sequence[Path], asked: Asked, found: Sequence[Forecast], command: str) -> None:
    write_json(paths[0], result(asked, found, command), indent=None)


def _write_csv(paths: Sequence[Path], asked: Asked, found: Sequence[Forecast], command: str) -> None:
    rows = [row for each in found for row in _rows(each)]
    text = StringIO()
    writer = csv.DictWriter(text, fieldnames=rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(paths[0], text.getvalue())


def _rows(each: Forecast) -> list[dict[str, Any]]:
    """Return a row for each policy of a block and a batch size."""
    balance, imbalance = each.balance, each.imbalance
    amounts = {
        "samples": balance.dealing.counts,
        "batches_floor": balance.full_batches,
        "batches_ceil": balance.all_batches,
    }
    same: dict[str, Any] = {"block": each.block, "batch_size": each.batch_size}
    for name, numbers in amounts.items():
        same |= {f"{name}_min": min(numbers), f"{name}_max": max(numbers)}
    same |= {
        "imbalance": imbalance.dealt,
        "in_turns": imbalance.in_turns,
        "bound_in_turns": imbalance.bound_in_turns,
        **{f"random_{name}": value for name, value in asdict(imbalance.random).items()},
    }
    return [{**same, **asdict(outcome), "exact": outcome.exact} for outcome in balance.outcomes]


def _draw_imbalance(paths: Sequence[Path], asked: Asked, found: Sequence[Forecast], command: str) -> None:
    from paceline.report.dispatch_charts import imbalance_chart

    _save(paths, imbalance_chart(found, title=f"How far ranks are apart: {amounts(asked)}"))


def _draw_end(paths: Sequence[Path], asked: Asked, found: Sequence[Forecast], command: str) -> None:
    from paceline.report.dispatch_charts import end_chart

    _save(paths, end_chart(found, title=f"The end of an epoch: {title(asked)}"))


def _save(paths: Sequence[Path], chart: Chart) -> None:
    for path in paths:
        chart.save(path)
