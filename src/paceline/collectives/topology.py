"""Ranks and the links between them: star, switch, ring, tree, two levels.

A link carries bytes in one direction at its bandwidth and adds its latency to every message; messages that use it at
the same time share it evenly. A message uses all links of its path at once, so it is as fast as the one where it gets
least. Hosts are full duplex: sending and receiving use two links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError

__all__ = ["Link", "Topology", "ring", "star", "tree", "two_level"]

Path = tuple[int, ...]  # indices of links


@dataclass(frozen=True)
class Link:
    """One direction of a cable, or the capacity that several cables share.

    Attributes:
        name: such as ``"up 3"``.
        bandwidth: bytes per second; infinite: no limit.
        latency: seconds added to a message.
    """

    name: str
    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise UsageError(f"{self.name}: bandwidth {self.bandwidth!r}", remedy="give bytes per second > 0")
        if not 0 <= self.latency < math.inf:
            raise UsageError(f"{self.name}: latency {self.latency!r}", remedy="give seconds ≥ 0")


@dataclass(frozen=True)
class Topology:
    """Links, and the path of every message.

    Attributes:
        name: for people.
        links: all of them.
        paths: ``paths[src][dst]``: indices of the links that a message uses, in order.
        per_node: ranks per node where ranks are grouped in nodes, else 1.
    """

    name: str
    links: tuple[Link, ...]
    paths: tuple[tuple[Path, ...], ...]
    per_node: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.paths)

    def path(self, src: int, dst: int) -> Path:
        """Return the indices of the links from one rank to another."""
        return self.paths[src][dst]

    def latency(self, src: int, dst: int) -> float:
        """Return the seconds that a message takes from one rank to another in addition to its bytes."""
        return sum(self.links[link].latency for link in self.paths[src][dst])


def star(
    ranks: int,
    bandwidth: float | Sequence[float],
    latency: float = 0.0,
    *,
    switch: float = math.inf,
    hub: int | None = None,
) -> Topology:
    """Return ranks around a switch, each with its own link in each direction.

    Args:
        ranks: number of ranks.
        bandwidth: of every link, or of each rank's, in bytes per second.
        latency: of a message from rank to rank, in seconds; half of it at each end.
        switch: bytes per second that the switch carries in total.
        hub: a rank at the switch itself, which needs no link.

    Raises:
        UsageError: no ranks, an invalid bandwidth, a bandwidth count other than `ranks`, or no such hub.
    """
    rates = [bandwidth] * ranks if isinstance(bandwidth, int | float) else list(bandwidth)
    if len(rates) != max(ranks, 0):
        raise UsageError(
            f"{len(rates)} bandwidths for {ranks} ranks", remedy="give one, or one for each rank"
        )
    if hub is not None and not 0 <= hub < ranks:
        raise UsageError(f"hub={hub}: valid are ranks 0 to {ranks - 1}", remedy="name one of them")
    links = [
        Link(f"{way} {rank}", rate, latency / 2) for way in ("up", "down") for rank, rate in enumerate(rates)
    ]

    def path(src: int, dst: int) -> Path:
        ends = ([] if src == hub else [src]) + ([] if dst == hub else [ranks + dst])
        return (*ends, 2 * ranks)

    name = "star" if hub is None else f"star with rank {hub} at its switch"
    return _topology(name, [*links, Link("switch", switch)], ranks, path)


def ring(ranks: int, bandwidth: float, latency: float = 0.0) -> Topology:
    """Return ranks in a ring, linked in each direction with the two next to them; messages take the shorter way."""
    links = _duplex([(rank, (rank + 1) % ranks) for rank in range(ranks)], bandwidth, latency)

    def path(src: int, dst: int) -> Path:
        forward = (dst - src) % ranks
        if forward <= ranks - forward:
            return tuple((src + step) % ranks for step in range(forward))
        return tuple(ranks + (src - 1 - step) % ranks for step in range(ranks - forward))

    return _topology("ring", links, ranks, path)


def tree(ranks: int, bandwidth: float, latency: float = 0.0, *, children: int = 2) -> Topology:
    """Return ranks as the nodes of a tree with root 0, each linked with its parent in each direction."""
    if children < 1:
        raise UsageError(f"children={children}: a parent has at least one", remedy="give 1 or more")
    links = _duplex([(rank, (rank - 1) // children) for rank in range(1, ranks)], bandwidth, latency)

    def path(src: int, dst: int) -> Path:
        up, down = [], []
        while src != dst:
            if src > dst:  # the deeper one of two has the higher number, unless both are equally deep
                up.append(src - 1)
                src = (src - 1) // children
            else:
                down.append(ranks - 1 + dst - 1)
                dst = (dst - 1) // children
        return (*up, *reversed(down))

    return _topology("tree", links, ranks, path)


def two_level(
    ranks: int,
    per_node: int,
    bandwidth: float,
    between: float,
    latency: float = 0.0,
    *,
    latency_between: float = 0.0,
) -> Topology:
    """Return nodes of ranks: links inside a node, and one link in each direction from every node to a switch.

    Args:
        ranks: number of ranks; the last node may have fewer than `per_node`.
        per_node: ranks per node.
        bandwidth: of a rank's link inside its node, in bytes per second.
        between: bandwidth of a node's link to the others, in bytes per second.
        latency: of a message inside a node, in seconds.
        latency_between: of a message between nodes, in seconds, in addition to that inside.
    """
    if per_node < 1:
        raise UsageError(f"per_node={per_node}: a node has at least one rank", remedy="give 1 or more")
    nodes = -(-ranks // per_node)
    links = [Link(f"{way} {rank}", bandwidth, latency / 2) for way in ("up", "down") for rank in range(ranks)]
    links += [
        Link(f"node {node} {way}", between, latency_between / 2)
        for way in ("up", "down")
        for node in range(nodes)
    ]

    def path(src: int, dst: int) -> Path:
        source, target = src // per_node, dst // per_node
        crossing = () if source == target else (2 * ranks + source, 2 * ranks + nodes + target)
        return (src, *crossing, ranks + dst)

    return _topology(f"nodes of {per_node}", links, ranks, path, per_node)


def _duplex(pairs: Sequence[tuple[int, int]], bandwidth: float, latency: float) -> list[Link]:
    """Return the links of all pairs of ranks in one direction, then in the other."""
    both = [*pairs, *((b, a) for a, b in pairs)]
    return [Link(f"{src}→{dst}", bandwidth, latency) for src, dst in both]


def _topology(
    name: str, links: list[Link], ranks: int, path: Callable[[int, int], Path], per_node: int = 1
) -> Topology:
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: a topology has at least one rank", remedy="give 1 or more")
    paths = (tuple(() if src == dst else path(src, dst) for dst in range(ranks)) for src in range(ranks))
    return Topology(name, tuple(links), tuple(paths), per_node)
