"""``paceline collective``: proves, prices, explains, draws and runs one algorithm, or ranks all of an operation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from paceline._core.files import write_json
from paceline._core.format import format_size
from paceline._core.units import parse_bytes, parse_rate, parse_seconds
from paceline.errors import UsageError, unknown
from paceline.tools.cli.lab_command import parse_slow_hosts
from paceline.tools.cli.shared_options import JsonOption, expand_options
from paceline.tools.result_files import check_writable, paceline_command

if TYPE_CHECKING:
    from paceline.collectives.topology import Topology
    from paceline.tools.bench.schedule_benchmark import PricedCase, ScheduleCase

__all__ = ["collective"]

_PLACES = ("none", "here", "lab")
_BACKENDS = ("gloo", "paceline")
_TOPOLOGY_OPTIONS: dict[str, tuple[str, ...]] = {  # that others than this topology refuse
    "star": ("hub", "slow"),
    "switch": ("shared", "hub", "slow"),
    "ring": (),
    "tree": (),
    "two-level": ("per_node", "between"),
}
_REQUIRED_OPTIONS = {"switch": ("shared",), "two-level": ("per_node", "between")}


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """Options of ``paceline collective`` that determine algorithms, topology and runs."""

    name: Annotated[str, Argument(help="Algorithm (ring, all-gather/bruck …) or operation (broadcast …).")]
    ranks: Annotated[int, Option(help="Number of ranks.")] = 8
    nbytes: Annotated[str, Option("--bytes", help="Size of the vector.")] = "5MB"
    link: Annotated[str, Option(help="Bandwidth of every link, each direction.")] = "1Gbit/s"
    latency: Annotated[str, Option(help="Latency of a message between ranks.")] = "0s"
    add: Annotated[
        str | None, Option(help="Rate at which a rank adds, such as 4GB/s; default infinitely fast.")
    ] = None
    op: Annotated[str | None, Option(help="Operation, if several have such an algorithm.")] = None
    topology: Annotated[str, Option(help="star, switch, ring, tree or two-level.")] = "star"
    shared: Annotated[str | None, Option(help="Topology switch: total bandwidth, such as 4Gbit/s.")] = None
    per_node: Annotated[int | None, Option(help="Topology two-level: ranks per node.")] = None
    between: Annotated[str | None, Option(help="Topology two-level: bandwidth between nodes.")] = None
    slow: Annotated[
        list[str] | None, Option(metavar="RANK=RATE", help="Bandwidth of one link; may be repeated.")
    ] = None
    hub: Annotated[int | None, Option(help="Topology star: rank that is the switch.")] = None
    root: Annotated[int, Option(help="Root of a broadcast or reduce.")] = 0
    segments: Annotated[str, Option(help="Pieces per chunk, pipelined; auto: the number that pays.")] = "1"
    compare: Annotated[
        bool, Option("--compare", help="Rank all algorithms of the operation, best first.")
    ] = False
    run: Annotated[str, Option(help="here: on this machine; lab: on emulated hosts; none.")] = "none"
    backend: Annotated[str, Option(help="Backend of --run: gloo or paceline.")] = "gloo"
    iterations: Annotated[int, Option(help="Repetitions of --run.")] = 3
    stream: Annotated[
        bool, Option("--stream", help="With --run: forward pieces at once, not round by round.")
    ] = False

    @property
    def size(self) -> int:
        """Size of the vector in bytes."""
        return parse_bytes(self.nbytes)

    @property
    def seconds_per_byte_added(self) -> float:
        """γ of the cost model."""
        return 0.0 if self.add is None else 1 / _positive_rate("--add", self.add)

    @property
    def slow_rates(self) -> dict[int, float]:
        """Bandwidths of `slow`, by rank."""
        return {
            rank: _positive_rate("--slow", rate) for rank, rate in parse_slow_hosts(self.slow or ()).items()
        }


@expand_options
def collective(
    options: CollectiveOptions,
    draw: Annotated[Path | None, Option(metavar="FILE", help="Draw it: .png or .svg.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Show the steps and the cost of a collective algorithm.

    Examples: paceline collective ring --ranks 8 --bytes 5MB --link 1MB/s --draw ring.png

    paceline collective broadcast --ranks 8 --bytes 5MB --link 1MB/s --compare --run lab
    """
    from paceline.tools.bench.schedule_benchmark import price_cases, schedule_result
    from paceline.tools.cli import collective_output

    if options.run not in _PLACES:
        raise unknown("place to run", options.run, _PLACES)
    if options.backend not in _BACKENDS:
        raise unknown("backend", options.backend, _BACKENDS)
    size, gamma = options.size, options.seconds_per_byte_added
    net = _topology(options)
    cases = _cases(options, net)
    _check_files(draw, json_file)
    as_priced, ran = options.run == "lab", options.run != "none"
    if as_priced and options.topology != "star":
        raise UsageError(
            f"--run lab emulates a star, not {options.topology}", remedy="leave --topology out, or --run"
        )
    priced = price_cases(cases, net, size, gamma)
    if ran:
        priced = _run(priced, options)
    title = f"{format_size(size)}, {net.name}, {options.ranks} ranks, links {options.link}"
    if len(cases) == 1:
        collective_output.print_algorithm(priced[0], net, size, as_priced=as_priced)
    else:
        collective_output.print_ranking(priced, title, as_priced=as_priced)
    if draw is not None:
        typer.echo(collective_output.save_chart(priced, title, draw))
    if json_file is not None:
        settings = {
            "nbytes": size,
            "link": options.link,
            "latency": options.latency,
            "run": options.run,
            "stream": options.stream,
            "backend": options.backend if ran else None,
            "seconds_per_byte_added": gamma,
        }
        write_json(json_file, schedule_result(priced, net, settings, paceline_command()))
        typer.echo(json_file)


def _positive_rate(option: str, text: str) -> float:
    rate = parse_rate(text)
    if not rate > 0:
        raise UsageError(f"{option} {text}: must be above 0", remedy="for example 100Mbit/s")
    return rate


def _topology(options: CollectiveOptions) -> Topology:
    """Return the topology that the options describe.

    Raises:
        UsageError: an option belongs to another topology, is missing, or names a rank that does not exist.
    """
    from paceline.collectives import topology

    kind, ranks = options.topology, options.ranks
    if kind not in _TOPOLOGY_OPTIONS:
        raise unknown("topology", kind, tuple(_TOPOLOGY_OPTIONS))
    for name in ("shared", "per_node", "between", "hub", "slow"):
        if getattr(options, name) not in (None, []) and name not in _TOPOLOGY_OPTIONS[kind]:
            raise UsageError(
                f"--{name.replace('_', '-')} is not for --topology {kind}",
                remedy="leave it out, or name another topology",
            )
    for name in _REQUIRED_OPTIONS.get(kind, ()):
        if getattr(options, name) is None:
            raise UsageError(f"--topology {kind} needs --{name.replace('_', '-')}", remedy="see --help")
    rate, seconds = _positive_rate("--link", options.link), parse_seconds(options.latency)
    if kind == "ring":
        return topology.ring(ranks, rate, seconds)
    if kind == "tree":
        return topology.tree(ranks, rate, seconds)
    if kind == "two-level":
        between = _positive_rate("--between", options.between or "")
        return topology.two_level(ranks, options.per_node or 0, rate, between, seconds)
    slow, hub = options.slow_rates, options.hub
    for rank in [*slow, *([hub] if hub is not None else [])]:
        if not 0 <= rank < ranks:
            raise UsageError(f"there is no rank {rank}", remedy=f"valid: 0 to {ranks - 1}")
    rates = [slow.get(rank, rate) for rank in range(max(ranks, 0))]
    total = math.inf if options.shared is None else _positive_rate("--shared", options.shared)
    return topology.star(ranks, rates, seconds, switch=total, hub=hub)


def _cases(options: CollectiveOptions, net: Topology) -> list[ScheduleCase]:
    """Return the algorithm that the options name, or all of the operation, the cheapest first."""
    from paceline.collectives.algorithms import find_algorithm
    from paceline.collectives.prove import OPS
    from paceline.tools.bench.schedule_benchmark import ScheduleCase, best_segments, candidate_cases

    size, gamma, compare = options.size, options.seconds_per_byte_added, options.compare
    if options.name in OPS and options.op is None:
        op, algorithm, compare = options.name, "", True
    else:
        op, algorithm = find_algorithm(options.name, options.op)
    if compare:
        found = list(candidate_cases(op, net, size, gamma, options.root))
        return sorted(found, key=lambda case: case.price(net, size, gamma).seconds)
    per_node = max(2, net.per_node) if algorithm == "two-level" else None

    def case(segments: int) -> ScheduleCase:
        return ScheduleCase(op, algorithm, net.ranks, root=options.root, segments=segments, per_node=per_node)

    text = options.segments
    if text == "auto":
        return [case(best_segments(lambda segments: case(segments).price(net, size, gamma).seconds))]
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--segments {text}", remedy="give 1 or more, or auto")
    return [case(int(text))]


def _check_files(draw: Path | None, json_file: Path | None) -> None:
    if draw is not None:
        from paceline.tools.result_files import require_matplotlib

        require_matplotlib()
        if draw.suffix not in (".png", ".svg"):
            raise UsageError(f"--draw {draw}: not a picture", remedy="name a .png or .svg file")
        check_writable(draw, "--draw", make_folder=True)
    if json_file is not None:
        check_writable(json_file, "--json", make_folder=True)


def _run(priced: Sequence[PricedCase], options: CollectiveOptions) -> list[PricedCase]:
    """Run the cases, on this machine or on emulated hosts with such links."""
    from paceline.launch.process.local_ranks import run_ranks
    from paceline.testing.netlab import Lab
    from paceline.tools.bench.schedule_benchmark import run_cases

    run_options = {
        "nbytes": options.size,
        "iterations": options.iterations,
        "backend": options.backend,
        "stream": options.stream,
    }
    if options.run == "here":
        return run_cases(priced, run_ranks, network="this machine", **run_options)
    ranks, link = options.ranks, options.link
    with Lab(hosts=ranks, rate=link, slow=options.slow_rates) as lab:
        if options.hub is not None:
            lab.rate(options.hub, None)

        def start(argv: Sequence[str], ranks: int, *, env: Mapping[str, str]) -> None:
            job = lab.start_torchrun(argv, ranks_per_host=1, env=env)
            try:
                job.wait(
                    on_poll=lambda: [typer.echo(line, err=True) for host, line in job.lines() if host == 0]
                )
            finally:
                job.end()

        return run_cases(priced, start, network=f"a lab of {ranks} hosts, links {link}", **run_options)
