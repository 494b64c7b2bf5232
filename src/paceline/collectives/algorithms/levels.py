"""All-reduce in two levels, inside nodes and between them; and through one rank at the switch."""

from __future__ import annotations

from paceline.collectives.algorithms.shares import ring_all_gather, ring_reduce_scatter
from paceline.collectives.schedule import Rounds, Send, mirrored

__all__ = ["switch_reduce", "two_level_all_reduce"]


def switch_reduce(ranks: int) -> Rounds:
    """Return the round in which all send their vectors to rank 0 at once; fast where rank 0 stands at the switch."""
    return [[Send(rank, 0, 0, add=True) for rank in range(1, ranks)]] if ranks > 1 else []


def two_level_all_reduce(ranks: int, per_node: int) -> tuple[Rounds, int]:
    """Return rounds and chunks of an all-reduce inside nodes, between nodes, and inside nodes again.

    The vector has as many slots as the smallest node has ranks, and each slot a chunk for each node. Inside every
    node, the rank at place j adds up slot j; then the ranks at place j of all nodes, one in each, complete slot j as
    a ring; then each of them gives it to the others of its node.

    Args:
        ranks: how many in all.
        per_node: ranks of a node; the last node may have fewer.
    """
    nodes = [list(range(first, min(first + per_node, ranks))) for first in range(0, ranks, per_node)]
    slots, width = min(map(len, nodes)), len(nodes)
    inside = [
        [
            Send(rank, node[slot], slot * width, add=True, width=width)
            for node in nodes
            for slot in range(slots)
            for rank in node
            if rank != node[slot]
        ]
    ]
    between = [
        [
            Send(nodes[send.src][slot], nodes[send.dst][slot], slot * width + send.chunk, send.add)
            for slot in range(slots)
            for send in sends
        ]
        for sends in [*ring_reduce_scatter(width), *ring_all_gather(width)]
    ]
    inside = inside if inside[0] else []
    return [*inside, *between, *mirrored(inside)], slots * width
