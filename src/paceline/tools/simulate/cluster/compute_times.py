"""How long ranks compute: machines that differ for good, steps that vary at random, and who waits for whom.

A rank's step takes c · w · m · j seconds: c by the time of a step, w by its share of the work (1 on average), m by
its machine, j by chance. m and j have the mean 1: log-normal, or steps as they were measured, drawn anew. Ranks meet
once in H steps, so what counts is the longest sum of H steps.

[Note: the longest] Where all ranks are alike and meet at every step, the longest of N has the distribution Fᴺ, so it is
drawn at once from F⁻¹(U^(1/N)): a million ranks cost no more than one. Elsewhere every rank is drawn.

[Note: centred] The few steps that are drawn for a job are scaled to the mean 1 that they have in the long run. So one
rank alone has no loss at all, rather than none but for chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError, unknown

__all__ = ["SHARES", "ClusterMachines", "NodeTimes", "StepSamples", "draw_longest", "sample_steps"]

Numbers = NDArray[np.float64]

SHARES = ("equal", "speed")
_ALIKE_FROM = 64
"""Ranks from which the longest of alike ones is drawn at once."""
_LEAST_DRAWN, _MOST_DRAWN = 1, 512
_CHUNK = 4_000_000


@dataclass(frozen=True)
class ClusterMachines:
    """What machines are like.

    Attributes:
        speeds: relative ones of nodes, repeated to as many as there are; the fastest has the time of a step.
        spread: of nodes beside, standard deviation of a log-normal factor with mean 1.
        jitter: of a rank's steps, the same.
        measured: times of steps in seconds, to draw from instead of `jitter`; only their ratios count.
        shares: who gets how much work: ``"equal"``, or by ``"speed"``.

    Raises:
        UsageError: a number makes no sense.
    """

    speeds: tuple[float, ...] = (1.0,)
    spread: float = 0.0
    jitter: float = 0.0
    measured: tuple[float, ...] = ()
    shares: str = "equal"

    def __post_init__(self) -> None:
        if not self.speeds or not all(0 < each < math.inf for each in self.speeds):
            raise UsageError(f"speeds {list(self.speeds)}", remedy="give numbers above 0, such as 1:1:2:4")
        for name in ("spread", "jitter"):
            if not 0 <= getattr(self, name) <= 3:
                raise UsageError(
                    f"{name}={getattr(self, name)!r}", remedy="give a share from 0 to 300%, such as 10%"
                )
        if not all(0 < each < math.inf for each in self.measured):
            raise UsageError("a measured step that takes no time", remedy="give seconds above 0")
        if self.measured and self.jitter:
            raise UsageError(
                "both measured steps and jitter",
                remedy="steps that were measured have their own: leave it out",
            )
        if self.shares not in SHARES:
            raise unknown("shares", self.shares, SHARES)

    @property
    def alike(self) -> bool:
        """Whether no rank is slower than another for good, as far as its work goes."""
        return self.shares == "speed" or (not self.spread and len(set(self.speeds)) == 1)


@dataclass(frozen=True)
class NodeTimes:
    """The ranks of one job.

    Attributes:
        times: of a step of each node with its share of the work and no jitter; 1 is the time of a step.
        useful: what it would take if work were dealt by speed.
    """

    times: Numbers
    useful: float

    @property
    def slowest(self) -> float:
        """The longest of all."""
        return float(self.times.max())


@dataclass(frozen=True)
class StepSamples:
    """Steps of several jobs; 1 is the time of a step.

    Attributes:
        useful: of each job: time of a step if work were dealt by speed and no step varied.
        slowest: of each job: the slowest machine's step without jitter.
        longest: ``[job, round]``: mean step of each round, until the last rank is there.
    """

    useful: Numbers
    slowest: Numbers
    longest: Numbers


def draw_nodes(machines: ClusterMachines, nodes: int, rng: np.random.Generator) -> NodeTimes:
    """Return the machines of one job.

    Args:
        machines: what they are like. nodes: how many. rng: what draws their spread.
    """
    pattern = np.array(machines.speeds)
    slowness = pattern.max() / pattern[np.arange(nodes) % len(pattern)]
    if machines.spread:
        sigma = math.sqrt(math.log1p(machines.spread**2))
        slowness = slowness * np.exp(rng.normal(-(sigma**2) / 2, sigma, nodes))
    useful = float(1.0 / np.mean(1.0 / slowness))
    times = np.full(nodes, useful) if machines.shares == "speed" else slowness
    return NodeTimes(times, useful)


def sample_steps(
    machines: ClusterMachines,
    nodes: int,
    per_node: int,
    every: int,
    jobs: int,
    draws: int,
    seed: Sequence[int],
) -> StepSamples:
    """Return steps of several jobs.

    Args:
        machines: what they are like. nodes: how many. per_node: ranks of each. every: H, steps between two meetings.
        jobs: how many, each with machines of its own. draws: ranks' steps to draw in all, about. seed: of all of it.
    """
    rng = np.random.default_rng(list(seed))
    ranks = nodes * per_node
    rounds = min(_MOST_DRAWN, max(_LEAST_DRAWN, draws // (ranks * every * jobs)))
    varies = bool(machines.jitter or machines.measured)
    at_once = machines.alike and every == 1 and ranks >= _ALIKE_FROM
    crews = [draw_nodes(machines, nodes, rng) for _ in range(jobs)]
    longest = np.empty((jobs, _MOST_DRAWN if at_once else rounds if varies else 1))
    for job, each in enumerate(crews):
        if not varies:
            longest[job] = each.slowest
        elif at_once:
            longest[job] = each.slowest * draw_longest(machines, ranks, longest.shape[1], rng)
        else:
            longest[job] = _drawn(machines, np.repeat(each.times, per_node), every, rounds, rng)
    return StepSamples(
        np.array([each.useful for each in crews]), np.array([each.slowest for each in crews]), longest
    )


def draw_longest(machines: ClusterMachines, ranks: int, count: int, rng: np.random.Generator) -> Numbers:
    """Return the longest of so many ranks' variation, in each of `count` steps; see [Note: the longest].

    Args:
        machines: whose jitter or measured steps. ranks: N, all alike. count: steps. rng: what draws them.
    """
    above = -np.expm1(
        np.log1p(-rng.random(count)) / ranks
    )  # 1 − U^(1/N), which U^(1/N) itself would round off
    if machines.measured:
        steps = np.sort(_scaled(machines))
        place = len(steps) - 1 - np.floor(above * len(steps)).astype(np.int64)
        return steps[np.maximum(place, 0)]
    sigma = math.sqrt(math.log1p(machines.jitter**2))
    normal = NormalDist()
    quantile = np.array([-normal.inv_cdf(max(each, 5e-324)) for each in above.tolist()])
    return np.exp(sigma * quantile - sigma**2 / 2)


def _scaled(machines: ClusterMachines) -> Numbers:
    """Return measured steps with the mean 1."""
    steps = np.array(machines.measured)
    return steps / steps.mean()


def _drawn(
    machines: ClusterMachines, times: Numbers, every: int, rounds: int, rng: np.random.Generator
) -> Numbers:
    """Return the longest of all ranks in each round, every step of every rank drawn."""
    ranks, chunk = len(times), max(1, _CHUNK // len(times))
    measured = _scaled(machines) if machines.measured else None
    sigma = math.sqrt(math.log1p(machines.jitter**2))
    longest, whole = np.empty(rounds), 0.0
    for first in range(0, rounds, chunk):
        here = min(chunk, rounds - first)
        sums = np.zeros((here, ranks))
        for _ in range(every):
            if measured is None:
                sums += np.exp(rng.normal(-(sigma**2) / 2, sigma, (here, ranks)))
            else:
                sums += measured[rng.integers(0, len(measured), (here, ranks))]
        whole += float(sums.sum())
        longest[first : first + here] = (sums * times).max(axis=1)
    return longest / every / (whole / (rounds * ranks * every))
