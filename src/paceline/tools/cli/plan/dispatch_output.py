"""What ``paceline dispatch`` shows: samples and batches, policies, imbalance, safe sizes.

What ``paceline dispatch`` writes: JSON, the table as CSV, two charts.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline._core.files import write_json, write_text
from paceline.tools.console_table import print_wide
from paceline.tools.plan.balance_report import Outcome
from paceline.tools.plan.dispatch_forecast import SCHEMA, Asked, Forecast
from paceline.tools.plan.dispatch_text import in_short, of_bias, of_loop, of_outcome, of_safe, percent
from paceline.tools.report.charts.chart_style import Chart
from paceline.tools.result_files import check_writable, require_matplotlib

__all__ = ["amounts", "plan_files", "result", "show", "title"]


def show(asked: Asked, found: Sequence[Forecast]) -> None:
    """Print all of it."""
    print_wide(_batches(asked, found))
    print_wide(_policies(asked, found))
    print_wide(_imbalance(asked, found))
    console = Console(highlight=False)
    outcomes = [
        (f"block {each.block}, batch {each.batch_size}", outcome)
        for each in found
        for outcome in each.balance.outcomes
    ]
    for line in [*of_bias(outcomes, asked.samples), *_safe(asked, found)]:
        console.print(line, markup=False)


def title(asked: Asked) -> str:
    """Return what is dealt, to whom and how."""
    scheme = {"round_robin": "round-robin", "random": f"random, seed {asked.seed}", "shares": "by shares"}
    return f"{amounts(asked)}, {scheme[asked.scheme]}"


def amounts(asked: Asked) -> str:
    """Return what is dealt, and to whom."""
    ranks = asked.shares.ranks
    told = f"{asked.samples:,} sample{'s' * (asked.samples != 1)}, {ranks} rank{'s' * (ranks != 1)}"
    return told + (f" ({asked.shares})" if len(set(asked.shares.parts)) > 1 and ranks <= 10 else "")


def _table(heading: str, *columns: str) -> Table:
    table = Table(title=heading, title_justify="left", pad_edge=False, box=None)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _batches(asked: Asked, found: Sequence[Forecast]) -> Table:
    table = _table(title(asked), "block", "batch")
    table.add_column("")
    table.add_column("of the ranks", no_wrap=True)
    taken = "its full" if asked.drop_last else "all its"
    widest = max(len(in_short(each.balance.dealing.counts)) for each in found)
    table.add_column(f"if each loops over {taken} batches", max_width=max(26, 60 - widest))
    for each in found:
        balance = each.balance
        rows = [
            ("samples", balance.dealing.counts),
            ("full batches (floor)", balance.full_batches),
            ("all batches (ceiling)", balance.all_batches),
        ]
        table.add_row(
            str(each.block),
            str(each.batch_size),
            "\n".join(name for name, _ in rows),
            "\n".join(in_short(numbers) for _, numbers in rows),
            of_loop(balance),
        )
    return table


def _policies(asked: Asked, found: Sequence[Forecast]) -> Table:
    heading = "An epoch under each policy (none: every rank loops over its own batches and weighs the same)"
    table = _table(heading, "block", "batch")
    table.add_column("policy", max_width=19)
    for name in ("\nsteps", "samples\nnever used", "samples\nused again", "empty\nbatches", "weight\nmoved"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("every sample\nused once", no_wrap=True)
    for each in found:
        place = str(each.block), str(each.batch_size)
        for names, outcome in _alike(each.balance.outcomes):
            table.add_row(*place, names, *_figures(outcome, asked.samples), of_outcome(outcome))
            place = "", ""
    return table


def _alike(outcomes: Sequence[Outcome]) -> list[tuple[str, Outcome]]:
    """Return policies that come to the same, together."""
    names_of: dict[Outcome, list[str]] = {}
    for each in outcomes:
        names_of.setdefault(replace(each, policy=""), []).append(each.policy)
    return [(", ".join(names), outcome) for outcome, names in names_of.items()]


def _figures(outcome: Outcome, samples: int) -> list[str]:
    if outcome.steps is None:
        return ["", "", "", "", ""]
    amounts = [
        f"{amount} ({percent(amount / samples)})" if amount else "0"
        for amount in (outcome.dropped, outcome.repeated)
    ]
    return [str(outcome.steps), *amounts, str(outcome.empty), percent(outcome.moved)]


def _imbalance(asked: Asked, found: Sequence[Forecast]) -> Table:
    drawn = f"{asked.draws_of_block} draws:\n"
    table = _table(
        "The rank with most for its share is above it by",
        *(
            "\nblock",
            "\nas dealt",
            "in turns:\nexact",
            "\nbelow",
            "at random:\nexpected",
            "\n1 in 1000 above",
        ),
        *((drawn + "mean", "\nworst") if asked.draws_of_block else ()),
    )
    for each in {each.block: each for each in found}.values():
        spread, seen = each.imbalance.random, each.imbalance
        numbers = [seen.dealt, seen.in_turns, seen.bound_in_turns, spread.expected, spread.unlikely]
        numbers += [number for number in (spread.drawn, spread.drawn_worst) if number is not None]
        table.add_row(str(each.block), *map(percent, numbers))
    return table


def _safe(asked: Asked, found: Sequence[Forecast]) -> list[str]:
    lines = ["", "Safe: all ranks make the same number of batches."]
    for each in {each.batch_size: each for each in found}.values():
        told = of_safe(each.safe_blocks, each.blocks_tried)
        lines.append(f"  blocks, dealt in turns, for batch {each.batch_size}: {told}")
    for each in {each.block: each for each in found}.values():
        near = next(
            (one.batch_size for one in found if one.block == each.block and one.balance.deadlock), None
        )
        told = of_safe(each.safe_batch_sizes, each.batch_sizes_tried, near)
        lines.append(f"  batch sizes for block {each.block}: {told}")
    if len(set(asked.shares.parts)) > 1:
        lines.append(
            "  any sizes at all: join, and rebalance, whose batches are as large as a rank's share asks"
        )
    return lines


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
    from paceline.tools.report.charts.dispatch_charts import imbalance_chart

    _save(paths, imbalance_chart(found, title=f"How far ranks are apart: {amounts(asked)}"))


def _draw_end(paths: Sequence[Path], asked: Asked, found: Sequence[Forecast], command: str) -> None:
    from paceline.tools.report.charts.dispatch_charts import epoch_end_chart

    _save(paths, epoch_end_chart(found, title=f"The end of an epoch: {title(asked)}"))


def _save(paths: Sequence[Path], chart: Chart) -> None:
    for path in paths:
        chart.save(path)
