"""What `paceline simulate` says of the steps that `measure.py` measures (pure): nothing measured there goes into it.

What goes into it: α and β, fitted to all-reduces by 2 and 3 hosts; and what a host is like: its computing alone, and
what computing and exchanges do to each other. Hosts of the lab are processes of one machine, which N of them share, so
a host is another one at another N and is measured there, without a training step. `Host.among` tells what can be said
of it from 2 of them: N ranks of one thread on c cores compute N/c times as long as where each has a core. They also
finish together, however uneven they are: who is through early leaves its core to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from strategies import ALONE, STRATEGIES

from paceline.cost_model.collective_fit import CollectiveFit
from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points
from paceline.tools.simulate.cluster.cluster_network import FittedNetwork
from paceline.tools.simulate.cluster.cluster_simulation import ClusterPlan, ClusterRow, simulate_cluster

__all__ = ["FIT_HOSTS", "NAMES", "Host", "fitted", "predict"]

FIT_HOSTS = (2, 3)
"""Numbers of hosts whose all-reduces are fitted; steps are predicted at others too."""


def fitted(all_reduce: Mapping[int, Mapping[str, float]]) -> CollectiveFit:
    """Return the cost of an all-reduce.

    Args:
        all_reduce: by number of hosts and size in bytes, seconds.
    """
    points = [
        MeasuredPoint(int(nbytes), hosts, seconds)
        for hosts, times in all_reduce.items()
        for nbytes, seconds in times.items()
    ]
    return fit_points(points, "all-reduce")


@dataclass(frozen=True)
class Host:
    """What hosts are like where so many share this machine.

    Attributes:
        computing: seconds of a step without exchanges. backward: share of it that is backward.
        computing_slows, calls_slow: as `ClusterPlan` has them.
    """

    computing: float
    backward: float
    computing_slows: float
    calls_slow: float

    @classmethod
    def measured(cls, found: Mapping[str, Any]) -> Host:
        """Return what `ranks.py` found of it."""
        return cls(median(found["rounds"][ALONE]), *(found["host"][name] for name in NAMES))

    def among(self, ranks: int, cores: float) -> Host:
        """Return what one of so many is like if this is one of 2."""
        return replace(self, computing=self.computing * max(1.0, ranks / cores) / max(1.0, 2 / cores))


NAMES = ("backward", "computing_slows", "calls_slow")


def predict(name: str, ranks: int, fit: CollectiveFit, host: Host, nbytes: float) -> ClusterRow:
    """Return what a strategy's step takes.

    Args:
        name: of a strategy. ranks: how many, one a host. fit: of the all-reduce. host: what they are like.
        nbytes: of the gradients.
    """
    strategy = STRATEGIES[name]
    assert strategy is not None
    plan: dict[str, Any] = {"strategy": strategy.name} | {each: getattr(host, each) for each in NAMES}
    if strategy.name != "flat":
        plan["bucket_nbytes"] = strategy.bucket_mib * 2**20
    return simulate_cluster(
        ClusterPlan(network=FittedNetwork(fit), step_seconds=host.computing, nbytes=nbytes, **plan), ranks
    )
