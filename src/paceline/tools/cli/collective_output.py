"""What ``paceline collective`` shows: one algorithm with all about it, or a ranking; pictures; JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from paceline._core.format import format_seconds, format_size
from paceline.collectives.closed_form_cost import CLOSED_FORMS, closed_form
from paceline.collectives.describe import describe
from paceline.collectives.prove import prove
from paceline.collectives.topology import Topology
from paceline.tools.bench.schedule_benchmark import Priced
from paceline.tools.console_table import print_wide

__all__ = ["draw", "one", "ranking"]


def one(priced: Priced, net: Topology, nbytes: int, *, as_priced: bool) -> None:
    """Print proof, price, the story round by round, and what was measured.

    Args:
        priced: the algorithm.
        net: the topology of the price.
        nbytes: size of the vector.
        as_priced: whether it was measured on links like those of `net`, so that the ratio says something.
    """
    console = Console(highlight=False, soft_wrap=True)
    made, price = priced.case.schedule(), priced.price
    prove(made)
    console.print(f"[bold]{made}[/bold]{_in_segments(priced)}")
    console.print(
        f"proven   every input is in every result exactly once: {len(made.rounds)} rounds, "
        f"{len(price.messages)} messages"
    )
    told = (
        f"priced   {format_seconds(price.seconds)} for {format_size(nbytes)} ({net.name}, {net.ranks} ranks)"
    )
    console.print(told + _formula(priced))
    if price.busiest is not None:
        carried = price.nbytes_of_link[price.busiest.name]
        busy = carried / price.busiest.bandwidth / price.seconds
        console.print(
            f"busiest  link {price.busiest.name!r}: {format_size(carried)}, busy {busy:.0%} of the time; "
            f"all messages together {format_size(price.nbytes)}"
        )
    if priced.measured is not None:
        console.print(_measured(priced, as_priced))
        for line in priced.receipts:
            console.print(f"         {line}", markup=False)
    for line in describe(made, price):
        console.print(line, markup=False)


def _in_segments(priced: Priced) -> str:
    return f", in {priced.case.segments} segments" if priced.case.segments > 1 else ""


def _formula(priced: Priced) -> str:
    """Return the closed form of an algorithm, where it has one and travels whole."""
    case = priced.case
    if case.segments > 1 or (case.op, case.algorithm) not in CLOSED_FORMS:
        return ""
    terms = closed_form(case.op, case.algorithm, case.ranks)
    added = f" + {terms.added:.4g}·γn" if terms.added else ""
    return f"; where all links are alike: {terms.messages:g}·α + {terms.sent:.4g}·βn{added}"


def _measured(priced: Priced, as_priced: bool) -> str:
    measured = priced.measured or 0.0
    ratio = " on this machine, whatever links were priced"
    if as_priced:
        ratio = f", {measured / priced.price.seconds:.2f} × the price" if priced.price.seconds else ""
    times = f"median of {len(priced.seconds)}" if len(priced.seconds) > 1 else "once"
    return f"measured {format_seconds(measured)} ({times}){ratio}; every message checked at both ends:"


def ranking(rows: Sequence[Priced], what: str, *, as_priced: bool) -> None:
    """Print all algorithms of an operation, the cheapest first; with the ratio to the price if `as_priced`."""
    ran = any(row.seconds for row in rows)
    table = Table(title=f"{rows[0].case.op}: {what}", title_justify="left", pad_edge=False, box=None)
    table.add_column("algorithm", no_wrap=True)
    names = [
        "priced",
        *(["measured"] if ran else []),
        *(["÷ price"] if ran and as_priced else []),
        "rounds",
        "messages",
        "bytes in all",
        "busiest link",
    ]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        measured = [format_seconds(row.measured)] if row.measured else []
        if row.measured and as_priced:
            measured.append(f"{row.measured / row.price.seconds:.2f}" if row.price.seconds else "")
        price = row.price
        table.add_row(
            row.case.label,
            format_seconds(price.seconds),
            *measured,
            str(len(row.case.schedule().rounds)),
            str(len(price.messages)),
            format_size(price.nbytes),
            f"{price.busiest.name}, {format_size(price.nbytes_of_link[price.busiest.name])}"
            if price.busiest
            else "",
            style="bold" if row is rows[0] else "",
        )
    print_wide(table)
    for row in rows:
        prove(row.case.schedule())
    typer.echo("All of them are proven: every input is in every result exactly once.")


def draw(rows: Sequence[Priced], what: str, path: Path) -> Path:
    """Draw one algorithm's rounds, or prices beside measured times; return the file."""
    from paceline.tools.report.charts.schedule_charts import CostBar, schedule_chart, schedule_cost_chart

    if len(rows) == 1:
        (row,) = rows
        made = row.case.schedule()
        told = f"{made}{_in_segments(row)}: {format_seconds(row.price.seconds)}"
        chart = schedule_chart(made, row.price, title=f"{told}\n{what}")
    else:
        bars = [CostBar(row.case.label, row.price.seconds, row.seconds) for row in rows]
        chart = schedule_cost_chart(bars, title=f"{rows[0].case.op}: {what}")
    chart.save(path)
    return path
