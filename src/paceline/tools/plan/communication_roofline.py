"""Communication roofline: the number of tokens per device from which computing hides communication.

C is a device's FLOP/s, W the bytes per second that it sends while it receives as many, α = C/W. A matrix product with
P weights costs 2·P FLOP per token forward and 4·P backward; a ring sends (n − 1)/n of the vector to gather or to
reduce-scatter it, and both of these for an all-reduce (`paceline.collectives.closed_form_cost`).

    DDP, backward       4·P·b/C ≥ 2·g·P·(n − 1)/(n·W)             b ≥ g/2 · α · (n − 1)/n     per step
    FSDP, forward       2·P·b/C ≥ w·P·(n − 1)/(n·W)               b ≥ w/2 · α · (n − 1)/n     per micro-batch
    FSDP, backward      4·P·b/C ≥ (w + g)·P·(n − 1)/(n·W)         b ≥ (w + g)/4 · α · (n − 1)/n
    FSDP + TP, forward  4·b·D·F/(Y·C) ≥ 4·D·F/(Y·W·Mx) + 4·b·D/(W·My)
                                                                  b ≥ (α/Mx) / (1 − Y·α/(F·My))

w and g are the bytes of a weight and of a gradient on the wire; with 2 bytes each, the first three are all
b ≥ α·(n − 1)/n. Sources: Austin et al., How to Scale Your Model (2025), "Training"; Stanford CS336 (spring 2025),
assignment 2. Only matrix products are counted, so these are lower bounds of b.

[Note: micro-batch] DDP reduces gradients once per optimizer step, so the tokens of all its micro-batches count (under
`no_sync`). FSDP gathers its weights and scatters gradients in every micro-batch, so the micro-batch itself must be
large enough; accumulation does not help unless weights stay gathered and gradients stay whole in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.cost_model.cost_forms import terms_of
from paceline.cost_model.hardware_catalog import DTYPES, find_device, find_interconnect
from paceline.cost_model.profile import Profile
from paceline.errors import UsageError

__all__ = [
    "RateEstimate",
    "TokenThreshold",
    "catalog_link_rate",
    "catalog_matmul_rate",
    "ddp_tokens",
    "fsdp_tokens",
    "fsdp_tp_tokens",
    "hsdp_tokens",
    "intensity",
    "measured_link_rate",
    "measured_matmul_rate",
]

_TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32"}


@dataclass(frozen=True)
class RateEstimate:
    """A rate with its bounds and its source.

    Attributes:
        value: in FLOP/s, bytes per second, or FLOP per byte.
        low: lower bound; equals the value where none is known.
        high: upper bound; equals the value where none is known.
        source: as text.
        measured: true if it was measured, false if it was given or looked up.
    """

    value: float
    low: float
    high: float
    source: str
    measured: bool


@dataclass(frozen=True)
class TokenThreshold:
    """Number of tokens per device from which computing can hide communication.

    Attributes:
        tokens: the least number; infinite: no number is enough.
        per: unit of work they are counted in, ``"optimizer step"`` or ``"micro-batch"``; see [Note: micro-batch].
        formula: with the numbers filled in.
    """

    tokens: float
    per: str
    formula: str


def measured_matmul_rate(profile: Profile, dtype: str = "bf16", device: str = "cpu") -> RateEstimate:
    """Return C as `paceline bench machine` measured it: the median, with the slowest and the fastest repetition.

    Args:
        profile: with the measurement.
        dtype: such as ``"bf16"``.
        device: ``"cpu"``, or the GPU's name.

    Raises:
        UsageError: it was not measured.
    """
    rate = profile.rate("matmul", dtype=_TORCH_DTYPES.get(dtype, dtype), device=device)
    source = f"measured: matrices of {rate.shape} in {rate.dtype} on {rate.device}"
    return RateEstimate(rate.value, rate.low, rate.high, source, measured=True)


def measured_link_rate(
    profile: Profile, backend: str, network: str | None = None, ranks: int = 2
) -> RateEstimate:
    """Return W from the fitted all-reduce: bytes per second that a rank sends while it receives as many.

    An all-reduce of n bytes that takes β·sent·n sends 2(p − 1)/p·n from each rank, whatever its algorithm, so W is
    nccl-tests' bus bandwidth of the largest messages. Its bounds are the error of 90 % of the held-out sizes (or, for a
    number of ranks that was not measured, of the held-out numbers of ranks).

    Args:
        profile: with the measurement.
        backend: such as ``"gloo"``.
        network: such as ``"loopback"``.
        ranks: p, at least 2.

    Raises:
        UsageError: it was not measured; there are fewer than 2 ranks; the fit has no cost per byte.
    """
    if ranks < 2:
        raise UsageError(f"bandwidth between {ranks} ranks", remedy="give 2 or more")
    cost = profile.collective("all-reduce", backend, network)
    fit = cost.fit
    slope = fit.segments_for(ranks)[-1].beta * terms_of(fit.op, fit.form, ranks).sent
    if slope <= 0.0:
        raise UsageError(
            f"all-reduce on {backend}, {cost.network}: its fit has no cost per byte",
            remedy="measure larger sizes with paceline bench collectives, then bench fit",
        )
    value = 2 * (ranks - 1) / ranks / slope
    error = fit.error_at(ranks)
    spread = 1.0 + (error.p90 if error else 0.0)
    source = f"fitted: all-reduce on {backend}, {cost.network}, {fit.form}, {ranks} ranks"
    if not fit.ranks[0] <= ranks <= fit.ranks[-1]:
        source += f" (measured with {', '.join(map(str, fit.ranks))})"
    return RateEstimate(value, value / spread, value * spread, source, measured=True)


def catalog_matmul_rate(name: str, dtype: str | None = None) -> RateEstimate:
    """Return C of a device in `paceline.cost_model.hardware_catalog`, by default in its first type of `DTYPES`."""
    device = find_device(name)
    dtype = dtype or next(each for each in DTYPES if getattr(device, each) is not None)
    rate = device.flops_per_second(dtype)
    return RateEstimate(rate, rate, rate, f"{device.name}, dense {dtype}: {device.source}", measured=False)


def catalog_link_rate(name: str) -> RateEstimate:
    """Return W of a kind of link in `paceline.cost_model.hardware_catalog`."""
    link = find_interconnect(name)
    rate = link.nbytes_per_second
    return RateEstimate(rate, rate, rate, f"{link.name}, one way: {link.source}", measured=False)


def intensity(flops: RateEstimate, wire: RateEstimate) -> RateEstimate:
    """Return α = C/W, FLOP per byte, between the worst and the best of both.

    Example:
        >>> round(intensity(catalog_matmul_rate("h100"), catalog_link_rate("nvlink4")).value)
        2199
    """
    if min(flops.low, wire.low) <= 0 or max(flops.high, wire.high) == math.inf:
        raise UsageError("C or W is 0 or infinite", remedy="give finite rates above 0")
    return RateEstimate(
        flops.value / wire.value,
        flops.low / wire.high,
        flops.high / wire.low,
        f"{flops.source}; {wire.source}",
        flops.measured and wire.measured,
    )


def ddp_tokens(intensity: float, ranks: int, gradient_nbytes: float = 2.0) -> TokenThreshold:
    """Return the threshold of data parallel, whose all-reduce overlaps with backward.

    Args:
        intensity: α = C/W, FLOP per byte.
        ranks: n.
        gradient_nbytes: g, bytes of a gradient on the wire.

    Example:
        >>> round(ddp_tokens(989.4e12 / 450e9, ranks=8).tokens)
        1924
    """
    _check(intensity, ranks)
    tokens = gradient_nbytes / 2 * intensity * (ranks - 1) / ranks
    return TokenThreshold(
        tokens, "optimizer step", f"{gradient_nbytes:g}/2 · {intensity:,.0f} · ({ranks} − 1)/{ranks}"
    )


def fsdp_tokens(
    intensity: float, ranks: int, weight_nbytes: float = 2.0, gradient_nbytes: float = 2.0
) -> TokenThreshold:
    """Return the threshold of full sharding: the larger of forward's and backward's, per micro-batch.

    Args:
        intensity: α = C/W.
        ranks: n.
        weight_nbytes: w, bytes of a weight on the wire.
        gradient_nbytes: g, bytes of a gradient on the wire.

    Example:
        >>> round(fsdp_tokens(2200.0, 8).tokens), round(fsdp_tokens(2200.0, 8, gradient_nbytes=4.0).tokens)
        (1925, 2888)
    """
    _check(intensity, ranks)
    forward, backward = weight_nbytes / 2, (weight_nbytes + gradient_nbytes) / 4
    share = f"{weight_nbytes:g}/2" if forward >= backward else f"({weight_nbytes:g} + {gradient_nbytes:g})/4"
    tokens = max(forward, backward) * intensity * (ranks - 1) / ranks
    return TokenThreshold(tokens, "micro-batch", f"{share} · {intensity:,.0f} · ({ranks} − 1)/{ranks}")


def hsdp_tokens(
    inside: float, between: float, shard_ranks: int, replicas: int, gradient_nbytes: float = 2.0
) -> tuple[TokenThreshold, TokenThreshold]:
    """Return the thresholds of hybrid sharding per micro-batch (FSDP within a group) and per step (DDP of shards).

    Each device all-reduces only its own shard, P/`shard_ranks`, so the slower links between groups have that much less
    to hide; and only once per optimizer step.

    Args:
        inside: α over the links of a group.
        between: α over a device's part of the links between groups.
        shard_ranks: of a group.
        replicas: number of groups.
        gradient_nbytes: g.

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
    inner = fsdp_tokens(inside, shard_ranks, 2.0, gradient_nbytes)
    return inner, TokenThreshold(outer.tokens, outer.per, formula)


def fsdp_tp_tokens(
    intensity: float, d_ff: int, tp_ranks: int, fsdp_axes: int = 1, tp_axes: int = 1, *, overlap: bool = False
) -> TokenThreshold:
    """Return the tokens of an FSDP shard, with tensor parallelism inside, from which forward is compute-bound.

    Args:
        intensity: α = C/W, W of one axis of the mesh.
        d_ff: F, width inside the feed-forward layer.
        tp_ranks: Y.
        fsdp_axes: Mx, axes of the mesh that carry FSDP.
        tp_axes: My, axes of the mesh that carry TP.
        overlap: whether both kinds of communication run at the same time, on separate axes; otherwise they add up.

    Example:
        >>> alpha = 4.6e14 / 1.8e11
        >>> round(fsdp_tp_tokens(alpha, 53248, 4, fsdp_axes=2).tokens)
        1581
        >>> round(fsdp_tp_tokens(alpha, 53248, 4, fsdp_axes=2, overlap=True).tokens)
        1278
    """
    _check(intensity, tp_ranks)
    share, alone = tp_ranks * intensity / (d_ff * tp_axes), intensity / fsdp_axes
    formula = f"({intensity:,.1f}/{fsdp_axes})"
    if share >= 1.0:
        return TokenThreshold(
            math.inf, "micro-batch", f"{tp_ranks} · {intensity:,.0f}/({d_ff} · {tp_axes}) = {share:.3g} ≥ 1"
        )
    if overlap:
        return TokenThreshold(alone, "micro-batch", formula)
    formula += f" / (1 − {tp_ranks} · {intensity:,.1f}/({d_ff} · {tp_axes}))"
    return TokenThreshold(alone / (1.0 - share), "micro-batch", formula)


def _check(intensity: float, ranks: int) -> None:
    if not 0 < intensity < math.inf:
        raise UsageError(f"C/W is {intensity!r}", remedy="give FLOP/s and bytes per second above 0")
    if ranks < 1:
        raise UsageError(f"{ranks} ranks", remedy="give 1 or more")
