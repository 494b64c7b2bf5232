"""Charts of data dispatch: imbalance over block size, and the end of an epoch on each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.data.sampling.uneven_policies import UnevenPolicy
from paceline.tools.plan.dispatch_forecast import DispatchForecast
from paceline.tools.plan.dispatch_text import percent
from paceline.tools.plan.imbalance_statistics import excess_bound_in_turns, expected_excess, unlikely_excess
from paceline.tools.report.charts.chart_style import (
    COLOURS,
    INK,
    MUTED,
    PAPER,
    Chart,
    LineEnd,
    in_paceline_style,
    label_line_ends,
    legend_patch,
    set_title,
    stacked_panels,
)

if TYPE_CHECKING:
    from matplotlib.ticker import Locator

    from paceline.tools.report.charts.chart_style import Axes

__all__ = ["MAX_PANELS", "epoch_end_chart", "imbalance_chart"]

MAX_PANELS = 6
"""Panels of `epoch_end_chart`; with more sizes, those whose ranks differ most are drawn."""

_RANDOM, _TURNS = COLOURS[0], COLOURS[1]
_TOGETHER, _ALONE, _WITHOUT = COLOURS[5], COLOURS[4], "#e4e7eb"
_POLICIES: tuple[UnevenPolicy, ...] = ("join", "truncate", "drop", "rebalance")
_STEPS = 48
_MAX_RANK_LABELS = 24


@in_paceline_style
def imbalance_chart(found: Sequence[DispatchForecast], *, title: str) -> Chart:
    """Return a chart of imbalance (largest amount above its share) over block size, both logarithmic.

    Lines are closed forms; markers are simulated or counted at the requested block sizes.
    """
    dealing = found[0].balance.dispatch
    shares, samples = dealing.shares, dealing.samples
    sizes = _sizes(sorted({each.block for each in found}), samples)
    numbers = [-(-samples // size) for size in sizes]
    lines = [
        (
            "at random: 1 in 1000 above",
            _RANDOM,
            "--",
            [unlikely_excess(shares, blocks) for blocks in numbers],
        ),
        ("at random: expected", _RANDOM, "-", [expected_excess(shares, blocks) for blocks in numbers]),
        (
            "in turns: never more",
            _TURNS,
            "--",
            [excess_bound_in_turns(shares, samples, size) for size in sizes],
        ),
    ]
    figure, (axes,) = stacked_panels(width=10, height=4.6)
    axes.set(xscale="log", yscale="log")
    ends: list[LineEnd] = []
    for label, colour, dash, values in lines:
        if not all(values):  # one rank: no imbalance
            continue
        axes.plot(sizes, values, dash, color=colour, linewidth=2)
        ends.append((sizes[-1], values[-1], label, colour))
    _points(axes, list({each.block: each for each in found}.values()))
    axes.set(xlabel="samples of a block", ylabel="largest amount above its share")
    axes.yaxis.set_major_formatter(lambda part, _: percent(part))
    axes.xaxis.set_major_formatter(lambda size, _: f"{size:,.0f}")
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    set_title(axes, title)
    label_line_ends(axes, ends, wide=True)
    return Chart(figure)


def _sizes(blocks: Sequence[int], samples: int) -> list[int]:
    """Return the block sizes at which lines are evaluated, a little beyond the requested range."""
    low, high = max(1, blocks[0] // 4), min(samples, max(4 * blocks[-1], 16 * blocks[0]))
    return sorted({round(low * (high / low) ** (step / _STEPS)) for step in range(_STEPS + 1)})


def _points(axes: Axes, found: Sequence[DispatchForecast]) -> None:
    blocks = [each.block for each in found]
    spreads = [each.imbalance.random for each in found]
    for name, marker, face, values in (
        ("mean", "o", _RANDOM, [spread.drawn for spread in spreads]),
        ("worst", "^", PAPER, [spread.drawn_worst for spread in spreads]),
    ):
        known = [value for value in values if value is not None]
        if known:
            label = f"{name} of {spreads[0].draws} draws"
            axes.plot(blocks, known, marker, color=_RANDOM, mfc=face, markersize=7, label=label)
    exact = [each.imbalance.in_turns or math.nan for each in found]
    none = [f"{block:,}" for block, part in zip(blocks, exact, strict=True) if math.isnan(part)]
    label = "in turns, exact" + (f" (0 for blocks of {', '.join(none)})" if none else "")
    axes.plot(blocks, exact, "s", color=_TURNS, markersize=7, label=label)


@in_paceline_style
def epoch_end_chart(found: Sequence[DispatchForecast], *, title: str) -> Chart:
    """Return a chart of the last steps of an epoch: which ranks have batches, and where each policy ends."""
    spreads = [max(each.balance.batches) - min(each.balance.batches) for each in found]
    widest = sorted(range(len(found)), key=lambda number: -spreads[number])[:MAX_PANELS]
    panels = [found[number] for number in sorted(widest)]
    ranks = panels[0].balance.dispatch.ranks
    each_height = min(3.2, max(1.5, 0.22 * ranks + 0.9))
    figure, all_axes = stacked_panels(
        width=10, height=each_height * len(panels) + 1.0, heights=[1.0] * len(panels)
    )
    for axes, each in zip(all_axes, panels, strict=True):
        _end(axes, each)
    all_axes[-1].set_xlabel("step")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    handles = [
        legend_patch("every rank has a batch", _TOGETHER),
        legend_patch("join uses it; truncate and drop never do", _ALONE),
        legend_patch("join: takes part without data; pad: its first samples again", _WITHOUT),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    return Chart(figure)


def _end(axes: Axes, each: DispatchForecast) -> None:
    """Draw one bar per rank: batches common to all ranks, its own, and up to the longest rank's."""
    own, ranks = each.balance.batches, each.balance.dispatch.ranks
    shortest, longest = min(own), max(own)
    if ranks <= _MAX_RANK_LABELS:
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=8)
    else:
        own = sorted(own)
        axes.set_ylabel(f"{ranks} ranks, sorted", fontsize=9)
        axes.set_yticks([])
    for ends, colour in (([longest] * ranks, _WITHOUT), (own, _ALONE), ([shortest] * ranks, _TOGETHER)):
        if ranks <= _MAX_RANK_LABELS:
            axes.barh(range(ranks), ends, 0.8, color=colour)
        else:
            axes.stairs(ends, orientation="horizontal", fill=True, color=colour)
    spread = max(longest - shortest, 1)
    axes.set(xlim=(max(0, shortest - 3 * spread), longest + 0.03 * spread), ylim=(ranks - 0.4, -0.6))
    axes.xaxis.set_major_locator(_whole_numbers())
    axes.tick_params(axis="x", labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title(_panel_title(each), loc="left", fontsize=10, color=MUTED)
    if each.balance.deadlock:
        axes.axvline(each.balance.outcome("rebalance").steps or 0, color=INK, linewidth=1.5)


def _panel_title(each: DispatchForecast) -> str:
    name = f"block {each.block}, batch {each.batch_size}"
    if not each.balance.deadlock:
        return f"{name}: all ranks run {each.balance.batches[0]} steps"
    steps = {policy: each.balance.outcome(policy).steps or "no" for policy in _POLICIES}
    return (
        f"{name}: join and pad {steps['join']} steps, truncate {steps['truncate']}, drop {steps['drop']}, "
        f"rebalance {steps['rebalance']} (line)"
    )


def _whole_numbers() -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=9, integer=True, steps=[1, 2, 5, 10])
