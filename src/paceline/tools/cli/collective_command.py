"""``paceline collective``: proves, prices, tells, draws and runs one algorithm, or ranks all of an operation.

Options of ``paceline collective``.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline._core.files import write_json
from paceline._core.format import format_size
from paceline._core.units import parse_bytes, parse_rate, parse_seconds
from paceline.errors import UsageError, unknown
from paceline.tools.cli.lab_command import parse_slow_hosts
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.result_files import check_writable

if TYPE_CHECKING:
    from paceline.collectives.topology import Topology
    from paceline.tools.bench.schedule_benchmark import Case, Priced

__all__ = [
    "AddOption",
    "BackendOption",
    "BetweenOption",
    "BytesOption",
    "CompareOption",
    "DrawOption",
    "HubOption",
    "IterationsOption",
    "LatencyOption",
    "LinkOption",
    "NameArgument",
    "OpOption",
    "PerNodeOption",
    "RanksOption",
    "RootOption",
    "RunOption",
    "SegmentsOption",
    "SharedOption",
    "SlowOption",
    "StreamOption",
    "TopologyOption",
    "collective",
]

_TOPOLOGIES = ("star", "switch", "ring", "tree", "two-level")


_PLACES = ("none", "here", "lab")


_CARRIERS = ("gloo", "paceline")


def collective(
    name: NameArgument,
    ranks: RanksOption = 8,
    nbytes: BytesOption = "5MB",
    link: LinkOption = "1Gbit/s",
    latency: LatencyOption = "0s",
    add: AddOption = None,
    op: OpOption = None,
    topology: TopologyOption = "star",
    shared: SharedOption = None,
    per_node: PerNodeOption = None,
    between: BetweenOption = None,
    slow: SlowOption = None,
    hub: HubOption = None,
    root: RootOption = 0,
    segments: SegmentsOption = "1",
    compare: CompareOption = False,
    run: RunOption = "none",
    backend: BackendOption = "gloo",
    iterations: IterationsOption = 3,
    stream: StreamOption = False,
    draw: DrawOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show what a collective algorithm does and costs.

    Examples: paceline collective ring --ranks 8 --bytes 5MB --link 1MB/s --draw ring.png

    paceline collective broadcast --ranks 8 --bytes 5MB --link 1MB/s --compare --run lab
    """
    from paceline.tools.bench.schedule_benchmark import price, result
    from paceline.tools.cli import collective_output as show

    if run not in _PLACES:
        raise unknown("place to run", run, _PLACES)
    if backend not in _CARRIERS:
        raise unknown("backend", backend, _CARRIERS)
    size, gamma = parse_bytes(nbytes), 0.0 if add is None else 1 / _positive("--add", add)
    slow_rates = {rank: _positive("--slow", rate) for rank, rate in parse_slow_hosts(slow or ()).items()}
    own = {"--shared": shared, "--per-node": per_node, "--between": between, "--hub": hub}
    net = _topology(topology, ranks, link, latency, own | {"--slow": slow_rates or None})
    cases = _cases(name, op, net, size, gamma, root=root, segments=segments, compare=compare)
    _check_files(draw, json_file)
    if run == "lab" and topology != "star":
        raise UsageError(f"--run lab makes a star, not {topology}", remedy="leave --topology out, or --run")
    priced = price(cases, net, size, gamma)
    if run != "none":
        priced = _run(priced, run, size, link, slow_rates, hub, backend, iterations, stream)
    what = f"{format_size(size)}, {net.name}, {ranks} ranks, links {link}"
    if len(cases) == 1:
        show.print_algorithm(priced[0], net, size, as_priced=run == "lab")
    else:
        show.print_ranking(priced, what, as_priced=run == "lab")
    if draw is not None:
        typer.echo(show.save_chart(priced, what, draw))
    if json_file is not None:
        settings = {"nbytes": size, "link": link, "latency": latency, "run": run, "stream": stream}
        settings |= {"backend": backend if run != "none" else None, "seconds_per_byte_added": gamma}
        write_json(json_file, result(priced, net, settings, shlex.join(["paceline", *sys.argv[1:]])))
        typer.echo(json_file)


def _positive(option: str, text: str) -> float:
    rate = parse_rate(text)
    if not rate > 0:
        raise UsageError(f"{option} {text}: a rate is above 0", remedy="for example 100Mbit/s")
    return rate


def _check_own(kind: str, own: Mapping[str, Any]) -> None:
    if kind not in _TOPOLOGIES:
        raise unknown("topology", kind, _TOPOLOGIES)
    takes = {
        "star": {"--hub", "--slow"},
        "switch": {"--shared", "--hub", "--slow"},
        "two-level": {"--per-node", "--between"},
    }.get(kind, set())
    for option, value in own.items():
        if value is not None and option not in takes:
            raise UsageError(f"{option} is not for --topology {kind}", remedy="leave it out, or name another")
    for option in {"switch": ["--shared"], "two-level": ["--per-node", "--between"]}.get(kind, []):
        if own[option] is None:
            raise UsageError(f"--topology {kind} needs {option}", remedy="see --help")


def _topology(
    kind: str,
    ranks: int,
    link: str,
    latency: str,
    own: Mapping[str, Any],
) -> Topology:
    """Return the topology that the options describe; `own` are those that only some kinds take, by name.

    Raises:
        UsageError: options that don't belong to it, or one that it needs is missing.
    """
    from paceline.collectives import topology

    _check_own(kind, own)
    rate, seconds = _positive("--link", link), parse_seconds(latency)
    if kind == "ring":
        return topology.ring(ranks, rate, seconds)
    if kind == "tree":
        return topology.tree(ranks, rate, seconds)
    if kind == "two-level":
        between = _positive("--between", own["--between"])
        return topology.two_level(ranks, own["--per-node"], rate, between, seconds)
    slow, hub, shared = own["--slow"] or {}, own["--hub"], own["--shared"]
    for rank in [*slow, *([hub] if hub is not None else [])]:
        if not 0 <= rank < ranks:
            raise UsageError(f"there is no rank {rank}", remedy=f"valid: 0 to {ranks - 1}")
    rates = [slow.get(rank, rate) for rank in range(max(ranks, 0))]
    in_all = math.inf if shared is None else _positive("--shared", shared)
    return topology.star(ranks, rates, seconds, switch=in_all, hub=hub)


def _cases(
    name: str,
    op: str | None,
    net: Topology,
    nbytes: int,
    gamma: float,
    *,
    root: int,
    segments: str,
    compare: bool,
) -> list[Case]:
    """Return what is asked for: one algorithm, or all of an operation, the cheapest first."""
    from paceline.collectives.catalogue import find_algorithm
    from paceline.collectives.prove import OPS
    from paceline.tools.bench.schedule_benchmark import Case, best_segments, contenders

    if name in OPS and op is None:
        op, algorithm, compare = name, "", True
    else:
        op, algorithm = find_algorithm(name, op)
    if compare:
        found = list(contenders(op, net, nbytes, gamma, root))
        return sorted(found, key=lambda case: case.price(net, nbytes, gamma).seconds)
    node = max(2, net.per_node) if algorithm == "two-level" else None

    def case(pieces: int) -> Case:
        return Case(op, algorithm, net.ranks, root, pieces, node)

    if segments == "auto":
        return [case(best_segments(lambda pieces: case(pieces).price(net, nbytes, gamma).seconds))]
    if not segments.isdecimal() or int(segments) < 1:
        raise UsageError(f"--segments {segments}", remedy="give a number from 1 on, or auto")
    return [case(int(segments))]


def _check_files(draw: Path | None, json_file: Path | None) -> None:
    if draw is not None:
        from paceline.tools.result_files import require_matplotlib

        require_matplotlib()
        if draw.suffix not in (".png", ".svg"):
            raise UsageError(f"--draw {draw}: not a picture", remedy="name a .png or .svg file")
        check_writable(draw, "--draw", make_folder=True)
    if json_file is not None:
        check_writable(json_file, "--json", make_folder=True)


def _run(
    priced: Sequence[Priced],
    place: str,
    nbytes: int,
    link: str,
    slow: Mapping[int, float],
    hub: int | None,
    backend: str,
    iterations: int,
    stream: bool,
) -> list[Priced]:
    """Carry the cases out, here or on hosts of a lab with such links."""
    from paceline.launch.process.local_ranks import run_ranks
    from paceline.tools.bench.schedule_benchmark import carry_out

    options = {"nbytes": nbytes, "iterations": iterations, "backend": backend, "stream": stream}
    if place == "here":
        return carry_out(priced, run_ranks, network="this machine", **options)
    from paceline.testing.netlab import Lab

    ranks = priced[0].case.ranks
    with Lab(hosts=ranks, rate=link, slow=slow) as lab:
        if hub is not None:
            lab.rate(hub, None)

        def start(argv: Sequence[str], ranks: int, *, env: Mapping[str, str]) -> None:
            job = lab.start_torchrun(argv, ranks_per_host=1, env=env)
            try:
                job.wait(look=lambda: [typer.echo(line, err=True) for host, line in job.lines() if host == 0])
            finally:
                job.end()

        return carry_out(priced, start, network=f"a lab of {ranks} hosts, links {link}", **options)


NameArgument = Annotated[
    str,
    typer.Argument(help="An algorithm (ring, tree, all-gather/bruck …), or an operation (broadcast …)."),
]


RanksOption = Annotated[int, typer.Option(help="How many take part.")]


BytesOption = Annotated[str, typer.Option("--bytes", help="Size of the vector.")]


LinkOption = Annotated[str, typer.Option(help="Rate of every link, each direction.")]


LatencyOption = Annotated[str, typer.Option(help="Of a message from rank to rank.")]


AddOption = Annotated[
    str | None, typer.Option(help="Rate at which a rank adds, such as 4GB/s; else it costs nothing.")
]


OpOption = Annotated[str | None, typer.Option(help="The operation, where several have such an algorithm.")]


TopologyOption = Annotated[str, typer.Option(help="star, switch, ring, tree or two-level.")]


SharedOption = Annotated[
    str | None, typer.Option(help="Of topology switch: what it carries in all, such as 4Gbit/s.")
]


PerNodeOption = Annotated[int | None, typer.Option(help="Of topology two-level: ranks of a node.")]


BetweenOption = Annotated[
    str | None, typer.Option(help="Of topology two-level: rate of a node's link to the others.")
]


SlowOption = Annotated[
    list[str] | None, typer.Option(metavar="RANK=RATE", help="A link with another rate; may be repeated.")
]


HubOption = Annotated[int | None, typer.Option(help="Of a star: the rank that is its switch.")]


RootOption = Annotated[int, typer.Option(help="Who broadcasts, or gets what is reduced.")]


SegmentsOption = Annotated[
    str, typer.Option(help="Pieces of a chunk that follow each other; auto: as many as pay.")
]


CompareOption = Annotated[
    bool, typer.Option("--compare", help="Rank all algorithms of the operation, best first.")
]


RunOption = Annotated[
    str, typer.Option(help="here: processes on this machine; lab: hosts with such links; else none.")
]


BackendOption = Annotated[str, typer.Option(help="Carries the messages of --run: gloo or paceline.")]


IterationsOption = Annotated[int, typer.Option(help="How often --run carries out each.")]


StreamOption = Annotated[
    bool, typer.Option("--stream", help="Let --run send pieces on at once, not round by round.")
]


DrawOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it there: .png or .svg.")]
