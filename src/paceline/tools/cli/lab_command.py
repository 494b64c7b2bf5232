"""``paceline lab``: runs a program on emulated hosts around a slow switch, all on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from paceline._core.files import write_json
from paceline._core.format import format_bytes, format_count, format_percent, format_seconds, plural
from paceline._core.units import parse_seconds
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.command_options import shared
from paceline.tools.console_table import make_table
from paceline.tools.result_files import check_writable, paceline_command

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.testing.netlab.lab import Lab
    from paceline.testing.netlab.lab_job import LabJob
    from paceline.testing.netlab.link_monitor import HostTotals, LinkMonitor

__all__ = ["lab"]

SCHEMA = 1


def lab(
    program: Annotated[
        list[str], Argument(metavar="PROGRAM...", help="Script (.py) or command, and its arguments.")
    ],
    nnodes: Annotated[int, shared("nnodes", " around the switch")] = 2,
    link: Annotated[str | None, shared("link", ", such as 100Mbit/s; default unlimited")] = None,
    nproc_per_node: Annotated[
        int, shared("nproc-per-node", "; 0: the program once per host, without torchrun")
    ] = 1,
    slow: Annotated[list[str] | None, shared("slow")] = None,
    latency: Annotated[str, shared("latency", ", added to every packet, such as 1ms; needs netem")] = "0s",
    timeout: Annotated[str | None, shared("timeout", " of the program, such as 10min; default none")] = None,
    json_file: JsonOption = None,
) -> None:
    """Run a program on emulated hosts around a slow switch, all on this machine, and count the bytes they send.

    Every host runs --nproc-per-node processes of the program, which form one world, started by torchrun.

    Examples: paceline lab --nnodes 4 --link 200Mbit/s examples/train.py

    paceline lab --nnodes 2 --nproc-per-node 2 --link 1Gbit/s --slow 1=100Mbit/s paceline train --steps 50

    The network needs root. It is removed however this command ends.
    """
    from rich.console import Console

    from paceline.testing.netlab.lab import Lab
    from paceline.testing.netlab.lab_requirements import check_lab_program
    from paceline.testing.netlab.link_monitor import LinkMonitor

    if nproc_per_node < 0:
        raise UsageError(
            f"--nproc-per-node {nproc_per_node}: at least 0",
            remedy="0 runs the program once per host, without torchrun",
        )
    limit = None if timeout is None else parse_seconds(timeout)
    check_lab_program(program)
    if json_file is not None:
        check_writable(json_file, "--json")
    with Lab(nnodes, link, slow=parse_slow_hosts(slow or ()), delay=latency) as net:
        console = Console(highlight=False, soft_wrap=True)
        console.print(_describe(net, nproc_per_node, latency), style="bold")
        monitor, succeeded = LinkMonitor(net), False
        job = (
            net.start_torchrun(program, ranks_per_host=nproc_per_node)
            if nproc_per_node
            else net.start(program)
        )
        try:
            _follow(job, monitor, limit, console)
            succeeded = True
        finally:
            totals = monitor.stop()
            _print_totals(totals, monitor, console)
            if json_file is not None:
                write_json(json_file, _record(totals, monitor, program, nproc_per_node, succeeded))


def parse_slow_hosts(texts: Sequence[str]) -> dict[int, str]:
    """Parse ``2=50Mbit/s`` or ``host2=50Mbit/s``; return the rates by host number.

    Raises:
        UsageError: a text has another form, or names a host again.
    """
    rate_of_host: dict[int, str] = {}
    for text in texts:
        host, equals, rate = text.partition("=")
        number = host.strip().removeprefix("host")
        if not equals or not number.isdecimal():
            raise UsageError(f"--slow {text!r} is not N=RATE", remedy="for example --slow 2=50Mbit/s")
        if int(number) in rate_of_host:
            raise UsageError(f"--slow names host {number} twice", remedy="give each host one rate")
        rate_of_host[int(number)] = rate
    return rate_of_host


def _describe(net: Lab, ranks: int, delay: str) -> str:
    """Return hosts, ranks, links and delay in one line."""
    usual = max(set(net.rates), key=net.rates.count)
    others = [f"host{host} {_format_rate(rate)}" for host, rate in enumerate(net.rates) if rate != usual]
    parts = [
        plural(net.hosts, "host"),
        f"{plural(ranks, 'rank')} each" if ranks else "the program once on each",
        f"links {', '.join([_format_rate(usual), *others])}",
    ]
    if parse_seconds(delay):
        parts.append(f"{format_seconds(parse_seconds(delay))} delay")
    return "; ".join(parts)


def _record(
    totals: Sequence[HostTotals],
    monitor: LinkMonitor,
    program: Sequence[str],
    ranks: int,
    succeeded: bool,
) -> dict[str, object]:
    """Return the measurements for a JSON file; rates in bytes per second."""
    return {
        "kind": "lab",
        "schema": SCHEMA,
        "command": paceline_command(),
        "program": list(program),
        "ranks_per_host": ranks,
        "ended_well": succeeded,
        "seconds": monitor.seconds,
        "hosts": [asdict(host) for host in totals],
    }


def _follow(job: LabJob, monitor: LinkMonitor, limit: float | None, console: Console) -> None:
    """Print the output of the hosts, and below it the traffic of the links, until all hosts have ended."""
    from rich.text import Text

    from paceline.testing.netlab.lab_job import is_torchrun_failure

    failed: set[int] = set()  # hosts where a rank failed: torchrun's own traceback follows and is not shown

    def update() -> None:
        for host, line in job.lines():
            if host not in failed:
                console.print(Text.assemble((f"host{host} | ", "cyan"), Text.from_ansi(line)))
            if is_torchrun_failure(line):
                failed.add(host)
        if monitor.update():
            status.update(_progress(monitor))

    with console.status(_progress(monitor)) as status:
        try:
            job.wait(limit, on_poll=update)
        finally:
            job.end()
            update()


def _progress(monitor: LinkMonitor) -> str:
    if not monitor.seconds:
        return "starting"
    sent, rate = sum(host.sent for host in monitor.totals()), _format_rate(monitor.current_rate)
    return f"{format_seconds(round(monitor.seconds))}: {format_bytes(sent)} sent, now {rate}"


def _print_totals(totals: Sequence[HostTotals], monitor: LinkMonitor, console: Console) -> None:
    rows = [
        [
            host.name,
            _format_rate(host.rate),
            format_bytes(host.sent),
            format_bytes(host.received),
            _format_utilisation(max(host.sent, host.received) / monitor.seconds, host.rate),
            _format_utilisation(host.busiest, host.rate),
        ]
        for host in totals
    ]
    console.print()
    console.print(make_table(("host", "link", "sent", "received", "mean", "busiest second"), rows))
    console.print(f"in {format_seconds(monitor.seconds)}; rates are those of the busier direction")


def _format_utilisation(rate: float, limit: float | None) -> str:
    return _format_rate(rate) if limit is None else f"{_format_rate(rate)} ({format_percent(rate / limit)})"


def _format_rate(rate: float | None) -> str:
    if rate is None:
        return "unlimited"
    count = format_count(rate * 8)
    return f"{count}bit/s" if count[-1].isalpha() else f"{count} bit/s"
