"""Settings of ``paceline simulate`` parsed from option values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline._core.units import parse_rate, parse_seconds, parse_share, parse_sweep
from paceline.cost_model.hardware_catalog import find_interconnect
from paceline.cost_model.profile import Profile
from paceline.cost_model.profile_entries import CollectiveCost, ExchangeCost
from paceline.errors import UsageError, unknown
from paceline.tools.cli.simulate.simulate_options import parse_named, parse_positive
from paceline.tools.simulate.cluster.cluster_network import ClusterNetwork, FittedNetwork, NetworkModel
from paceline.tools.simulate.cluster.cluster_plan import MOST_NODES, RECOVERIES, ClusterPlan
from paceline.tools.simulate.cluster.live_recovery import LiveRecovery

__all__ = [
    "ClusterRequest",
    "check_failures",
    "measured_network",
    "measured_steps",
    "parse_contention",
    "parse_link",
    "parse_live",
    "parse_network",
    "parse_nodes",
    "parse_recoveries",
    "parse_step",
    "parse_time",
]

_MAX_ROWS = 100
_PARAMETER_BYTES = 4
"""Bytes of a parameter in training state."""
_DEFAULT_LATENCY = 50e-6
"""Latency of a link given as a rate."""


@dataclass(frozen=True)
class ClusterRequest:
    """A simulation to run.

    Attributes:
        plan: the training.
        nodes: numbers of nodes, ascending.
        recoveries: ways of recovery from failures.
        parameters: parameters of the model.
        settings: all options as given, for JSON.
    """

    plan: ClusterPlan
    nodes: tuple[int, ...]
    recoveries: tuple[str, ...]
    parameters: int
    settings: Mapping[str, Any]


def parse_nodes(text: str) -> tuple[int, ...]:
    """Return numbers of nodes in ascending order from a list with sweeps (see `parse_sweep`).

    Raises:
        UsageError: a number is not valid, or there are more than 100.

    Example:
        >>> parse_nodes("1:10"), parse_nodes("3,1:1000:x10")
        ((1, 2, 4, 8, 10), (1, 3, 10, 100, 1000))
    """

    def number(part: str) -> int:
        if not part.isdigit() or not 1 <= int(part) <= MOST_NODES:
            raise ValueError(f"{part!r} is no number of nodes from 1 to {MOST_NODES}")
        return int(part)

    found = parse_sweep("--nnodes", text, number, example="1:10000:x10", most=_MAX_ROWS)
    return tuple(int(each) for each in found)


def measured_steps(path: Path) -> tuple[float, ...]:
    """Return measured step times from a file, in seconds.

    Args:
        path: a JSON list of seconds, or one time per line with a unit or in seconds.

    Raises:
        UsageError: the file can't be read, is not valid, or has fewer than two times.
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


def parse_step(text: str | None) -> tuple[float, tuple[float, ...]]:
    """Return the step time of ``--step``, and the measured steps if it names a file.

    Raises:
        UsageError: the option is missing or not valid.
    """
    if text is None:
        raise UsageError("the time of a step is missing", remedy="pass --step, such as 250ms, or a file")
    if Path(text).is_file():
        steps = measured_steps(Path(text))
        return math.fsum(steps) / len(steps), steps
    return parse_time("--step", text), ()


def parse_time(option: str, text: str) -> float:
    """Return a time above 0 in seconds.

    Raises:
        UsageError: the text is not valid.
    """
    return parse_positive(option, text, parse_seconds, "30s or 5min")


def measured_network(profile: Profile, backend: str, network: str | None) -> CollectiveCost | ExchangeCost:
    """Return the all-reduce of a profile, as fitted by ``bench fit`` or measured by ``bench parts``."""
    if profile.exchanges and not profile.collectives:
        return profile.exchange("all-reduce", backend, network)
    return profile.collective("all-reduce", backend, network)


def parse_network(
    cost: CollectiveCost | ExchangeCost | None,
    *,
    topology: str,
    link: str,
    latency: str | None,
    ranks_per_node: int,
    inside: str | None,
    inside_latency: str | None,
    switch: str | None,
) -> NetworkModel:
    """Return the measured network or the one described by the options.

    Raises:
        UsageError: an option is not valid, or the link inside nodes is missing.
    """
    if cost is not None:
        return FittedNetwork(cost.fit, ranks_per_node)
    rate, seconds = parse_link("--link", link, latency)
    inside_rate: float | None = None
    inside_seconds = 0.0
    if inside is not None:
        inside_rate, inside_seconds = parse_link("--inside", inside, inside_latency)
    elif ranks_per_node > 1:
        raise UsageError(
            f"the link between the {ranks_per_node} ranks of a node is missing",
            remedy="pass --inside, such as nvlink4",
        )
    switch_rate = math.inf if switch is None else parse_rate(switch)
    return ClusterNetwork(
        topology=topology,
        link=rate,
        latency=seconds,
        per_node=ranks_per_node,
        inside=inside_rate,
        inside_latency=inside_seconds,
        switch=switch_rate,
    )


def parse_link(option: str, text: str, latency: str | None) -> tuple[float, float]:
    """Return bytes per second and latency of a link given as a rate or by name.

    Raises:
        UsageError: the text is not valid.
    """
    if "/s" in text or text.lower().endswith("bps"):
        rate, default = parse_rate(text), _DEFAULT_LATENCY
        if rate <= 0:
            raise UsageError(f"{option} {text}", remedy="pass a rate above 0, such as 200Mbit/s")
    else:
        known = find_interconnect(text)
        rate, default = known.nbytes_per_second, known.latency_seconds
    return rate, default if latency is None else parse_seconds(latency)


def parse_contention(
    text: str | None, profile: Profile | None, backend: str, network: str | None
) -> tuple[float, float]:
    """Return the slowdowns of computing and of communication during each other.

    Without ``--contention``, they are those of the profile with the most ranks on the same network, or 1.

    Raises:
        UsageError: the text is not valid.
    """
    if text is not None:
        try:
            computing, calls = (float(each) for each in text.split(":"))
        except ValueError:
            raise UsageError(
                f"--contention {text}", remedy="write two factors of 1 or more: 1.3:1.1"
            ) from None
        return computing, calls
    found = [
        each
        for each in (() if profile is None else profile.contentions)
        if (each.caller, each.op) == ("paceline", "all-reduce")
        and (each.backend, each.network) == (backend, network)
    ]
    largest = max(found, key=lambda each: each.ranks, default=None)
    return (1.0, 1.0) if largest is None else (largest.computing_slows, largest.calls_slow)


def parse_recoveries(text: str, *, failing: bool) -> tuple[str, ...]:
    """Return the ways of recovery to simulate.

    Args:
        text: one of them, or ``"both"``.
        failing: whether there are failures; else one way is enough.

    Raises:
        UsageError: the text is not valid.
    """
    if text not in (*RECOVERIES, "both"):
        raise unknown("recovery", text, (*RECOVERIES, "both"))
    return (text,) if text in RECOVERIES else RECOVERIES if failing else RECOVERIES[:1]


def parse_live(
    *,
    strategy: str,
    parameters: int,
    host_loss: str,
    notice_time: str,
    rebuild_time: str | None,
    replacement_time: str | None,
    state_bytes: int,
    virtual_ranks: int,
) -> LiveRecovery:
    """Return how ranks recover live.

    Raises:
        UsageError: an option is not valid.
    """
    if state_bytes < _PARAMETER_BYTES:
        raise UsageError(
            f"--state-bytes {state_bytes}",
            remedy=f"pass {_PARAMETER_BYTES}, for the parameter itself, or more",
        )
    process, _, host = notice_time.partition(":")
    if not host:
        raise UsageError(
            f"--notice-time {notice_time}", remedy="write the time for a process and for a host: 10ms:5s"
        )
    divided = {"sharded": state_bytes - _PARAMETER_BYTES, "full-shard": state_bytes}.get(strategy, 0)
    return LiveRecovery(
        node_share=parse_named("--host-loss", host_loss, parse_share),
        notice_process=parse_named("--notice-time", process, parse_seconds),
        notice_node=parse_named("--notice-time", host, parse_seconds),
        rebuild=_optional_time("--rebuild-time", rebuild_time),
        replacement=_optional_time("--replacement-time", replacement_time),
        virtual_ranks=virtual_ranks,
        whole_nbytes=float(parameters * (state_bytes - divided)),
        divided_nbytes=float(parameters * divided),
    )


def _optional_time(option: str, text: str | None) -> float | None:
    return None if text is None else parse_named(option, text, parse_seconds)


def check_failures(plan: ClusterPlan, restart: str) -> None:
    """Reject options about failures that would be ignored or contradict each other.

    Raises:
        UsageError: they do.
    """
    if plan.node_mtbf == math.inf:
        if restart != "0s":
            raise UsageError("--restart-time without failures", remedy="pass --mtbf, or omit --restart-time")
        if plan.write and plan.interval is None:
            raise UsageError(
                "--checkpoint-time without failures: the best interval is infinite",
                remedy="pass --mtbf, or --checkpoint-interval",
            )
    elif not plan.write and plan.interval is None:
        raise UsageError(
            "--mtbf with checkpoints that take no time: the best interval is 0",
            remedy="pass --checkpoint-time, such as 30s, or --checkpoint-interval",
        )
