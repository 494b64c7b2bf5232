"""From how many tokens a device on computing takes longer than communication, so that it can hide it (pure).

C is a device's FLOP/s, W the bytes per second that it sends while it receives as many, α = C/W. A matrix product with
P weights costs 2·P FLOP a token forward and 4·P backward; a ring sends (n − 1)/n of the vector to gather or to
reduce-scatter it, and both of these for an all-reduce (`paceline.collectives.closed_form_cost`).

    DDP, backward       4·P·b/C ≥ 2·g·P·(n − 1)/(n·W)             b ≥ g/2 · α · (n − 1)/n     a step
    FSDP, forward       2·P·b/C ≥ w·P·(n − 1)/(n·W)               b ≥ w/2 · α · (n − 1)/n     a micro-batch
    FSDP, backward      4·P·b/C ≥ (w + g)·P·(n − 1)/(n·W)         b ≥ (w + g)/4 · α · (n − 1)/n
    FSDP + TP, forward  4·b·D·F/(Y·C) ≥ 4·D·F/(Y·W·Mx) + 4·b·D/(W·My)
                                                                  b ≥ (α/Mx) / (1 − Y·α/(F·My))

with w and g the bytes of a weight and of a gradient on the wire; with 2 bytes each, all three of the first are
b ≥ α·(n − 1)/n. Sources: Austin et al., How to Scale Your Model (2025), "Training"; Stanford CS336 (spring 2025),
assignment 2. What is not a matrix product is left out, so these are the least b, not a promise.

[Note: micro-batch] DDP reduces gradients once an optimizer step, so the tokens of all its micro-batches count (under
`no_sync`). FSDP gathers its weights and scatters gradients in every micro-batch, so the micro-batch itself must be
large enough, and accumulation does not help, unless weights stay gathered and gradients stay whole meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import UsageError

__all__ = ["Threshold", "ddp_tokens", "fsdp_tokens", "fsdp_tp_tokens", "hsdp_tokens"]


@dataclass(frozen=True)
class Threshold:
    """Tokens on a device from which on computing can hide communication.

    Attributes:
        tokens: the least number; infinite: no number is enough.
        per: what they are counted in: ``"optimizer step"`` or ``"micro-batch"``; see [Note: micro-batch].
        formula: with the numbers put in.
    """

    tokens: float
    per: str
    formula: str


def ddp_tokens(intensity: float, ranks: int, gradient_nbytes: float = 2.0) -> Threshold:
    """Return the threshold of data parallel, whose all-reduce runs beside backward.

    Args:
        intensity: α = C/W, FLOP a byte. ranks: n. gradient_nbytes: g, bytes of one on the wire.

    Example:
        >>> round(ddp_tokens(989.4e12 / 450e9, ranks=8).tokens)
        1924
    """
    _check(intensity, ranks)
    tokens = gradient_nbytes / 2 * intensity * (ranks - 1) / ranks
    return Threshold(
        tokens, "optimizer step", f"{gradient_nbytes:g}/2 · {intensity:,.0f} · ({ranks} − 1)/{ranks}"
    )


def fsdp_tokens(
    intensity: float, ranks: int, weight_nbytes: float = 2.0, gradient_nbytes: float = 2.0
) -> Threshold:
    """Return the threshold of full sharding: the larger of forward's and backward's, of each micro-batch.

    Args:
        intensity: α = C/W. ranks: n. weight_nbytes, gradient_nbytes: w and g, bytes on the wire.

    Example:
        >>> round(fsdp_tokens(2200.0, 8).tokens), round(fsdp_tokens(2200.0, 8, gradient_nbytes=4.0).tokens)
        (1925, 2888)
    """
    _check(intensity, ranks)
    forward, backward = weight_nbytes / 2, (weight_nbytes + gradient_nbytes) / 4
    share = f"{weight_nbytes:g}/2" if forward >= backward else f"({weight_nbytes:g} + {gradient_nbytes:g})/4"
    tokens = max(forward, backward) * intensity * (ranks - 1) / ranks
    return Threshold(tokens, "micro-batch", f"{share} · {intensity:,.0f} · ({ranks} − 1)/{ranks}")


def hsdp_tokens(
    inside: float, between: float, shard_ranks: int, replicas: int, gradient_nbytes: float = 2.0
) -> tuple[Threshold, Threshold]:
    """Return both thresholds of hybrid sharding: FSDP inside of a group, DDP of the shards between groups.

    Each device all-reduces only its own shard, P/`shard_ranks`, so the slower links between groups need to hide that
    much less; and only once an optimizer step.

    Args:
        inside: α over the links of a group. between: α over a device's part of the links between groups.
        shard_ranks: of a group. replicas: groups. gradient_nbytes: g.

    Returns:
        What a micro-batch needs, and what an optimizer step needs.

    Example:
        >>> [round(each.tokens) for each in hsdp_tokens(2200.0, 19800.0, shard_ranks=8, replicas=4)]
        [1925, 1856]
    """
    _check(between, replicas)
    outer = ddp_tokens(between / shard_ranks, replicas, gradient_nbytes)
    formula = (
        f"{gradient_nbytes:g}/2 · {between:,.0f}/{shard_ranks} · ({replicas} − 1)/{replicas}: "
        f"a shard is 1/{shard_ranks} of the gradients"
    )
    return fsdp_tokens(inside, shard_ranks, 2.0, gradient_nbytes), Threshold(outer.tokens, outer.per, formula)


def fsdp_tp_tokens(
    intensity: float, d_ff: int, tp_ranks: int, fsdp_axes: int = 1, tp_axes: int = 1, *, overlap: bool = False
) -> Threshold:
    """Return the tokens of a FSDP shard from which forward is bound by computing, with tensor parallelism inside it.

    Args:
        intensity: α = C/W, W of one axis of the mesh. d_ff: F, width inside the feed-forward layer.
        tp_ranks: Y. fsdp_axes: Mx, axes of the mesh that carry FSDP. tp_axes: My, those that carry TP.
        overlap: whether both kinds of communication run at the same time, on axes of their own; else they add up.

    Example:
        >>> alpha = 4.6e14 / 1.8e11
        >>> round(fsdp_tp_tokens(alpha, 53248, 4, fsdp_axes=2).tokens)
        1581
        >>> round(fsdp_tp_tokens(alpha, 53248, 4, fsdp_axes=2, overlap=True).tokens)
        1278
    """
    _check(intensity, tp_ranks)
    share = tp_ranks * intensity / (d_ff * tp_axes)
    alone = intensity / fsdp_axes
    said = f"({intensity:,.1f}/{fsdp_axes})"
    if share >= 1.0:
        return Threshold(
            math.inf, "micro-batch", f"{tp_ranks} · {intensity:,.0f}/({d_ff} · {tp_axes}) = {share:.3g} ≥ 1"
        )
    if overlap:
        return Threshold(alone, "micro-batch", said)
    formula = f"{said} / (1 − {tp_ranks} · {intensity:,.1f}/({d_ff} · {tp_axes}))"
    return Threshold(alone / (1.0 - share), "micro-batch", formula)


def _check(intensity: float, ranks: int) -> None:
    if not 0 < intensity < math.inf:
        raise UsageError(f"C/W is {intensity!r}", remedy="give FLOP/s and bytes per second above 0")
    if ranks < 1:
        raise UsageError(f"{ranks} ranks", remedy="give 1 or more")
