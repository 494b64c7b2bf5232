"""Step times of ranks on uneven machines with random jitter, and the wait for the slowest rank.

A rank's step takes c · w · m · j seconds: the step time c, its share of the work w (1 on average), its machine m and
the jitter j. m and j have mean 1: log-normal, or resampled measured steps. Ranks synchronise once in H steps, so the
longest sum of H steps counts.

[Note: longest of N] If all ranks are alike and synchronise at every step, the longest of N steps has the distribution
Fᴺ and is drawn as F⁻¹(U^(1/N)): a million ranks cost as much as one. Otherwise every rank is drawn.

[Note: centred] The finite sample of steps of a job is scaled to its expected mean of 1, so that a single rank has no
loss at all rather than none on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError, unknown

__all__ = ["BALANCES", "ClusterMachines", "NodeTimes", "StepSamples", "draw_longest", "sample_steps"]

Numbers = NDArray[np.float64]

BALANCES = ("equal", "speed")
_DRAW_LONGEST_FROM = 64
"""Ranks from which the longest step of identical ranks is drawn directly."""
_LEAST_DRAWN, _MOST_DRAWN = 1, 512
_CHUNK = 4_000_000


@dataclass(frozen=True)
class ClusterMachines:
    """Machines of a cluster.

    Attributes:
        speeds: relative speeds of nodes, repeated for all nodes; the step time is that of the fastest.
        spread: standard deviation of an additional log-normal factor per node with mean 1.
        jitter: standard deviation of a log-normal factor per rank and step with mean 1.
        measured: measured step times to sample instead of `jitter`; only their ratios matter.
        balance: distribution of the work: ``"equal"`` or by ``"speed"``.

    Raises:
        UsageError: a number is out of range.
    """

    speeds: tuple[float, ...] = (1.0,)
    spread: float = 0.0
    jitter: float = 0.0
    measured: tuple[float, ...] = ()
    balance: str = "equal"

    def __post_init__(self) -> None:
        if not self.speeds or not all(0 < each < math.inf for each in self.speeds):
            raise UsageError(f"speeds {list(self.speeds)}", remedy="give numbers above 0, such as 1:1:2:4")
        for name in ("spread", "jitter"):
            if not 0 <= getattr(self, name) <= 3:
                raise UsageError(
                    f"{name}={getattr(self, name)!r}", remedy="give a share from 0 to 300%, such as 10%"
                )
        if not all(0 < each < math.inf for each in self.measured):
            raise UsageError("a measured step of 0 seconds or less", remedy="give seconds above 0")
        if self.measured and self.jitter:
            raise UsageError(
                "both measured steps and jitter",
                remedy="measured steps include their jitter: omit jitter",
            )
        if self.balance not in BALANCES:
            raise unknown("balance", self.balance, BALANCES)

    @property
    def alike(self) -> bool:
        """Whether all ranks take the same time for their work, apart from jitter."""
        return self.balance == "speed" or (not self.spread and len(set(self.speeds)) == 1)


@dataclass(frozen=True)
class NodeTimes:
    """Nodes of one job, in units of the step time.

    Attributes:
        times: step of each node with its share of the work, without jitter.
        useful: the step if work were distributed by speed.
    """

    times: Numbers
    useful: float

    @property
    def slowest(self) -> float:
        """The longest step of all nodes."""
        return float(self.times.max())


@dataclass(frozen=True)
class StepSamples:
    """Sampled steps of several jobs, in units of the step time.

    Attributes:
        useful: per job, the step without jitter if work were distributed by speed.
        slowest: per job, the slowest machine's step without jitter.
        longest: ``[job, round]``: mean step until the last rank of the round.
    """

    useful: Numbers
    slowest: Numbers
    longest: Numbers


def draw_nodes(machines: ClusterMachines, nodes: int, rng: np.random.Generator) -> NodeTimes:
    """Draw the nodes of one job.

    Args:
        machines: the machines.
        nodes: number of nodes.
        rng: generator for their spread.
    """
    pattern = np.array(machines.speeds)
    slowness = pattern.max() / pattern[np.arange(nodes) % len(pattern)]
    if machines.spread:
        sigma = math.sqrt(math.log1p(machines.spread**2))
        slowness = slowness * np.exp(rng.normal(-(sigma**2) / 2, sigma, nodes))
    useful = float(1.0 / np.mean(1.0 / slowness))
    times = np.full(nodes, useful) if machines.balance == "speed" else slowness
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
    """Sample steps of several jobs.

    Args:
        machines: the machines.
        nodes: number of nodes.
        per_node: ranks per node.
        every: H, steps between synchronisations.
        jobs: number of jobs, each with its own machines.
        draws: approximate number of rank steps to draw in total.
        seed: seed of the generator.
    """
    rng = np.random.default_rng(list(seed))
    ranks = nodes * per_node
    rounds = min(_MOST_DRAWN, max(_LEAST_DRAWN, draws // (ranks * every * jobs)))
    varies = bool(machines.jitter or machines.measured)
    at_once = machines.alike and every == 1 and ranks >= _DRAW_LONGEST_FROM
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
    """Draw the longest jitter of N identical ranks for each of `count` steps; see [Note: longest of N].

    Args:
        machines: machines with jitter or measured steps.
        ranks: N.
        count: number of steps.
        rng: the generator.
    """
    above = -np.expm1(np.log1p(-rng.random(count)) / ranks)  # 1 − U^(1/N) without cancellation
    if machines.measured:
        steps = np.sort(_scaled(machines))
        place = len(steps) - 1 - np.floor(above * len(steps)).astype(np.int64)
        return steps[np.maximum(place, 0)]
    sigma = math.sqrt(math.log1p(machines.jitter**2))
    normal = NormalDist()
    quantile = np.array([-normal.inv_cdf(max(each, 5e-324)) for each in above.tolist()])
    return np.exp(sigma * quantile - sigma**2 / 2)


def _scaled(machines: ClusterMachines) -> Numbers:
    """Return measured steps scaled to mean 1."""
    steps = np.array(machines.measured)
    return steps / steps.mean()


def _drawn(
    machines: ClusterMachines, times: Numbers, every: int, rounds: int, rng: np.random.Generator
) -> Numbers:
    """Draw every step of every rank; return the mean step of the longest rank in each round."""
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
