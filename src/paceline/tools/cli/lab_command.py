"""``paceline lab``: a program on hosts around a slow switch, all on this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.files import write_json
from paceline._core.format import format_bytes, format_count, format_seconds
from paceline._core.units import parse_seconds
from paceline.errors import UsageError
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.testing.netlab.lab import Lab
    from paceline.testing.netlab.lab_job import LabJob
    from paceline.testing.netlab.link_monitor import HostTotals, LinkMonitor

__all__ = ["lab"]

SCHEMA = 1


def lab(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM...", help="A Python script (.py) or any command, and its own arguments."
        ),
    ],
    hosts: Annotated[int, typer.Option(help="Hosts around the switch.")] = 2,
    rate: Annotated[
        str | None, typer.Option(help="Of every link, each direction: 100Mbit/s, 1Gbit/s; else unlimited.")
    ] = None,
    ranks: Annotated[
        int, typer.Option(help="Ranks on each host; 0: the program once, without torchrun.")
    ] = 1,
    slow: Annotated[
        list[str] | None, typer.Option(metavar="HOST=RATE", help="A host with another rate; may be repeated.")
    ] = None,
    delay: Annotated[str, typer.Option(help="What a packet takes longer, such as 1ms; needs netem.")] = "0s",
    timeout: Annotated[
        str | None, typer.Option(help="End the program after this time, such as 10min; else never.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was measured there.")
    ] = None,
) -> None:
    """Run a program on hosts around a slow switch, all on this machine, and count what they send.

    Every host runs --ranks processes of the program; all together are one world, started by torchrun.

    Examples: paceline lab --hosts 4 --rate 200Mbit/s examples/train.py

    paceline lab --hosts 2 --ranks 2 --rate 1Gbit/s --slow 1=100Mbit/s paceline train --steps 50

    Making the network needs root. It is gone afterwards, however this command ends.
    """
    from paceline.testing.netlab.lab import Lab
    from paceline.testing.netlab.lab_requirements import check_program
    from paceline.testing.netlab.link_monitor import LinkMonitor

    if ranks < 0:
        raise UsageError(f"--ranks {ranks}: at least 0", remedy="0 runs the program once per host, by itself")
    limit = None if timeout is None else parse_seconds(timeout)
    check_program(program)
    if json_file is not None:
        check_writable(json_file, "--json")
    with Lab(hosts, rate, slow=parse_slow_hosts(slow or ()), delay=delay) as net:
        console = _console()
        console.print(describe_lab(net, ranks, delay), style="bold")
        watch, well = LinkMonitor(net), False
        job = net.start_torchrun(program, ranks_per_host=ranks) if ranks else net.start(program)
        try:
            _follow(job, watch, limit, console)
            well = True
        finally:
            totals = watch.stop()
            _show(totals, watch, console)
            if json_file is not None:
                measured = lab_record(totals, watch, program, ranks, well)
                write_json(json_file, measured)


def parse_slow_hosts(texts: Sequence[str]) -> dict[int, str]:
    """Return the rates of ``2=50Mbit/s`` or ``host2=50Mbit/s``, by number of host.

    Raises:
        UsageError: a text of another form, or a host twice.
    """
    rate_of_host: dict[int, str] = {}
    for text in texts:
        host, equals, rate = text.partition("=")
        number = host.strip().removeprefix("host")
        if not equals or not number.isdecimal():
            raise UsageError(f"--slow {text!r} is no HOST=RATE", remedy="for example --slow 2=50Mbit/s")
        if int(number) in rate_of_host:
            raise UsageError(f"--slow names host {number} twice", remedy="give each host one rate")
        rate_of_host[int(number)] = rate
    return rate_of_host


def describe_lab(net: Lab, ranks: int, delay: str) -> str:
    """Return one line about what runs where."""
    usual = max(set(net.rates), key=net.rates.count)
    others = [f"host{host} {_rate(rate)}" for host, rate in enumerate(net.rates) if rate != usual]
    parts = [
        f"{net.hosts} host{'s' * (net.hosts > 1)}",
        f"{ranks} rank{'s' * (ranks > 1)} each" if ranks else "the program once on each",
        f"links {_rate(usual)}{''.join(f', {other}' for other in others)}",
    ]
    if parse_seconds(delay):
        parts.append(f"{format_seconds(parse_seconds(delay))} delay")
    return "; ".join(parts)


def lab_record(
    totals: Sequence[HostTotals], watch: LinkMonitor, program: Sequence[str], ranks: int, well: bool
) -> dict[str, object]:
    """Return what was measured, for a JSON file; rates in bytes per second."""
    return {
        "kind": "lab",
        "schema": SCHEMA,
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "program": list(program),
        "ranks_per_host": ranks,
        "ended_well": well,
        "seconds": watch.seconds,
        "hosts": [asdict(one) for one in totals],
    }


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def _follow(job: LabJob, watch: LinkMonitor, limit: float | None, console: Console) -> None:
    """Print what the hosts say as they say it, below it what passes over the links, until all have ended."""
    from rich.text import Text

    from paceline.testing.netlab.lab_job import is_failure_report

    over: set[int] = set()  # hosts where a rank failed: what follows is torchrun's own traceback

    def look() -> None:
        for host, line in job.lines():
            if host not in over:
                console.print(Text.assemble((f"host{host} | ", "cyan"), Text.from_ansi(line)))
            if is_failure_report(line):
                over.add(host)
        if watch.look():
            status.update(_progress(watch))

    with console.status(_progress(watch)) as status:
        try:
            job.wait(limit, look=look)
        finally:
            job.end()
            look()


def _progress(watch: LinkMonitor) -> str:
    if not watch.seconds:
        return "starting"
    sent = sum(one.sent for one in watch.totals())
    return f"{format_seconds(round(watch.seconds))}: {format_bytes(sent)} sent, now {_rate(watch.now)}"


def _show(totals: Sequence[HostTotals], watch: LinkMonitor, console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("host", "link", "sent", "received", "mean", "busiest second"):
        table.add_column(title, justify="left" if title == "host" else "right", no_wrap=True)
    for one in totals:
        mean = max(one.sent, one.received) / watch.seconds
        amounts = format_bytes(one.sent), format_bytes(one.received)
        table.add_row(
            one.name, _rate(one.rate), *amounts, _share(mean, one.rate), _share(one.busiest, one.rate)
        )
    took = f"in {format_seconds(watch.seconds)}; rates are those of the busier direction"
    console.print()
    console.print(table)
    console.print(took)


def _share(rate: float, limit: float | None) -> str:
    return _rate(rate) if limit is None else f"{_rate(rate)} ({rate / limit:.0%})"


def _rate(rate: float | None) -> str:
    if rate is None:
        return "unlimited"
    count = format_count(rate * 8)
    return f"{count}bit/s" if count[-1].isalpha() else f"{count} bit/s"
