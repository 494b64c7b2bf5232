"""C and W, a device's FLOP/s and what it sends per second: measured, with their errors, or as data sheets have them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.cost_model.algorithm_terms import terms_of
from paceline.cost_model.hardware_catalog import DTYPES, device, interconnect
from paceline.cost_model.profile import Profile
from paceline.errors import UsageError

__all__ = ["Quantity", "intensity", "matmul_of", "matmul_rate", "wire_of", "wire_rate"]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "tf32": "float32"}


@dataclass(frozen=True)
class Quantity:
    """A number with its bounds, and where it is from.

    Attributes:
        value, low, high: in FLOP/s, bytes per second, or FLOP a byte; the bounds equal the value where none is known.
        source: in words.
        measured: whether it was measured rather than looked up.
    """

    value: float
    low: float
    high: float
    source: str
    measured: bool


def matmul_rate(profile: Profile, dtype: str = "bf16", device: str = "cpu") -> Quantity:
    """Return C as `paceline bench machine` measured it: the median, with the slowest and the fastest repetition.

    Args:
        profile: what was measured. dtype: such as ``"bf16"``. device: ``"cpu"``, or the GPU's name.

    Raises:
        UsageError: it was not measured.
    """
    rate = profile.rate("matmul", dtype=_DTYPES.get(dtype, dtype), device=device)
    where = f"measured: matrices of {rate.shape} in {rate.dtype} on {rate.device}"
    return Quantity(rate.value, rate.low, rate.high, where, measured=True)


def wire_rate(profile: Profile, backend: str, network: str | None = None, ranks: int = 2) -> Quantity:
    """Return W from the fitted all-reduce: bytes per second that a rank sends while it receives as many.

    An all-reduce of n bytes that takes β·sent·n sends 2(p − 1)/p·n from each rank, whatever its algorithm, so that is
    nccl-tests' bus bandwidth of the largest messages. Its error is what the fit was off at sizes (or, for a number of
    ranks that was not measured, at numbers of ranks) that were held out, nine in ten of them.

    Args:
        profile: what was measured. backend: such as ``"gloo"``. network: such as ``"loopback"``.
        ranks: p, at least 2.

    Raises:
        UsageError: it was not measured; fewer than 2 ranks; the fit has no cost a byte.
    """
    if ranks < 2:
        raise UsageError(f"bandwidth between {ranks} ranks", remedy="give 2 or more")
    cost = profile.collective("all-reduce", backend, network)
    fit = cost.fit
    slope = fit.segments_for(ranks)[-1].line.beta * terms_of(fit.op, fit.form, ranks).sent
    if slope <= 0.0:
        raise UsageError(
            f"all-reduce on {backend}, {cost.network}: its fit has no cost a byte",
            remedy="measure larger sizes with paceline bench collectives, then bench fit",
        )
    value = 2 * (ranks - 1) / ranks / slope
    error = fit.error_at(ranks)
    spread = 1.0 + (error.p90 if error else 0.0)
    where = f"fitted: all-reduce on {backend}, {cost.network}, {fit.form}, {ranks} ranks"
    if not fit.ranks[0] <= ranks <= fit.ranks[-1]:
        where += f" (measured with {', '.join(map(str, fit.ranks))})"
    return Quantity(value, value / spread, value * spread, where, measured=True)


def matmul_of(name: str, dtype: str | None = None) -> Quantity:
    """Return C of a device in the table, in its first type of `DTYPES` unless told; errors as for `plan.hardware`."""
    found = device(name)
    dtype = dtype or next(each for each in DTYPES if getattr(found, each) is not None)
    rate = found.flops_per_second(dtype)
    return Quantity(rate, rate, rate, f"{found.name}, dense {dtype}: {found.source}", measured=False)


def wire_of(name: str) -> Quantity:
    """Return W of a kind of link in the table; errors as for `paceline.cost_model.hardware_catalog`."""
    found = interconnect(name)
    rate = found.nbytes_per_second
    return Quantity(rate, rate, rate, f"{found.name}, one way: {found.source}", measured=False)


def intensity(flops: Quantity, wire: Quantity) -> Quantity:
    """Return α = C/W, FLOP a byte, between the worst and the best of both.

    Example:
        >>> round(intensity(matmul_of("h100"), wire_of("nvlink4")).value)
        2199
    """
    if min(flops.low, wire.low) <= 0 or max(flops.high, wire.high) == math.inf:
        raise UsageError("C or W is none", remedy="give rates above 0")
    return Quantity(
        flops.value / wire.value,
        flops.low / wire.high,
        flops.high / wire.low,
        f"{flops.source}; {wire.source}",
        flops.measured and wire.measured,
    )
