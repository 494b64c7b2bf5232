"""Output of ``paceline data``: tables of batches, policies, imbalance and safe sizes; JSON, CSV and two charts."""

from __future__ import annotations

import csv
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline._core.files import write_json, write_text
from paceline._core.format import plural
from paceline.tools.console_table import print_wide
from paceline.tools.plan.dispatch_forecast import SCHEMA, DispatchForecast, DispatchRequest
from paceline.tools.plan.dispatch_text import (
    describe_bias,
    describe_loop,
    describe_outcome,
    describe_safe_sizes,
    percent,
    summarise_counts,
)
from paceline.tools.plan.uneven_batch_outcomes import PolicyOutcome
from paceline.tools.result_files import check_writable, require_matplotlib

__all__ = ["dispatch_files", "show_forecasts"]


def show_forecasts(request: DispatchRequest, forecasts: Sequence[DispatchForecast]) -> None:
    """Print the tables, the bias of each policy, and the safe sizes."""
    print_wide(_batch_table(request, forecasts))
    print_wide(_policy_table(request, forecasts))
    print_wide(_imbalance_table(request, forecasts))
    console = Console(highlight=False)
    outcomes = [
        (f"block {each.block}, batch {each.batch_size}", outcome)
        for each in forecasts
        for outcome in each.balance.outcomes
    ]
    for line in [*describe_bias(outcomes, request.samples), *_safe_sizes(request, forecasts)]:
        console.print(line, markup=False)


def _title(request: DispatchRequest) -> str:
    scheme = {"round_robin": "round-robin", "random": f"random, seed {request.seed}", "shares": "by shares"}
    return f"{_amounts(request)}, {scheme[request.scheme]}"


def _amounts(request: DispatchRequest) -> str:
    ranks = request.shares.ranks
    uneven = len(set(request.shares.parts)) > 1 and ranks <= 10
    ranks_text = f"{ranks} rank{'s' * (ranks != 1)}"
    return f"{plural(request.samples, 'sample')}, {ranks_text}" + f" ({request.shares})" * uneven


def _table(heading: str, *columns: str) -> Table:
    table = Table(title=heading, title_justify="left", pad_edge=False, box=None)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _batch_table(request: DispatchRequest, forecasts: Sequence[DispatchForecast]) -> Table:
    table = _table(_title(request), "block", "batch")
    table.add_column("")
    table.add_column("per rank", no_wrap=True)
    taken = "its full" if request.drop_last else "all its"
    widest = max(len(summarise_counts(each.balance.dispatch.counts)) for each in forecasts)
    table.add_column(f"if each loops over {taken} batches", max_width=max(26, 60 - widest))
    for each in forecasts:
        balance = each.balance
        rows = {
            "samples": balance.dispatch.counts,
            "full batches (floor)": balance.full_batches,
            "all batches (ceiling)": balance.all_batches,
        }
        table.add_row(
            str(each.block),
            str(each.batch_size),
            "\n".join(rows),
            "\n".join(map(summarise_counts, rows.values())),
            describe_loop(balance),
        )
    return table


def _policy_table(request: DispatchRequest, forecasts: Sequence[DispatchForecast]) -> Table:
    heading = "An epoch under each policy (none: every rank loops over its own batches, equal weights)"
    table = _table(heading, "block", "batch")
    table.add_column("policy", max_width=19)
    for name in ("\nsteps", "samples\nnever used", "samples\nused again", "empty\nbatches", "weight\nmoved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("every sample\nused once", no_wrap=True)
    for each in forecasts:
        place = str(each.block), str(each.batch_size)
        policies_of: dict[PolicyOutcome, list[str]] = {}  # policies with the same outcome share a row
        for outcome in each.balance.outcomes:
            policies_of.setdefault(replace(outcome, policy=""), []).append(outcome.policy)
        for outcome, names in policies_of.items():
            cells = _outcome_cells(outcome, request.samples)
            table.add_row(*place, ", ".join(names), *cells, describe_outcome(outcome))
            place = "", ""
    return table


def _outcome_cells(outcome: PolicyOutcome, samples: int) -> list[str]:
    if outcome.steps is None:
        return ["", "", "", "", ""]
    amounts = [
        f"{amount} ({percent(amount / samples)})" if amount else "0"
        for amount in (outcome.dropped, outcome.repeated)
    ]
    return [str(outcome.steps), *amounts, str(outcome.empty), percent(outcome.moved)]


def _imbalance_table(request: DispatchRequest, forecasts: Sequence[DispatchForecast]) -> Table:
    columns = ["\nblock", "\nas dispatched", "in turns:\nexact", "\nbelow"]
    columns += ["at random:\nexpected", "\n1 in 1000 above"]
    if request.draws_per_block:
        columns += [f"{request.draws_per_block} draws:\nmean", "\nworst"]
    table = _table("Excess of the rank that is furthest above its share", *columns)
    for each in {each.block: each for each in forecasts}.values():
        imbalance, random = each.imbalance, each.imbalance.random
        numbers = [imbalance.dealt, imbalance.in_turns, imbalance.bound_in_turns]
        numbers += [random.expected, random.unlikely]
        numbers += [number for number in (random.drawn, random.drawn_worst) if number is not None]
        table.add_row(str(each.block), *map(percent, numbers))
    return table


def _safe_sizes(request: DispatchRequest, forecasts: Sequence[DispatchForecast]) -> list[str]:
    lines = ["", "Safe: all ranks make the same number of batches."]
    for each in {each.batch_size: each for each in forecasts}.values():
        sizes = describe_safe_sizes(each.safe_blocks, each.blocks_tried)
        lines.append(f"  blocks, dispatched in turns, for batch {each.batch_size}: {sizes}")
    for each in {each.block: each for each in forecasts}.values():
        unsafe = (one for one in forecasts if one.block == each.block and one.balance.deadlock)
        near = next((one.batch_size for one in unsafe), None)
        sizes = describe_safe_sizes(each.safe_batch_sizes, each.batch_sizes_tried, near)
        lines.append(f"  batch sizes for block {each.block}: {sizes}")
    if len(set(request.shares.parts)) > 1:
        lines.append("  any sizes: join, and rebalance, whose batches are in proportion to the shares")
    return lines


_Writer = Callable[[Path, DispatchRequest, Sequence[DispatchForecast]], object]


def dispatch_files(json_file: Path | None, out: Path | None) -> dict[Path, _Writer]:
    """Return the writer of each output file, once all are known to be writable.

    Raises:
        UsageError: a file can't be written, or charts can't be drawn.
    """
    writer_of: dict[Path, _Writer] = {} if json_file is None else {json_file: _write_json}
    if out is not None:
        require_matplotlib()
        writer_of |= {out / "dispatch.json": _write_json, out / "dispatch.csv": _write_csv}
        for name, draw in (("imbalance", _draw_imbalance), ("end", _draw_end)):
            writer_of |= {out / f"dispatch-{name}.{suffix}": draw for suffix in ("png", "svg")}
    for path in writer_of:
        check_writable(path, make_folder=True)
    return writer_of


def _write_json(path: Path, request: DispatchRequest, forecasts: Sequence[DispatchForecast]) -> None:
    record = {
        "kind": "dispatch",
        "schema": SCHEMA,
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "settings": request.to_json(),
        "entries": [each.to_json() for each in forecasts],
    }
    write_json(path, record, indent=None)


def _write_csv(path: Path, request: DispatchRequest, forecasts: Sequence[DispatchForecast]) -> None:
    rows = [row for each in forecasts for row in _csv_rows(each)]
    text = StringIO()
    writer = csv.DictWriter(text, fieldnames=rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def _csv_rows(each: DispatchForecast) -> list[dict[str, Any]]:
    """Return a row for each policy of a block size and a batch size."""
    balance, imbalance = each.balance, each.imbalance
    common: dict[str, Any] = {"block": each.block, "batch_size": each.batch_size}
    for name, numbers in (
        ("samples", balance.dispatch.counts),
        ("batches_floor", balance.full_batches),
        ("batches_ceil", balance.all_batches),
    ):
        common |= {f"{name}_min": min(numbers), f"{name}_max": max(numbers)}
    common |= {
        "imbalance": imbalance.dealt,
        "in_turns": imbalance.in_turns,
        "bound_in_turns": imbalance.bound_in_turns,
        **{f"random_{name}": value for name, value in asdict(imbalance.random).items()},
    }
    return [{**common, **asdict(outcome), "exact": outcome.exact} for outcome in balance.outcomes]


def _draw_imbalance(path: Path, request: DispatchRequest, forecasts: Sequence[DispatchForecast]) -> None:
    from paceline.tools.report.charts.dispatch_charts import imbalance_chart

    imbalance_chart(forecasts, title=f"Imbalance of ranks: {_amounts(request)}").save(path)


def _draw_end(path: Path, request: DispatchRequest, forecasts: Sequence[DispatchForecast]) -> None:
    from paceline.tools.report.charts.dispatch_charts import epoch_end_chart

    epoch_end_chart(forecasts, title=f"The end of an epoch: {_title(request)}").save(path)
