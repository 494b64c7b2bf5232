"""What ``paceline simulate`` is asked for, read from its options."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline._core.units import parse_rate, parse_seconds, parse_share
from paceline.cost_model.hardware_catalog import interconnect
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import CollectiveCost, ExchangeCost
from paceline.errors import UsageError
from paceline.tools.cli.shared_options import numbers_of, parameters_of
from paceline.tools.simulate.cluster.cluster_network import ClusterNetwork, FittedNetwork, NetworkModel
from paceline.tools.simulate.cluster.cluster_simulation import MOST_NODES, ClusterPlan
from paceline.tools.simulate.cluster.compute_times import ClusterMachines

__all__ = ["Asked", "asked_of", "measured_steps", "parse_nodes"]

_FILES = ("json_file", "out")
_MOST_ROWS = 100
_LATENCY = 50e-6
"""Of a link that is given as a rate."""


@dataclass(frozen=True)
class Asked:
    """What is simulated.

    Attributes:
        plan: the training. nodes: numbers of nodes, in ascending order.
        parameters: of the model. settings: all options as they were given, for JSON.
    """

    plan: ClusterPlan
    nodes: tuple[int, ...]
    parameters: int
    settings: Mapping[str, Any]


def asked_of(options: Mapping[str, Any]) -> Asked:
    """Return what the options ask for.

    Args:
        options: of the command, by the names of its arguments.

    Raises:
        UsageError: one that makes no sense, is missing, or does not go with another.
    """
    nodes = parse_nodes(options["nodes"])
    parameters = parameters_of(options["model"], options["parameters"])
    seconds, measured = _step(options["step"])
    if options["gradients"] not in (1, 2, 4):
        raise UsageError(f"--gradients {options['gradients']}", remedy="pass 4, 2 or 1 bytes")
    if not 0 < options["bucket_mib"] < math.inf:
        raise UsageError(f"--bucket-mib {options['bucket_mib']}", remedy="pass MiB above 0")
    interval = options["interval"]
    profile = None if options["profile"] is None else Profile.load(options["profile"])
    cost = None if profile is None else _all_reduce(profile, options["backend"], options["network"])
    plan = ClusterPlan(
        _carrier(options, cost),
        seconds,
        float(options["gradients"] * parameters),
        ClusterMachines(
            tuple(numbers_of("--speeds", options["speeds"], float, "1:1:2:4", ":")),
            parse_share(options["spread"]),
            parse_share(options["jitter"]),
            measured,
            options["shares"],
        ),
        options["batch"],
        options["strategy"],
        options["bucket_mib"] * 2**20,
        parse_share(options["backward"]),
        *_contention(options, profile, None if cost is None else cost.network),
        options["algorithm"],
        options["every"],
        _time("--mtbf", options["mtbf"]) if options["mtbf"] is not None else math.inf,
        parse_seconds(options["checkpoint"]),
        parse_seconds(options["restart"]),
        None if interval == "auto" else _time("--interval", interval),
        None if options["job"] is None else _time("--job", options["job"]),
        options["price"],
        options["jobs"],
        seed=options["seed"],
    )
    _check_failures(options, plan)
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if name not in _FILES
    }
    return Asked(plan, nodes, parameters, settings)


def parse_nodes(text: str) -> tuple[int, ...]:
    """Return numbers of nodes, each once, in ascending order.

    Args:
        text: numbers by commas; one may be a sweep ``FIRST:LAST`` (doubling) or ``FIRST:LAST:xFACTOR``, whose last
            number is always among them.

    Raises:
        UsageError: one is no number of nodes, or there are more than 100.

    Example:
        >>> parse_nodes("1:10"), parse_nodes("3,1:1000:x10")
        ((1, 2, 4, 8, 10), (1, 3, 10, 100, 1000))
    """
    found: set[int] = set()
    for part in text.split(","):
        first, *rest = part.strip().split(":")
        low = _nodes(first, text)
        if not rest:
            found.add(low)
            continue
        high, factor = _nodes(rest[0], text), 2
        if len(rest) == 2 and rest[1].startswith("x"):
            factor = _nodes(rest[1][1:], text)
        elif len(rest) > 1:
            raise UsageError(f"--nodes {text!r} is no sweep", remedy="write 1:10000 or 1:10000:x10")
        if low > high or factor < 2:
            raise UsageError(
                f"--nodes {text!r} makes no sweep", remedy="write the smaller number first: 1:10000"
            )
        found |= {low * factor**k for k in range(64) if low * factor**k < high} | {high}
    if len(found) > _MOST_ROWS:
        raise UsageError(f"--nodes {text!r}: more than {_MOST_ROWS} numbers", remedy="take larger steps")
    return tuple(sorted(found))


def _nodes(written: str, text: str) -> int:
    if not written.isdigit() or not 1 <= int(written) <= MOST_NODES:
        raise UsageError(
            f"--nodes {text!r}: {written!r} is no number of nodes", remedy=f"write 1 to {MOST_NODES}"
        )
    return int(written)


def measured_steps(path: Path) -> tuple[float, ...]:
    """Return the times of steps in a file, in seconds.

    Args:
        path: a JSON list of numbers, or one time in each line, with a unit or in seconds.

    Raises:
        UsageError: it can't be read, or holds something else, or fewer than two times.
    """
    remedy = "name a JSON list of seconds, or a file with one time in each line"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"can't read steps from {str(path)!r}: {error}", remedy=remedy) from error
    if text.lstrip().startswith("["):
        try:
            values = [float(each) for each in json.loads(text)]
        except (ValueError, TypeError) as error:
            raise UsageError(f"{str(path)!r} is no list of seconds: {error}", remedy=remedy) from error
    else:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        values = [parse_seconds(f"{line}s" if line[-1].isdigit() else line) for line in lines]
    if len(values) < 2 or not all(0 < each < math.inf for each in values):
        raise UsageError(
            f"{str(path)!r} holds {len(values)} times; two or more above 0 are needed", remedy=remedy
        )
    return tuple(values)


def _step(text: str | None) -> tuple[float, tuple[float, ...]]:
    """Return the time of a step, and the steps that it is the mean of; empty if it is given."""
    if text is None:
        raise UsageError("how long does a step compute?", remedy="pass --step, such as 250ms, or a file")
    if Path(text).is_file():
        steps = measured_steps(Path(text))
        return math.fsum(steps) / len(steps), steps
    return _time("--step", text), ()


def _carrier(options: Mapping[str, Any], cost: CollectiveCost | ExchangeCost | None) -> NetworkModel:
    per_node = options["ranks_per_node"]
    if cost is not None:
        return FittedNetwork(cost.fit, per_node)
    link, latency = _link("--link", options["link"], options["latency"])
    inside: float | None = None
    inside_latency = 0.0
    if options["inside"] is not None:
        inside, inside_latency = _link("--inside", options["inside"], options["inside_latency"])
    elif per_node > 1:
        raise UsageError(
            f"{per_node} ranks in a node, and no link between them", remedy="pass --inside, such as nvlink4"
        )
    switch = math.inf if options["switch"] is None else parse_rate(options["switch"])
    return ClusterNetwork(options["topology"], link, latency, per_node, inside, inside_latency, switch)


def _all_reduce(profile: Profile, backend: str, network: str | None) -> CollectiveCost | ExchangeCost:
    """Return the cost of an all-reduce as ``bench fit`` found it; where it found none, as ``bench parts`` did."""
    if profile.exchanges and not profile.collectives:
        return profile.exchange("all-reduce", backend, network)
    return profile.collective("all-reduce", backend, network)


def _link(option: str, text: str, latency: str | None) -> tuple[float, float]:
    """Return bytes per second and seconds of a link that is given as a rate or by name."""
    if "/s" in text or text.lower().endswith("bps"):
        rate, usual = parse_rate(text), _LATENCY
        if rate <= 0:
            raise UsageError(f"{option} {text}", remedy="pass a rate above 0, such as 200Mbit/s")
    else:
        known = interconnect(text)
        rate, usual = known.nbytes_per_second, known.latency_seconds
    return rate, usual if latency is None else parse_seconds(latency)


def _contention(
    options: Mapping[str, Any], profile: Profile | None, network: str | None
) -> tuple[float, float]:
    """Return how many times as long computing takes beside exchanges, and exchanges beside computing: as asked, or as
    the profile has it of the most ranks on the same network.
    """
    if options["contention"] is not None:
        try:
            computing, calls = (float(each) for each in options["contention"].split(":"))
        except ValueError:
            raise UsageError(
                f"--contention {options['contention']}", remedy="write two factors of 1 or more: 1.3:1.1"
            ) from None
        return computing, calls
    found = [
        each
        for each in (() if profile is None else profile.contentions)
        if (each.caller, each.op) == ("paceline", "all-reduce")
        and (each.backend, each.network) == (options["backend"], network)
    ]
    most = max(found, key=lambda each: each.ranks, default=None)
    return (1.0, 1.0) if most is None else (most.computing_slows, most.calls_slow)


def _time(option: str, text: str) -> float:
    seconds = parse_seconds(text)
    if not 0 < seconds < math.inf:
        raise UsageError(f"{option} {text}", remedy="pass a time above 0, such as 30s or 5min")
    return seconds


def _check_failures(options: Mapping[str, Any], plan: ClusterPlan) -> None:
    """Refuse what would be left unheeded, or can't be computed."""
    if plan.node_mtbf == math.inf:
        if options["restart"] != "0s":
            raise UsageError("--restart without failures", remedy="pass --mtbf, or leave it out")
        if plan.write and plan.interval is None:
            raise UsageError(
                "--checkpoint without failures: the best interval is never",
                remedy="pass --mtbf, or --interval",
            )
    elif not plan.write and plan.interval is None:
        raise UsageError(
            "--mtbf, and checkpoints that take no time: they would be written all the time",
            remedy="pass --checkpoint, such as 30s, or --interval",
        )
