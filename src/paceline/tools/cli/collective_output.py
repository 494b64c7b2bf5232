"""Output of ``paceline collective``: details of one algorithm, a ranking of several, charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from paceline._core.format import format_percent, format_seconds, format_size
from paceline.collectives.closed_form_cost import CLOSED_FORMS, closed_form
from paceline.collectives.prove import prove
from paceline.collectives.schedule_text import describe_schedule
from paceline.collectives.topology import Topology
from paceline.tools.bench.schedule_benchmark import PricedCase
from paceline.tools.console_table import make_table, print_wide

__all__ = ["print_algorithm", "print_ranking", "save_chart"]


def print_algorithm(priced: PricedCase, net: Topology, nbytes: int, *, as_priced: bool) -> None:
    """Print proof, price, measurement and rounds of an algorithm.

    Args:
        priced: the algorithm.
        net: topology of the price.
        nbytes: size of the vector.
        as_priced: it was measured on links like those of `net`, so that measured and priced time compare.
    """
    console = Console(highlight=False, soft_wrap=True)
    schedule, price = priced.case.schedule(), priced.price
    prove(schedule)
    console.print(f"[bold]{schedule}[/bold]{_segments_text(priced)}")
    console.print(
        f"proven   every input is in every result exactly once: {len(schedule.rounds)} rounds, "
        f"{len(price.messages)} messages"
    )
    console.print(
        f"priced   {format_seconds(price.seconds)} for {format_size(nbytes)} ({net.name}, {net.ranks} ranks)"
        + _closed_form_text(priced)
    )
    if price.busiest is not None:
        carried = price.nbytes_of_link[price.busiest.name]
        busy = carried / price.busiest.bandwidth / price.seconds
        console.print(
            f"busiest  link {price.busiest.name!r}: {format_size(carried)}, busy {format_percent(busy)} of the time; "
            f"all messages together {format_size(price.nbytes)}"
        )
    if priced.measured is not None:
        console.print(_measured_text(priced, as_priced))
        for line in priced.receipts:
            console.print(f"         {line}", markup=False)
    for line in describe_schedule(schedule, price):
        console.print(line, markup=False)


def _segments_text(priced: PricedCase) -> str:
    return f", in {priced.case.segments} segments" if priced.case.segments > 1 else ""


def _closed_form_text(priced: PricedCase) -> str:
    """Return the closed form of an unsegmented algorithm that has one."""
    case = priced.case
    if case.segments > 1 or (case.op, case.algorithm) not in CLOSED_FORMS:
        return ""
    terms = closed_form(case.op, case.algorithm, case.ranks)
    added = f" + {terms.added:.4g}·γn" if terms.added else ""
    return f"; on equal links: {terms.messages:g}·α + {terms.sent:.4g}·βn{added}"


def _measured_text(priced: PricedCase, as_priced: bool) -> str:
    measured = priced.measured or 0.0
    ratio = " on this machine, not on the priced links"
    if as_priced:
        ratio = f", {measured / priced.price.seconds:.2f}× the price" if priced.price.seconds else ""
    times = f"median of {len(priced.seconds)}" if len(priced.seconds) > 1 else "once"
    return f"measured {format_seconds(measured)} ({times}){ratio}; every message checked at both ends:"


def print_ranking(rows: Sequence[PricedCase], title: str, *, as_priced: bool) -> None:
    """Print all algorithms of an operation, the cheapest first; measured ÷ priced too if `as_priced`."""
    measured = any(row.seconds for row in rows)
    columns = ["algorithm", "priced"]
    columns += ["measured"] if measured else []
    columns += ["÷ price"] if measured and as_priced else []
    columns += ["rounds", "messages", "bytes in all", "busiest link"]
    table = make_table(columns, [], title=f"{rows[0].case.op}: {title}")
    for row in rows:
        price, times = row.price, [format_seconds(row.measured)] if row.measured else []
        if row.measured and as_priced:
            times.append(f"{row.measured / row.price.seconds:.2f}" if row.price.seconds else "")
        busiest = price.busiest
        table.add_row(
            row.case.label,
            format_seconds(price.seconds),
            *times,
            str(len(row.case.schedule().rounds)),
            str(len(price.messages)),
            format_size(price.nbytes),
            f"{busiest.name}, {format_size(price.nbytes_of_link[busiest.name])}" if busiest else "",
            style="bold" if row is rows[0] else "",
        )
    print_wide(table)
    for row in rows:
        prove(row.case.schedule())
    typer.echo("All of them are proven: every input is in every result exactly once.")


def save_chart(rows: Sequence[PricedCase], title: str, path: Path) -> Path:
    """Draw the rounds of one algorithm, or priced and measured times of several; return the file."""
    from paceline.tools.report.charts.schedule_charts import CostBar, schedule_chart, schedule_cost_chart

    if len(rows) == 1:
        (row,) = rows
        schedule = row.case.schedule()
        first_line = f"{schedule}{_segments_text(row)}: {format_seconds(row.price.seconds)}"
        chart = schedule_chart(schedule, row.price, title=f"{first_line}\n{title}")
    else:
        bars = [CostBar(row.case.label, row.price.seconds, row.seconds) for row in rows]
        chart = schedule_cost_chart(bars, title=f"{rows[0].case.op}: {title}")
    chart.save(path)
    return path
