"""How a hub judges, merges and answers, as plain values (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.async_dp.hub.outer_merge import HubOptimizer
from paceline.async_dp.hub.population import PopulationRules
from paceline.async_dp.hub.update_screening import ScreeningRules, StalenessPolicy
from paceline.errors import UsageError, unknown

__all__ = ["PARAM_CODECS", "HubRules", "HubShard"]

PARAM_CODECS = ("bf16", "fp16", "fp32", "int8")
"""How the centre may be packed for its way to workers."""


@dataclass(frozen=True)
class HubShard:
    """Which of several hubs this is: it keeps the fragments index, index + of, index + 2 of, …"""

    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.of:
            raise UsageError(
                f"shard {self.index} of {self.of}", remedy="count hubs from 0, for example 0/2 and 1/2"
            )


@dataclass(frozen=True)
class HubRules:
    """What a hub is asked for.

    Attributes:
        outer: how updates are taken in. staleness: what becomes of old ones. screen: which are refused.
        population: None: all workers share a centre from the beginning.
        down: how the centre is packed for workers.
        shard: which of several hubs this is.
        bandwidth: bytes per second that may leave, and as many that may come; None: all that the link carries.
        silent_after: seconds without a word after which a worker does not count among the N.
        snapshot_every: updates between two snapshots.
    """

    outer: HubOptimizer = field(default_factory=HubOptimizer)
    staleness: StalenessPolicy = field(default_factory=StalenessPolicy)
    screen: ScreeningRules = field(default_factory=ScreeningRules)
    population: PopulationRules | None = None
    down: str = "bf16"
    shard: HubShard = field(default_factory=HubShard)
    bandwidth: float | None = None
    silent_after: float = 15.0
    snapshot_every: int = 500

    def __post_init__(self) -> None:
        if self.down not in PARAM_CODECS:
            raise unknown("way to pack the centre", self.down, PARAM_CODECS)
        if self.population is not None and self.shard.of > 1:
            raise UsageError(
                "a population with several hubs", remedy="lead the population with one hub, or leave it out"
            )
        if not self.silent_after > 0:
            raise UsageError(f"silent_after={self.silent_after!r}", remedy="give seconds above 0, such as 15")
        if type(self.snapshot_every) is not int or self.snapshot_every < 1:
            raise UsageError(
                f"snapshot_every={self.snapshot_every!r}", remedy="give a whole number of updates, 1 or more"
            )
