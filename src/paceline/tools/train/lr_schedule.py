"""Learning-rate schedule of ``paceline train``: warm-up, then a cosine."""

from __future__ import annotations

import math

__all__ = ["cosine_lr"]


def cosine_lr(step: int, *, steps: int, warmup: int, peak: float, floor: float = 0.1) -> float:
    """Return the learning rate of `step`: linear warm-up, then half a cosine down to `floor`.

    Args:
        step: steps done so far, 0 ≤ step < steps.
        steps: total number of steps.
        warmup: steps over which the rate rises to `peak`; the first one is not zero.
        peak: the largest rate.
        floor: rate of the last step as a share of `peak`.

    Example:
        >>> [round(cosine_lr(step, steps=5, warmup=2, peak=1.0), 2) for step in range(5)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
