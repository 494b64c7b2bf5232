"""What `paceline simulate` says of the steps that `measure.py` measures (pure): nothing measured there goes into it.

What goes into it: α and β, fitted to all-reduces by 2 and 3 hosts; computing alone, measured at 2 ranks; and how the
cores are shared: hosts of the lab are processes of one machine, so N ranks of one thread on c cores compute N/c times
as long as where each has a core. They also finish together, however uneven they are: who is through early leaves its
core to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from strategies import STRATEGIES

from paceline.plan.fit import Fit
from paceline.plan.fitting import Point, fit_points
from paceline.simulate.cluster.fitted import FittedNetwork
from paceline.simulate.cluster.plan import ClusterPlan
from paceline.simulate.cluster.run import ClusterRow, simulate

__all__ = ["FIT_HOSTS", "fitted", "predict"]

FIT_HOSTS = (2, 3)
"""Numbers of hosts whose all-reduces are fitted; steps are predicted at others too."""


def fitted(all_reduce: Mapping[int, Mapping[str, float]]) -> Fit:
    """Return the cost of an all-reduce.

    Args:
        all_reduce: by number of hosts and size in bytes, seconds.
    """
    points = [
        Point(int(nbytes), hosts, seconds)
        for hosts, times in all_reduce.items()
        for nbytes, seconds in times.items()
    ]
    return fit_points(points, "all-reduce")


def predict(
    name: str, ranks: int, fit: Fit, alone: Sequence[float], backward: float, nbytes: float, cores: float
) -> ClusterRow:
    """Return what a strategy's step takes.

    Args:
        name: of a strategy. ranks: how many, one a host. fit: of the all-reduce. alone: seconds a step of
            computing at 2 ranks, of several rounds. backward: share of it that is backward. nbytes: of the gradients.
        cores: of this machine.
    """
    strategy = STRATEGIES[name]
    assert strategy is not None
    plan: dict[str, Any] = {"strategy": strategy.name, "backward": backward}
    if strategy.name != "flat":
        plan["bucket_nbytes"] = strategy.bucket_mib * 2**20
    computing = median(alone) * max(1.0, ranks / cores) / max(1.0, 2 / cores)
    return simulate(ClusterPlan(FittedNetwork(fit), computing, nbytes, **plan), ranks)
