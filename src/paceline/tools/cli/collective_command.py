"""``paceline collective``: proves, prices, explains, draws and runs one algorithm, or ranks all of an operation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from paceline._core.files import write_json
from paceline._core.format import format_size
from paceline._core.units import parse_bytes, parse_rate, parse_seconds
from paceline.errors import UsageError, unknown
from paceline.tools.cli.lab_command import parse_slow_hosts
from paceline.tools.cli.shared_options import JsonOption, expand_options
from paceline.tools.command_options import own, shared
from paceline.tools.result_files import check_writable, paceline_command

if TYPE_CHECKING:
    from paceline.collectives.topology import Topology
    from paceline.tools.bench.schedule_benchmark import PricedCase, ScheduleCase

__all__ = ["collective"]

_PLACES = ("none", "here", "lab")
_BACKENDS = ("gloo", "paceline")
_TOPOLOGY_OPTIONS: dict[str, tuple[str, ...]] = {  # that others than this topology refuse
    "star": ("center", "slow"),
    "switch": ("switch", "center", "slow"),
    "ring": (),
    "tree": (),
    "two-level": ("nproc_per_node", "inside"),
}
_REQUIRED_OPTIONS = {"switch": ("switch",), "two-level": ("nproc_per_node", "inside")}
_NETWORK, _ALGORITHM, _RUN = "Network", "Algorithm", "Run"


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions:
    """Options of ``paceline collective`` that determine algorithms, topology and runs."""

    name: Annotated[str, Argument(help="Algorithm (ring, all-gather/bruck …) or operation (broadcast …).")]
    world_size: Annotated[int, shared("world-size")] = 8
    nbytes: Annotated[str, shared("bytes", " of the vector")] = "5MB"
    op: Annotated[str | None, shared("op", ", if several have such an algorithm", panel=_ALGORITHM)] = None
    root: Annotated[int, own("RANK", "Root of a broadcast or reduce.", panel=_ALGORITHM)] = 0
    segments: Annotated[
        str, own("N", "Segments per chunk, pipelined; auto: the number that pays.", panel=_ALGORITHM)
    ] = "1"
    compare: Annotated[
        bool, own(None, "Rank all algorithms of the operation, best first.", "--compare", panel=_ALGORITHM)
    ] = False
    topology: Annotated[
        str, shared("topology", ": star, switch, ring, tree or two-level", panel=_NETWORK)
    ] = "star"
    link: Annotated[str, shared("link", panel=_NETWORK)] = "1Gbit/s"
    latency: Annotated[str, shared("latency", panel=_NETWORK)] = "0s"
    add: Annotated[
        str | None,
        own("RATE", "Rate at which a rank adds, such as 4GB/s; default infinitely fast.", panel=_NETWORK),
    ] = None
    switch: Annotated[
        str | None, shared("switch", ", such as 4Gbit/s; with --topology switch", panel=_NETWORK)
    ] = None
    nproc_per_node: Annotated[
        int | None, shared("nproc-per-node", ", with --topology two-level", panel=_NETWORK)
    ] = None
    inside: Annotated[str | None, shared("inside", ", with --topology two-level", panel=_NETWORK)] = None
    slow: Annotated[list[str] | None, shared("slow", panel=_NETWORK)] = None
    center: Annotated[
        int | None, own("RANK", "Rank that is the switch, with --topology star.", panel=_NETWORK)
    ] = None
    run: Annotated[
        str, own("PLACE", "Run it here, on this machine, or in a lab of emulated hosts, or none.", panel=_RUN)
    ] = "none"
    backend: Annotated[str, shared("backend", " of --run: gloo or paceline", panel=_RUN)] = "gloo"
    iterations: Annotated[int, shared("iterations", " of --run", panel=_RUN)] = 3
    stream: Annotated[
        bool, own(None, "With --run: forward pieces at once, not round by round.", "--stream", panel=_RUN)
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
    draw: Annotated[Path | None, own("FILE", "Picture to draw: .png or .svg.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Show the steps and the cost of a collective algorithm.

    Examples: paceline collective ring --world-size 8 --bytes 5MB --link 1MB/s --draw ring.png

    paceline collective broadcast --world-size 8 --bytes 5MB --link 1MB/s --compare --run lab
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
    title = f"{format_size(size)}, {net.name}, {options.world_size} ranks, links {options.link}"
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

    kind, ranks = options.topology, options.world_size
    if kind not in _TOPOLOGY_OPTIONS:
        raise unknown("topology", kind, tuple(_TOPOLOGY_OPTIONS))
    for name in ("switch", "nproc_per_node", "inside", "center", "slow"):
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
        inside = _positive_rate("--inside", options.inside or "")
        return topology.two_level(ranks, options.nproc_per_node or 0, inside, rate, seconds)
    slow, hub = options.slow_rates, options.center
    for rank in [*slow, *([hub] if hub is not None else [])]:
        if not 0 <= rank < ranks:
            raise UsageError(f"there is no rank {rank}", remedy=f"valid: 0 to {ranks - 1}")
    rates = [slow.get(rank, rate) for rank in range(max(ranks, 0))]
    total = math.inf if options.switch is None else _positive_rate("--switch", options.switch)
    return topology.star(ranks, rates, seconds, switch=total, hub=hub)


def _cases(options: CollectiveOptions, net: Topology) -> list[ScheduleCase]:
    """Return the algorithm that the options name, or all of the operation, the cheapest first."""
    from paceline.collectives.algorithms import find_algorithm
    from paceline.collectives.prove import OPS
    from paceline.tools.bench.schedule_benchmark import ScheduleCase, best_segments, candidate_cases

    size, gamma, compare = options.size, options.seconds_per_byte_added, options.compare
    name, op = options.name.replace("_", "-"), options.op and options.op.replace("_", "-")
    if name in OPS and op is None:
        op, algorithm, compare = name, "", True
    else:
        op, algorithm = find_algorithm(name, op)
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
    ranks, link = options.world_size, options.link
    with Lab(hosts=ranks, rate=link, slow=options.slow_rates) as lab:
        if options.center is not None:
            lab.rate(options.center, None)

        def start(argv: Sequence[str], ranks: int, *, env: Mapping[str, str]) -> None:
            job = lab.start_torchrun(argv, ranks_per_host=1, env=env)
            try:
                job.wait(
                    on_poll=lambda: [typer.echo(line, err=True) for host, line in job.lines() if host == 0]
                )
            finally:
                job.end()

        return run_cases(priced, start, network=f"a lab of {ranks} hosts, links {link}", **run_options)
