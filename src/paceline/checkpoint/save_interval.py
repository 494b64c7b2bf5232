"""How often to save: the interval between checkpoints that loses the least time, and what is lost (pure).

A job computes for τ seconds, writes a checkpoint for δ seconds, and repeats. Failures are a Poisson process with a mean
interval of M seconds (a node's MTBF divided by the number of nodes); each costs R seconds of restart and the work since
the last checkpoint. Restarts and writes can fail too.

    Young   τ = √(2·δ·M)                                             (CACM 17(9), 1974)
    Daly    τ = √(2·δ·M)·[1 + ⅓·√(δ/2M) + ⅑·δ/2M] − δ,  M if δ ≥ 2M  (FGCS 22(3), 2006, eq. 37)
    time    M·e^(R/M)·(e^((τ+δ)/M) − 1) for each τ of work           (the same, eq. 13: exact for such failures)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import UsageError

__all__ = ["FailureModel", "daly_interval", "expected_slowdown", "expected_undone", "young_interval"]


@dataclass(frozen=True)
class FailureModel:
    """Frequency of failures and cost of checkpoints and restarts.

    Attributes:
        mtbf: M, mean seconds between failures of the whole job; infinite without failures.
        write: δ, seconds that training waits for a checkpoint.
        restart: R, seconds from a failure until training resumes.

    Raises:
        UsageError: a number is out of range.
    """

    mtbf: float
    write: float
    restart: float = 0.0

    def __post_init__(self) -> None:
        if not self.mtbf > 0:
            raise UsageError(f"mtbf={self.mtbf!r} seconds", remedy="give a time above 0")
        for name in ("write", "restart"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)!r} seconds", remedy="give a time of 0 or more")


def young_interval(risk: FailureModel) -> float:
    """Return Young's interval in seconds; infinite without failures.

    Example:
        >>> young_interval(FailureModel(mtbf=7200.0, write=16.0))
        480.0
    """
    return math.sqrt(2 * risk.write * risk.mtbf)


def daly_interval(risk: FailureModel) -> float:
    """Return Daly's higher-order interval in seconds; infinite without failures.

    Example:
        >>> round(daly_interval(FailureModel(mtbf=7200.0, write=16.0)), 1)
        469.4
    """
    if risk.mtbf == math.inf:
        return math.inf
    if risk.write >= 2 * risk.mtbf:
        return risk.mtbf
    part = risk.write / (2 * risk.mtbf)
    return young_interval(risk) * (1 + math.sqrt(part) / 3 + part / 9) - risk.write


def expected_slowdown(risk: FailureModel, interval: float) -> float:
    """Return the expected time of a job divided by its computing time; infinite if it never ends.

    Args:
        risk: failures and their cost.
        interval: τ in seconds; infinite (no checkpoints) only without failures.
    """
    if risk.mtbf == math.inf:
        return 1.0 if interval == math.inf else 1.0 + risk.write / interval
    exponent = (interval + risk.write) / risk.mtbf
    if exponent + risk.restart / risk.mtbf > 500:
        return math.inf
    return risk.mtbf * math.exp(risk.restart / risk.mtbf) * math.expm1(exponent) / interval


def expected_undone(mtbf: float, period: float) -> float:
    """Return the mean seconds since the last period was complete when a failure happens.

    Args:
        mtbf: mean seconds between failures.
        period: seconds of a period: a step, or training between checkpoints with its checkpoint.

    Example:
        >>> expected_undone(1e9, 60.0), round(expected_undone(60.0, 60.0), 2)
        (30.0, 25.08)
    """
    failures = period / mtbf
    if failures < 1e-6:
        return period / 2
    return mtbf - period / math.expm1(min(failures, 500.0))
