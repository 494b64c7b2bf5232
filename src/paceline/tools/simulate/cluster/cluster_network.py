"""Time of an all-reduce on described or measured networks, for any number of ranks.

A round takes the latency of its longest path plus the transfer over its most loaded link; rounds are sequential. For
uniform links this equals `paceline.collectives.simulated_cost` without simulating messages, so that a million ranks
are feasible. Links are those of `paceline.collectives.topology`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.collectives.closed_form_cost import CLOSED_FORMS
from paceline.cost_model.collective_prediction import CollectiveFit
from paceline.cost_model.cost_forms import PLAIN_FORM, CostForm, terms_of
from paceline.cost_model.piecewise_fit import FitSegment, piecewise_seconds
from paceline.errors import UsageError, unknown
from paceline.tools.simulate.cluster.all_reduce_rounds import (
    ALGORITHMS,
    TWO_LEVEL_ALGORITHMS,
    all_reduce_rounds,
)

__all__ = ["TOPOLOGIES", "AllReduceTime", "ClusterNetwork", "FittedNetwork", "NetworkModel"]

TOPOLOGIES = ("star", "ring", "tree")
"""Links between nodes: all to one switch, a ring, or a binary tree."""


@dataclass(frozen=True)
class AllReduceTime:
    """Time of one all-reduce.

    Attributes:
        algorithm: name of the algorithm.
        call: seconds independent of the size.
        transfer: seconds for the bytes.
        error: 90th percentile of the relative prediction error; 0 if unknown.
    """

    algorithm: str
    call: float
    transfer: float
    error: float = 0.0

    @property
    def seconds(self) -> float:
        """Total seconds."""
        return self.call + self.transfer


class NetworkModel(Protocol):
    """A described or measured network that predicts the time of an all-reduce."""

    @property
    def per_node(self) -> int:
        """Ranks per node."""
        ...

    def algorithms(self) -> tuple[str, ...]:
        """Return the algorithms that it can predict."""
        ...

    def default_algorithms(self) -> tuple[str, ...]:
        """Return the candidates if no algorithm is given."""
        ...

    def time_all_reduce(self, algorithm: str, nodes: int, nbytes: float) -> AllReduceTime:
        """Return the time of one all-reduce."""
        ...

    def send_seconds(self, nodes: int, nbytes: float) -> float:
        """Return the time of a message to another rank: on another node if there are several."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClusterNetwork:
    """Nodes with full-duplex links.

    Attributes:
        topology: links between nodes, one of `TOPOLOGIES`.
        link: bytes per second of a node's link in each direction.
        latency: seconds per message between nodes; in a ring or tree, per hop.
        per_node: ranks per node.
        inside: bytes per second of a rank's link inside its node; None: as `link`.
        inside_latency: seconds per message inside a node.
        switch: total bytes per second of the switch of a star.

    Raises:
        UsageError: a number is out of range, or nodes of several ranks are not connected by a switch.
    """

    topology: str = "star"
    link: float = 125e6
    latency: float = 50e-6
    per_node: int = 1
    inside: float | None = None
    inside_latency: float = 0.0
    switch: float = math.inf

    def __post_init__(self) -> None:
        if self.topology not in TOPOLOGIES:
            raise unknown("topology", self.topology, TOPOLOGIES)
        for name in ("link", "inside", "switch"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name}={value!r}", remedy="give bytes per second above 0")
        for name in ("latency", "inside_latency"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)!r}", remedy="give seconds of 0 or more")
        if type(self.per_node) is not int or self.per_node < 1:
            raise UsageError(f"per_node={self.per_node!r}", remedy="give a whole number of 1 or more")
        if self.per_node > 1 and self.topology != "star":
            raise UsageError(
                f"nodes of {self.per_node} ranks in a {self.topology}",
                remedy="nodes of several ranks need a switch: use star, or one rank per node",
            )
        if self.switch < math.inf and self.topology != "star":
            raise UsageError(f"a {self.topology} has no switch", remedy="omit its rate, or use star")

    def algorithms(self) -> tuple[str, ...]:
        """Return the algorithms that run on this network."""
        return (
            ALGORITHMS if self.per_node > 1 else tuple(x for x in ALGORITHMS if x not in TWO_LEVEL_ALGORITHMS)
        )

    def default_algorithms(self) -> tuple[str, ...]:
        """Return all algorithms."""
        return self.algorithms()

    def time_all_reduce(self, algorithm: str, nodes: int, nbytes: float) -> AllReduceTime:
        """Return the time of one all-reduce.

        Args:
            algorithm: one of `algorithms`.
            nodes: number of nodes.
            nbytes: size of the vector on each rank.

        Raises:
            UsageError: the algorithm does not run on this network.

        Example:
            >>> round(ClusterNetwork(link=25e6, latency=0.0).time_all_reduce("ring", 4, 80e6).seconds, 9)
            4.8
        """
        if algorithm not in self.algorithms():
            raise UsageError(
                f"{algorithm} on a {self.topology} with {self.per_node} ranks a node",
                remedy=f"valid: {', '.join(self.algorithms())}",
            )
        call, per_byte = _terms(self, algorithm, nodes)
        return AllReduceTime(algorithm, call, per_byte * nbytes)

    def send_seconds(self, nodes: int, nbytes: float) -> float:
        """Return the time of a message to another rank: on another node if there are several.

        Example:
            >>> ClusterNetwork(link=25e6, latency=0.5).send_seconds(2, 50e6)
            2.5
        """
        if nodes > 1:
            return self.latency + nbytes / self.link
        return self.inside_latency + nbytes / (self.inside or self.link)


@lru_cache(maxsize=4096)
def _terms(network: ClusterNetwork, algorithm: str, nodes: int) -> tuple[float, float]:
    """Return seconds, and seconds per byte of the vector."""
    ranks = nodes * network.per_node
    crowd = {"star": _star, "ring": _ring, "tree": _tree}[network.topology]
    call = per_byte = 0.0
    for phase in all_reduce_rounds(algorithm, ranks, network.per_node):
        latency, seconds_per_byte = crowd(network, phase.src, phase.dst, ranks)
        call += phase.repeats * latency
        per_byte += phase.repeats * phase.share * seconds_per_byte
    return float(call), float(per_byte)


Ends = NDArray[np.int64]


def _star(network: ClusterNetwork, src: Ends, dst: Ends, ranks: int) -> tuple[float, float]:
    """Return the latency of a round and its seconds per byte of a message, for nodes around a switch."""
    del ranks
    if network.per_node == 1:
        busiest = max(np.bincount(src).max(), np.bincount(dst).max())
        return network.latency, max(busiest / network.link, len(src) / network.switch)
    inside = max(np.bincount(src).max(), np.bincount(dst).max()) / (network.inside or network.link)
    out, into = src // network.per_node, dst // network.per_node
    crossing = out != into
    if not crossing.any():
        return network.inside_latency, inside
    busiest = max(np.bincount(out[crossing]).max(), np.bincount(into[crossing]).max())
    between = max(busiest / network.link, crossing.sum() / network.switch)
    return network.inside_latency + network.latency, max(inside, float(between))


def _ring(network: ClusterNetwork, src: Ends, dst: Ends, ranks: int) -> tuple[float, float]:
    """The same in a ring: a message uses all links of the shorter path."""
    forth = (dst - src) % ranks
    shorter = forth <= ranks - forth
    hops = np.where(shorter, forth, ranks - forth)
    first = np.where(shorter, src, (src - hops) % ranks)
    busiest = max(
        _most_crowded(first[way], hops[way], ranks) if way.any() else 0 for way in (shorter, ~shorter)
    )
    return float(hops.max()) * network.latency, busiest / network.link


def _most_crowded(first: Ends, hops: Ends, ranks: int) -> int:
    """Return the number of arcs (`hops` links from `first` on) over the most loaded link of a ring."""
    change = np.bincount(first, minlength=2 * ranks + 1) - np.bincount(first + hops, minlength=2 * ranks + 1)
    over = np.cumsum(change)
    return int((over[:ranks] + over[ranks : 2 * ranks]).max())


def _tree(network: ClusterNetwork, src: Ends, dst: Ends, ranks: int) -> tuple[float, float]:
    """The same in a binary tree with root 0: up to the common ancestor, and down."""
    up, down = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    src, dst, hops = src.copy(), dst.copy(), np.zeros(len(src), np.int64)
    while (apart := src != dst).any():
        climbs, falls = (
            apart & (src > dst),
            apart & (src < dst),
        )  # the deeper has the higher number, or is as deep
        np.add.at(up, src[climbs], 1)
        np.add.at(down, dst[falls], 1)
        src[climbs] = (src[climbs] - 1) // 2
        dst[falls] = (dst[falls] - 1) // 2
        hops += apart
    return float(hops.max()) * network.latency, max(up.max(), down.max()) / network.link


@dataclass(frozen=True)
class FittedNetwork:
    """A measured network.

    The algorithm of the fit is used unless another one is given; others are predicted from the same α and β.

    Attributes:
        fit: fit of the all-reduce.
        per_node: ranks per node; the fit counts ranks, not nodes.
    """

    fit: CollectiveFit
    per_node: int = 1

    @property
    def fitted_algorithm(self) -> str:
        """The algorithm that the measured times fit best."""
        return str(self.fit.form)

    def algorithms(self) -> tuple[str, ...]:
        """Return the fitted algorithm first, then those with a closed form."""
        names = [name for op, name in CLOSED_FORMS if op == self.fit.op]
        return (self.fitted_algorithm, *(name for name in names if name != self.fitted_algorithm))

    def default_algorithms(self) -> tuple[str, ...]:
        """Return only the fitted algorithm, since the others were not measured."""
        return (self.fitted_algorithm,)

    def time_all_reduce(self, algorithm: str, nodes: int, nbytes: float) -> AllReduceTime:
        """Return the time of one all-reduce; see `ClusterNetwork.time_all_reduce`."""
        if algorithm not in self.algorithms():
            raise UsageError(
                f"{algorithm} on a measured network", remedy=f"valid: {', '.join(self.algorithms())}"
            )
        ranks = nodes * self.per_node
        if ranks == 1:
            return AllReduceTime(algorithm, 0.0, 0.0)
        form = (
            self.fit.form if algorithm == self.fitted_algorithm else CostForm(algorithm, self.fit.form.shared)
        )
        if self.fit.form == PLAIN_FORM and algorithm != self.fitted_algorithm:
            raise UsageError(
                f"{algorithm}: the fit knows no algorithm", remedy=f"use {self.fitted_algorithm}"
            )
        terms, segments = terms_of(self.fit.op, form, ranks), self.fit.segments_for(ranks)
        whole = piecewise_seconds(segments, nbytes, terms.messages, terms.sent)
        call = min(whole, _segment(segments, nbytes).alpha * terms.messages)
        error = self.fit.error_at(ranks)
        return AllReduceTime(algorithm, call, whole - call, error.p90 if error else 0.0)

    def send_seconds(self, nodes: int, nbytes: float) -> float:
        """Return the time of a message to another rank; see `ClusterNetwork.send_seconds`."""
        return piecewise_seconds(self.fit.segments_for(nodes * self.per_node), nbytes, 1.0, 1.0)


def _segment(segments: tuple[FitSegment, ...], nbytes: float) -> FitSegment:
    """Return the last segment that begins at or below a size."""
    return next((each for each in reversed(segments) if each.low <= nbytes), segments[0])
