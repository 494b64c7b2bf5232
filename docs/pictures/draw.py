"""Draws the pictures of the README and of ideas, from the code and from committed results.

    python docs/pictures/draw.py

Writes beside this file: `worlds.png` (which variables give a process its place, as `paceline.world` reads them),
`exactness.png` (the error of gradients on uneven data, from benchmarks/loader/exact.json), `slow_link.png` (loss over
time on a slow network, from benchmarks/slow-networks/loss-4x100Mbit.json) and `overlap.png` (work and exchange at the
same time, from benchmarks/exchange).
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from paceline.tools.report.charts.chart_style import (
    COLOURS,
    INK,
    MUTED,
    Chart,
    in_paceline_style,
    set_title,
    stacked_panels,
)
from paceline.world.environment import MPICH, OPEN_MPI, SLURM, TORCHRUN

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks"
FACTS = ("rank", "size", "local_rank", "local_size", "node", "nodes")
EXCHANGES = {
    "ring-4-ranks": "4 ranks on one machine, 400 MB each",
    "ring-2-hosts": "2 hosts, 200 Mbit/s, 20 MB each",
}


@in_paceline_style
def worlds() -> Chart:
    """Draw which variable of which launcher tells what."""
    launchers = (TORCHRUN, SLURM, OPEN_MPI, MPICH)
    figure, (axes,) = stacked_panels(12, 3.2)
    for column, launcher in enumerate(launchers):
        for row, fact in enumerate(FACTS):
            value = getattr(launcher, fact)
            axes.text(
                column,
                row,
                value or "·",
                ha="center",
                va="center",
                fontsize=8,
                color=COLOURS[0] if value else MUTED,
            )
    axes.set_xticks(range(len(launchers)), [launcher.name for launcher in launchers])
    axes.set_yticks(range(len(FACTS)), [fact.replace("_", " ") for fact in FACTS])
    axes.set_xlim(-0.5, len(launchers) - 0.5)
    axes.set_ylim(len(FACTS) - 0.5, -0.5)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    return Chart(figure)


EXACTNESS = {
    "torch DDP in Join, divided by the initial world size": "torch DDP, join(), its default",
    "torch DDP in Join, divided by the ranks that are left": "torch DDP, join(),\ndivided by the ranks left",
    "torch DDP, batches in proportion": "torch DDP",
    "torch DDP, batches in proportion, loss weighted by hand": "torch DDP, loss weighted by hand",
}


@in_paceline_style
def exactness() -> Chart:
    """Draw the error of the gradient, on a logarithmic axis, for each way of training on uneven data."""
    rows = json.loads((RESULTS / "loader" / "exact.json").read_text(encoding="utf-8"))["rows"]
    error_of = {row["name"]: row["error"] for row in rows}
    errors = {label: error_of.pop(name) for name, label in EXACTNESS.items()}
    errors["Paceline, worst of every strategy"] = max(error_of.values())
    figure, (axes,) = stacked_panels(9, 2.9)
    colours = [COLOURS[1]] * len(EXACTNESS) + [COLOURS[0]]
    axes.barh(
        list(errors), [error - 1e-17 for error in errors.values()], left=1e-17, color=colours, height=0.6
    )
    axes.set_xscale("log")
    axes.set_xlim(1e-17, 100)
    axes.invert_yaxis()
    axes.set_xlabel("largest relative error of a gradient (float64; 1 = 100 %)")
    for at, error in enumerate(errors.values()):
        text = f"{error:.0%}".replace("%", " %") if error > 1e-3 else f"{error:.0e}"
        axes.annotate(text, (error, at), (4, 0), textcoords="offset points", va="center")
    set_title(axes, "Four ranks with unequal batches: how wrong is the gradient?")
    return Chart(figure)


@in_paceline_style
def slow_link() -> Chart:
    """Draw held-out loss over time on links of 100 Mbit/s: torch DDP, with its fp16 hook, and LocalSGD; all seeds."""
    result = json.loads((RESULTS / "slow-networks" / "loss-4x100Mbit.json").read_text(encoding="utf-8"))
    ddp, fp16, ours = (result[key] for key in ("ddp", "ddp_fp16", "ours"))
    step_seconds = median(ddp["seconds"])
    fp16_share = median(own / other for own, other in zip(fp16["seconds"], ddp["seconds"], strict=True))
    figure, (axes,) = stacked_panels(9, 3.8)
    for name, colour, curves, per_step in (
        ("torch DDP", INK, ddp["curves"], step_seconds),
        ("torch DDP with its fp16 hook", COLOURS[1], ddp["curves"], step_seconds * fp16_share),
        ("paceline.LocalSGD, every 4 steps, int4", COLOURS[0], ours["curves"], None),
    ):
        for index, points in enumerate(curves):
            minutes = [(point["step"] * per_step if per_step else point["seconds"]) / 60 for point in points]
            label = {"label": name} if index == 0 else {}
            axes.plot(minutes, [point["loss"] for point in points], color=colour, linewidth=1.4, **label)
    axes.axhline(
        max(points[-1]["loss"] for points in ddp["curves"]), color=MUTED, linewidth=0.8, linestyle=(0, (2, 3))
    )
    axes.set_ylim(1.45, 3.0)
    axes.set_xlim(0, None)
    axes.set_xlabel("minutes (dotted: the loss that DDP ends with; three seeds each)")
    axes.set_ylabel("held-out loss")
    axes.legend(frameon=False, fontsize=10)
    set_title(axes, "Four hosts on links of 100 Mbit/s: loss against time")
    return Chart(figure)


@in_paceline_style
def overlap() -> Chart:
    """Draw seconds of work and exchange one after the other, and at the same time."""
    figure, panels = stacked_panels(10, 3.6, [1.0] * len(EXCHANGES))
    for axes, (name, title) in zip(panels, EXCHANGES.items(), strict=True):
        rows = json.loads((RESULTS / "exchange" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
        work, exchange, both = (
            median(row[key] for row in rows) for key in ("work_seconds", "seconds", "both_seconds")
        )
        axes.barh(["one after the other"], [work], color=COLOURS[0], label="work")
        axes.barh(["one after the other"], [exchange], left=work, color=COLOURS[1], label="exchange")
        axes.barh(["at the same time"], [both], color=COLOURS[2], label="both")
        axes.set_title(title, loc="left", fontsize=11)
        axes.invert_yaxis()
    panels[0].legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    panels[-1].set_xlabel("seconds of a round, medians of ranks")
    return Chart(figure)


if __name__ == "__main__":
    for draw in (worlds, exactness, slow_link, overlap):
        print(draw().save(HERE / f"{draw.__name__}.png").relative_to(HERE.parents[1]))
