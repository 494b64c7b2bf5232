"""Assignment of gradients to buckets, as the engine does it and as predictions assume it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

__all__ = ["bucket_caps", "deal_to_owners", "join_uneven", "plan_buckets", "update_parts"]

_FIRST_NBYTES = 1 << 20
"""Size of the first of several buckets."""

_PART_NBYTES = 4 << 20
"""Gradients that a sharded optimizer updates together: enough to outweigh the fixed cost of an optimizer's step."""

_MOST_PADDING = 1 / 8
"""Share of a bucket of whole parameters that may be padding, if other parameters can join it."""

_ACCELERATOR_PARTS = 4
"""Parts on an accelerator, where every part costs the host the launches of an optimizer's step."""


def bucket_caps(nbytes: float, total: float) -> tuple[float, ...]:
    """Return the caps of the first, second … bucket, for `plan_buckets`: 1 MiB, then twice the one before, to `nbytes`.

    The first bucket is sent early in backward, and while a bucket is sent, backward fills the next one. That is at
    most twice as large, so it is full in time if the wire takes at most half as many bytes per second as backward
    produces: such a wire is never idle. Gradients that fit into one bucket stay in one.

    Args:
        nbytes: bytes per bucket; ``math.inf``: one bucket.
        total: bytes of all gradients.

    Example:
        >>> [cap >> 20 for cap in bucket_caps(25 << 20, 80 << 20)], bucket_caps(1000, 3000), bucket_caps(25 << 20, 9e6)
        ([1, 2, 4, 8, 16, 25], (1000,), (26214400,))
    """
    if total <= nbytes:
        return (nbytes,)
    growing = itertools.takewhile(
        lambda cap: cap < nbytes, (_FIRST_NBYTES << each for each in itertools.count())
    )
    return (*growing, nbytes)


def plan_buckets(
    order: Iterable[int], nbytes: Sequence[int], kinds: Sequence[object], cap: float | Sequence[float]
) -> list[list[int]]:
    """Return the parameters of each bucket, with buckets in the order in which they fill.

    A bucket is full when it reaches `cap`, as in torch's DistributedDataParallel. Parameters are not split, so it may
    exceed `cap` by up to one parameter.

    Args:
        order: parameter indices in the order in which their gradients become ready.
        nbytes: bytes of each parameter's gradient, by parameter index.
        kinds: kind of each parameter, by index; kinds (device, dtype) are not mixed in one bucket.
        cap: bytes per bucket; 0: one parameter each; ``math.inf``: one bucket per kind. A sequence gives the caps of
            the first, second … bucket of a kind; the last one repeats.

    Example:
        >>> plan_buckets([2, 1, 0], nbytes=[8, 6, 4], kinds=["f", "f", "f"], cap=10)
        [[2, 1], [0]]
    """
    caps = list(cap) if isinstance(cap, Sequence) else [cap]
    position: dict[int, int] = {}
    filling: dict[object, list[int]] = {}
    held: dict[object, int] = {}
    closed: dict[object, int] = {}
    full: list[list[int]] = []
    for index in order:
        position[index] = len(position)
        kind = kinds[index]
        if kind not in filling:
            filling[kind], held[kind] = [], 0
        filling[kind].append(index)
        held[kind] += nbytes[index]
        if held[kind] >= caps[min(closed.get(kind, 0), len(caps) - 1)]:
            full.append(filling.pop(kind))
            closed[kind] = closed.get(kind, 0) + 1
    return sorted([*full, *filling.values()], key=lambda members: position[members[-1]])


def update_parts(nbytes: Sequence[float], *, accelerator: bool = False) -> list[list[int]]:
    """Group buckets that a sharded optimizer updates together: runs of at least 4 MiB, as updates have a fixed cost.

    On an accelerator there are about four runs, so that the first ones are gathered while the last ones are updated.

    Example:
        >>> update_parts([3 << 20, 3 << 20, 5 << 20, 1 << 20])
        [[0, 1], [2], [3]]
    """
    least = max(_PART_NBYTES, sum(nbytes) / _ACCELERATOR_PARTS if accelerator else 0)
    parts: list[list[int]] = [[]]
    held = 0.0
    for index, each in enumerate(nbytes):
        if held >= least:
            parts.append([])
            held = 0.0
        parts[-1].append(index)
        held += each
    return parts


def deal_to_owners(nbytes: Sequence[float], costs: Sequence[float], loads: list[float]) -> list[int]:
    """Return the owner of each parameter of a bucket: the largest first, each to the owner with the least bytes.

    The owners' parts of a bucket have equal lengths, so bytes decide how much of it is padding. Among owners with equal
    bytes, the one with the lowest cost so far is chosen, then the one that was chosen last: so no owner gets all tall
    matrices of layers that have a tall and a wide one of the same size, which take different times.

    Args:
        nbytes: bytes of each parameter.
        costs: cost of each parameter's update, in any unit.
        loads: cost that each owner has from other buckets; the costs of this one are added.

    Example:
        >>> deal_to_owners([4, 4, 3, 1], [4, 4, 3, 1], loads=[0, 0])
        [0, 1, 1, 0]
    """
    held, chosen = [0.0] * len(loads), [0] * len(loads)
    owners = [0] * len(nbytes)
    largest_first = sorted(range(len(nbytes)), key=lambda index: (-nbytes[index], -costs[index], index))
    for turn, index in enumerate(largest_first, 1):
        owner = min(range(len(loads)), key=lambda each: (held[each], loads[each], -chosen[each], each))
        chosen[owner] = turn
        owners[index] = owner
        held[owner] += nbytes[index]
        loads[owner] += costs[index]
    return owners


def join_uneven(
    buckets: Sequence[list[int]], nbytes: Sequence[float], whole: Sequence[object], parts: int
) -> list[list[int]]:
    """Join buckets of whole parameters, in their order, until at most 1/8 of each is padding.

    Args:
        buckets: parameter indices of each bucket, in the order in which they fill.
        nbytes: bytes of each parameter, by index.
        whole: kind of each parameter, by index, if it has one owner; None: it may be cut.
        parts: number of owners.

    Example:
        >>> join_uneven([[0], [1], [2]], [4, 4, 1], ["f", "f", None], parts=2)
        [[0, 1], [2]]
    """
    filled = {bucket[-1]: at for at, bucket in enumerate(buckets)}
    joined: list[list[int]] = []
    waiting: dict[object, list[int]] = {}
    latest: dict[object, list[int]] = {}
    for bucket in buckets:
        kind = whole[bucket[0]]
        if kind is None:
            joined.append(list(bucket))
            continue
        members = waiting.pop(kind, []) + bucket
        sizes = [nbytes[index] for index in members]
        held = [0.0] * parts
        for size, owner in zip(sizes, deal_to_owners(sizes, sizes, [0.0] * parts), strict=True):
            held[owner] += size
        if parts * max(held) - sum(sizes) > _MOST_PADDING * parts * max(held):
            waiting[kind] = members
        else:
            joined.append(members)
            latest[kind] = members
    for kind, members in waiting.items():  # the last ones of a kind join those before, if there are any
        if kind in latest:
            joined.remove(latest[kind])
        joined.append(latest.get(kind, []) + members)
    return sorted(joined, key=lambda members: filled[members[-1]])
