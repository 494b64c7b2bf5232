"""Assignment of gradients to buckets, as the engine does it and as predictions assume it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["plan_buckets", "update_parts"]

_PART_NBYTES = 4 << 20
"""Gradients that a sharded optimizer updates together: enough to outweigh the fixed cost of an optimizer's step."""

_ACCELERATOR_PARTS = 4
"""Parts on an accelerator, where every part costs the host the launches of an optimizer's step."""


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
            the first, second … bucket of a kind; the last one repeats (torch's DDP by default: 1 MiB, then 25 MiB).

    Example:
        >>> plan_buckets([2, 1, 0], nbytes=[8, 6, 4], kinds=["f", "f", "f"], cap=10)
        [[2, 1], [0]]
    """
    caps = list(cap) if isinstance(cap, Sequence) else [cap]
    filling: dict[object, list[int]] = {}
    held: dict[object, int] = {}
    closed: dict[object, int] = {}
    full: list[list[int]] = []
    for index in order:
        kind = kinds[index]
        if kind not in filling:
            filling[kind], held[kind] = [], 0
        filling[kind].append(index)
        held[kind] += nbytes[index]
        if held[kind] >= caps[min(closed.get(kind, 0), len(caps) - 1)]:
            full.append(filling.pop(kind))
            closed[kind] = closed.get(kind, 0) + 1
    return full + list(filling.values())


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
