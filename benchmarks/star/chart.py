"""Draw what `loss.py`, `peers.py` and `virtual.py` found.

    python benchmarks/star/chart.py

Reads ``loss-200Mbit.json``, ``peers.json`` and ``virtual.json`` beside this file and writes a PNG for each.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import typer
from loss_figures import loss_at

from paceline.tools.report.charts.chart_style import COLOURS, INK, Chart, in_paceline_style, stacked_panels

HERE = Path(__file__).parent
CURVES = HERE.parent / "slow-networks" / "loss-4x100Mbit.json"
_HIGHEST = 3.0  # nats: above that all ways fall alike


@in_paceline_style
def draw_time(result: dict[str, Any], curves: dict[str, Any]) -> Chart:
    """Return held-out loss over wall time, every seed of every way."""
    figure, (axes,) = stacked_panels(width=10, height=5.2)
    ddp, local = median(result["ddp"]["seconds"]), median(result["local"]["seconds"])
    for index, run in enumerate(result["star"]):
        seed = run["seed"]
        ways = (
            (
                "torch DDP",
                INK,
                [(each["step"] * ddp, each["loss"]) for each in curves["ddp"]["curves"][seed]],
            ),
            (
                "LocalSGD, every 4, 2 late, int4",
                COLOURS[1],
                [(each["step"] * local, each["loss"]) for each in curves["ours"]["curves"][seed]],
            ),
            ("the star", COLOURS[0], [(each["seconds"], each["loss"]) for each in run["curve"]]),
        )
        for name, colour, points in ways:
            label = {"label": name} if index == 0 else {}
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.4, **label)
        axes.axhline(
            curves["ddp"]["curves"][seed][-1]["loss"], color=INK, linewidth=0.6, linestyle=(0, (2, 3))
        )
    axes.set_xlabel("seconds (dotted: what DDP ends with)")
    _finish(axes, result["settings"])
    return Chart(figure)


@in_paceline_style
def draw_peers(result: dict[str, Any]) -> Chart:
    """Return held-out loss over wall time, by library: thick at the best of its learning rates."""
    figure, (axes,) = stacked_panels(width=10, height=5.2)
    of_library: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        of_library.setdefault(row["name"].partition(", lr")[0], []).append(row)
    for (name, rows), colour in zip(of_library.items(), COLOURS, strict=False):
        ordered = sorted(rows, key=lambda row: loss_at(row["curve"], result["settings"]["seconds"]))
        for row in ordered:
            points = [(each["seconds"], each["loss"]) for each in row["curve"]]
            best = row is ordered[0]
            style: dict[str, Any] = {"linewidth": 2.0 if best else 1.0, "alpha": 1.0 if best else 0.5}
            if best:
                style["label"] = f"{name}, lr {row['settings']['lr']:g}"
            axes.plot(*zip(*points, strict=True), color=colour, **style)
    axes.set_xlabel("seconds")
    _finish(axes, result["settings"])
    return Chart(figure)


def _finish(axes: Any, settings: dict[str, Any]) -> None:
    """Say what is trained where, and how the loss is counted."""
    speeds = " : ".join(map(str, settings["speeds"]))
    title = f"Held-out loss of {settings['size']}, machines of speeds {speeds}, {settings['rate']}"
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_ylabel("nats per token")
    axes.set_xlim(0, None)
    axes.set_ylim(None, _HIGHEST)
    axes.legend(frameon=False, fontsize=10)


@in_paceline_style
def draw_ways(result: dict[str, Any]) -> Chart:
    """Return the last loss of each way in virtual time: its median, and every seed; those far off are named beneath."""
    ways = [(_name(way), _losses(way)) for way in result["ways"]]
    bound = 1.25 * min(median(losses) for _, losses in ways if losses)
    found = [(name, losses) for name, losses in ways if losses and median(losses) < bound]
    lost = [name for name, losses in ways if not losses or median(losses) >= bound]
    figure, (axes,) = stacked_panels(width=11, height=1.2 + 0.3 * len(found))
    for row, (name, losses) in enumerate(reversed(found)):
        colour = INK if name.startswith("DDP") else COLOURS[1] if name.startswith("one ") else COLOURS[0]
        axes.plot(losses, [row] * len(losses), "o", color=colour, markersize=4, alpha=0.4)
        axes.plot([median(losses)], [row], "o", color=colour, markersize=8)
        told = f"{median(losses):.3f}"
        axes.annotate(told, (max(losses), row), (9, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(found)), [name for name, _ in reversed(found)], fontsize=9)
    axes.grid(axis="y", linewidth=0.4)
    told = f"\nfar off: {'; '.join(lost)}" if lost else ""
    axes.set_xlabel(
        f"held-out loss after {result['settings']['steps']} steps, nats per byte{told}", loc="right"
    )
    return Chart(figure)


def _name(way: dict[str, Any]) -> str:
    if way["name"] not in ("DDP", "one machine alone"):
        return way["name"]
    return f"{way['name']}, {way['lr']:g}, {way['falls']}"


def _losses(way: dict[str, Any]) -> list[float]:
    """Return the loss of every seed; nothing if one diverged."""
    losses = [each["loss"] for each in way["runs"]]
    return [] if None in losses else losses


def main() -> None:
    """Draw the charts whose results are there."""
    curves = json.loads(CURVES.read_text(encoding="utf-8"))
    for name, draw in (
        ("loss-200Mbit", lambda result: draw_time(result, curves)),
        ("peers", draw_peers),
        ("virtual", draw_ways),
    ):
        path = HERE / f"{name}.json"
        if path.exists():
            chart = draw(json.loads(path.read_text(encoding="utf-8")))
            print(chart.save(path.with_suffix(".png")))


if __name__ == "__main__":
    typer.run(main)
