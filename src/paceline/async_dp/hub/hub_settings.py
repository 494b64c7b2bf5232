"""Settings of a hub, as plain values: how it screens updates, merges them and answers (pure)."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from paceline.async_dp.hub.staleness_policy import StalenessPolicy
from paceline.errors import require, unknown

__all__ = [
    "HubOptimizer",
    "HubRules",
    "HubShard",
    "MergeRules",
    "PopulationRules",
    "ScreeningRules",
]

_MERGE_ON = ("arrival", "quorum")
_OUTER_OPTIMIZERS = ("averaging", "delayed-nesterov", "nesterov")
_PARAM_CODECS = ("bf16", "fp16", "fp32", "int8")
_MAX_STABLE_LR = 0.1  # largest ε · μ of Nesterov per arrival that is allowed without `unstable`


@dataclass(frozen=True)
class HubOptimizer:
    """Outer optimizer that merges updates, see `paceline.async_dp.hub.update_merging`.

    Attributes:
        name: ``"averaging"``, ``"delayed-nesterov"`` or ``"nesterov"``.
        lr: ε, above 0.
        momentum: μ, from 0 to below 1; averaging has none.
        warmup: rounds (N arrivals each) of plain averaging before the outer optimizer starts: what workers learnt
            before their first update is large, and no direction to continue in.
        unstable: allow Nesterov per arrival although it diverges.

    Raises:
        UsageError: a value is out of range; Nesterov per arrival without `unstable`.
    """

    name: Literal["averaging", "delayed-nesterov", "nesterov"] = "averaging"
    lr: float = 1.0
    momentum: float = 0.9
    warmup: int = 1
    unstable: bool = False

    def __post_init__(self) -> None:
        lr, momentum, warmup = self.lr, self.momentum, self.warmup
        if self.name not in _OUTER_OPTIMIZERS:
            raise unknown("outer optimizer", self.name, _OUTER_OPTIMIZERS)
        lr_ok = isinstance(lr, int | float) and 0 < lr < math.inf
        require(lr_ok, f"outer lr={lr!r}", "give a number above 0, such as 1")
        momentum_ok = isinstance(momentum, int | float) and 0 <= momentum < 1
        require(momentum_ok, f"outer momentum={momentum!r}", "give a number from 0 to below 1, such as 0.9")
        warmup_ok = type(warmup) is int and warmup >= 0
        require(warmup_ok, f"outer warmup={warmup!r}", "give a whole number of rounds, 0 or more")
        require(
            self.name != "nesterov" or lr * momentum <= _MAX_STABLE_LR or self.unstable,
            f"Nesterov momentum {momentum:g} at every arrival with lr {lr:g} diverges",
            "use delayed-nesterov or averaging; to see it diverge pass --unstable (unstable=True)",
        )

    @property
    def has_momentum(self) -> bool:
        """Whether it keeps a momentum."""
        return self.name != "averaging" and self.momentum > 0


@dataclass(frozen=True)
class MergeRules:
    """When updates are merged, see `paceline.async_dp.hub.merge_window`.

    Attributes:
        on: ``"arrival"``: each by itself as it arrives; ``"quorum"``: those of a round together.
        quorum: live workers that must have delivered before a merge: their share, or their number (int).
    """

    on: Literal["arrival", "quorum"] = "arrival"
    quorum: float = 0.5

    def __post_init__(self) -> None:
        if self.on not in _MERGE_ON:
            raise unknown("time of merging", self.on, _MERGE_ON)
        share = type(self.quorum) is float and 0 < self.quorum <= 1
        number = type(self.quorum) is int and self.quorum >= 1
        require(
            share or number,
            f"quorum={self.quorum!r}",
            "give a share of the workers above 0 and at most 1, such as 0.5, or a number of workers",
        )

    def needed(self, workers: int) -> int:
        """Return how many of the live workers must have delivered.

        Example:
            >>> MergeRules("quorum", 0.5).needed(5), MergeRules("quorum", 4).needed(3)
            (3, 3)
        """
        wanted = self.quorum if type(self.quorum) is int else math.ceil(self.quorum * workers)
        return max(1, min(int(wanted), workers))


@dataclass(frozen=True)
class ScreeningRules:
    """Limits for updates, see `paceline.async_dp.hub.update_screening`."""

    max_norm_ratio: float = 10.0  # to the usual norm; 0: any
    max_score_increase: float | None = 0.05  # None: any
    strikes: int = 3  # refused updates among the last `window` that lead to quarantine
    window: int = 10
    quarantine_seconds: float = 60.0  # of the first quarantine

    def __post_init__(self) -> None:
        ratio, increase, seconds = self.max_norm_ratio, self.max_score_increase, self.quarantine_seconds
        require(
            ratio == 0 or 1 < ratio < math.inf,
            f"max_norm_ratio={ratio!r}",
            "give a number above 1, such as 10, or 0 for no limit",
        )
        require(
            increase is None or 0 <= increase < math.inf,
            f"max_score_increase={increase!r}",
            "give a number of 0 or more, such as 0.05, or None",
        )
        strikes_ok = 1 <= self.strikes <= self.window
        require(strikes_ok, f"strikes={self.strikes!r} of window={self.window!r}", "give 1 up to the window")
        require(0 < seconds < math.inf, f"quarantine_seconds={seconds!r}", "give seconds above 0")


@dataclass(frozen=True)
class PopulationRules:
    """Settings of a population before all workers share parameters, see `paceline.async_dp.hub.population`.

    Attributes:
        steps: local steps of most workers after which all join the best.
        margin: share of the best score by which the worst worker may be behind; infinity: no worker is replaced.
        grace: scores that a worker reports, after it started or was replaced, before it is judged.
        perturb: factor between the learning rates of a replaced worker and the best; 1: none.
        gap: lead of the best over all others, as a share of its score, at which all join it early; None: never.
        seed: of the random choices.
    """

    steps: int = 100
    margin: float = 0.05
    _: KW_ONLY
    grace: int = 1
    perturb: float = 1.0
    gap: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        steps, grace, perturb, gap = self.steps, self.grace, self.perturb, self.gap
        steps_ok, grace_ok = type(steps) is int and steps >= 1, type(grace) is int and grace >= 0
        require(steps_ok, f"population of {steps!r} steps", "give a whole number of 1 or more")
        require(self.margin > 0, f"margin={self.margin!r}", "give a share above 0, such as 0.05")
        require(grace_ok, f"grace={grace!r}", "give a whole number of scores, 0 or more")
        require(1 <= perturb < math.inf, f"perturb={perturb!r}", "give a factor of 1 or more, such as 1.2")
        require(gap is None or gap > 0, f"gap={gap!r}", "give a share above 0, such as 0.2, or None")


@dataclass(frozen=True)
class HubShard:
    """Position among several hubs: this one serves the fragments index, index + count, index + 2 · count, …"""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        index_ok = 0 <= self.index < self.count
        require(index_ok, f"shard {self.index} of {self.count}", "count hubs from 0, for example 0/2 and 1/2")


@dataclass(frozen=True, kw_only=True)
class HubRules:
    """All settings of a hub."""

    outer: HubOptimizer = field(default_factory=HubOptimizer)
    merge: MergeRules = field(default_factory=MergeRules)
    staleness: StalenessPolicy = field(default_factory=StalenessPolicy)
    screen: ScreeningRules = field(default_factory=ScreeningRules)
    population: PopulationRules | None = None  # None: all workers share parameters from the start
    down: str = "bf16"  # codec of the global parameters that are sent to workers
    shard: HubShard = field(default_factory=HubShard)
    bandwidth: float | None = None  # bytes per second in each direction; None: no limit
    silent_after: float = 15.0  # seconds without a message after which a worker no longer counts among the N
    snapshot_every: int = 500  # updates

    def __post_init__(self) -> None:
        silent_after, snapshot_every = self.silent_after, self.snapshot_every
        if self.down not in _PARAM_CODECS:
            raise unknown("codec of the global parameters", self.down, _PARAM_CODECS)
        require(
            self.population is None or self.shard.count == 1,
            "a population with several hubs",
            "lead the population with one hub, or leave it out",
        )
        require(silent_after > 0, f"silent_after={silent_after!r}", "give seconds above 0, such as 15")
        snapshot_ok = type(snapshot_every) is int and snapshot_every >= 1
        require(
            snapshot_ok, f"snapshot_every={snapshot_every!r}", "give a whole number of updates, 1 or more"
        )
