"""Ranks and the links between them: star, switch, ring, tree, two levels.

A link carries bytes in one direction at its bandwidth and adds its latency to every message; several messages on
it at once share it evenly. A message takes the links of its path, all at the same time, so it is as fast as the
one where it gets least. Hosts are full duplex: what they send and what they receive are two links.
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
    """One direction of a cable, or what several cables share.

    Attributes:
        name: such as ``"up 3"``.
        bandwidth: bytes per second; infinite: it limits nothing.
        latency: seconds it adds to a message.
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
    """Links, and which of them a message takes.

    Attributes:
        name: in words.
        links: all of them.
        paths: for each pair ``paths[src][dst]``, indices of the links that a message passes, in order.
        per_node: ranks of a node, where they come in nodes; else 1.
    """

    name: str
    links: tuple[Link, ...]
    paths: tuple[tuple[Path, ...], ...]
    per_node: int = 1

    @property
    def ranks(self) -> int:
        """How many ranks it connects."""
        return len(self.paths)

    def path(self, src: int, dst: int) -> Path:
        """Return the indices of the links from one rank to another."""
        return self.paths[src][dst]

    def latency(self, src: int, dst: int) -> float:
        """Return the seconds that a message takes from one rank to another besides its bytes."""
        return sum(self.links[link].latency for link in self.paths[src][dst])


def star(
    ranks: int,
    bandwidth: float | Sequence[float],
    latency: float = 0.0,
    *,
    switch: float = math.inf,
    hub: int | None = None,
) -> Topology:
    """Return ranks around a switch, each with a link of its own in each direction.

    Args:
        ranks: how many.
        bandwidth: of every link, or of each rank's, in bytes per second.
        latency: of a message from rank to rank, in seconds; half of it at each end.
        switch: what the switch carries in all, in bytes per second.
        hub: a rank that is the switch itself and needs no link.

    Raises:
        UsageError: no ranks, a bandwidth that is none, another number of bandwidths than of ranks, no such hub.
    """
    _check_ranks(ranks)
    rates = [bandwidth] * ranks if isinstance(bandwidth, int | float) else list(bandwidth)
    if len(rates) != ranks:
        raise UsageError(
            f"{len(rates)} bandwidths for {ranks} ranks", remedy="give one, or one for each rank"
        )
    if hub is not None and not 0 <= hub < ranks:
        raise UsageError(f"hub={hub}: there are ranks 0 to {ranks - 1}", remedy="name one of them")
    links = [Link(f"up {rank}", rate, latency / 2) for rank, rate in enumerate(rates)]
    links += [Link(f"down {rank}", rate, latency / 2) for rank, rate in enumerate(rates)]
    links.append(Link("switch", switch))

    def path(src: int, dst: int) -> Path:
        ends = ([] if src == hub else [src]) + ([] if dst == hub else [ranks + dst])
        return (*ends, 2 * ranks)

    name = "star" if hub is None else f"star with rank {hub} at its switch"
    return Topology(name, tuple(links), _all_paths(ranks, path))


def ring(ranks: int, bandwidth: float, latency: float = 0.0) -> Topology:
    """Return ranks in a ring, each with a link in each direction to its two neighbours; the shorter way is taken."""
    _check_ranks(ranks)
    links = [Link(f"{rank}→{(rank + 1) % ranks}", bandwidth, latency) for rank in range(ranks)]
    links += [Link(f"{(rank + 1) % ranks}→{rank}", bandwidth, latency) for rank in range(ranks)]

    def path(src: int, dst: int) -> Path:
        forth = (dst - src) % ranks
        if forth <= ranks - forth:
            return tuple((src + step) % ranks for step in range(forth))
        return tuple(ranks + (src - 1 - step) % ranks for step in range(ranks - forth))

    return Topology("ring", tuple(links), _all_paths(ranks, path))


def tree(ranks: int, bandwidth: float, latency: float = 0.0, *, children: int = 2) -> Topology:
    """Return ranks as the nodes of a tree, rank 0 at its root, each linked with its parent in each direction."""
    _check_ranks(ranks)
    if children < 1:
        raise UsageError(f"children={children}: a parent has at least one", remedy="give 1 or more")
    links = [Link(f"{rank}→{(rank - 1) // children}", bandwidth, latency) for rank in range(1, ranks)]
    links += [Link(f"{(rank - 1) // children}→{rank}", bandwidth, latency) for rank in range(1, ranks)]

    def path(src: int, dst: int) -> Path:
        up, down = [], []
        while src != dst:
            if src > dst:  # the deeper one of two has the higher number, or they are as deep
                up.append(src - 1)
                src = (src - 1) // children
            else:
                down.append(ranks - 1 + dst - 1)
                dst = (dst - 1) // children
        return (*up, *reversed(down))

    return Topology("tree", tuple(links), _all_paths(ranks, path))


def two_level(
    ranks: int,
    per_node: int,
    bandwidth: float,
    between: float,
    latency: float = 0.0,
    latency_between: float = 0.0,
) -> Topology:
    """Return nodes of ranks: links inside a node, and one link in each direction from every node to a switch.

    Args:
        ranks: how many in all; the last node may have fewer.
        per_node: ranks of a node.
        bandwidth: of a rank's link inside its node, in bytes per second.
        between: of a node's link to the others, in bytes per second.
        latency: of a message inside a node, in seconds.
        latency_between: of a message between nodes, in seconds, besides that inside.
    """
    _check_ranks(ranks)
    if per_node < 1:
        raise UsageError(f"per_node={per_node}: a node has at least one rank", remedy="give 1 or more")
    nodes = -(-ranks // per_node)
    links = [Link(f"up {rank}", bandwidth, latency / 2) for rank in range(ranks)]
    links += [Link(f"down {rank}", bandwidth, latency / 2) for rank in range(ranks)]
    links += [Link(f"node {node} up", between, latency_between / 2) for node in range(nodes)]
    links += [Link(f"node {node} down", between, latency_between / 2) for node in range(nodes)]

    def path(src: int, dst: int) -> Path:
        out, into = src // per_node, dst // per_node
        crossing = () if out == into else (2 * ranks + out, 2 * ranks + nodes + into)
        return (src, *crossing, ranks + dst)

    return Topology(f"nodes of {per_node}", tuple(links), _all_paths(ranks, path), per_node)


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: a topology has at least one rank", remedy="give 1 or more")


def _all_paths(ranks: int, path: Callable[[int, int], Path]) -> tuple[tuple[Path, ...], ...]:
    return tuple(tuple(() if src == dst else path(src, dst) for dst in range(ranks)) for src in range(ranks))
