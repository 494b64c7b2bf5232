"""Draw what `loss.py` and `tradeoff.py` found: loss over time, and loss against bytes.

    python benchmarks/slow-networks/loss_chart.py

Reads ``loss-4x100Mbit.json`` and ``tradeoff.json`` beside this file and writes a PNG of the same name for each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from loss_figures import Curve, LossResult

from paceline.tools.report.charts.chart_style import (
    COLOURS,
    INK,
    Chart,
    in_paceline_style,
    legend_patch,
    stacked_panels,
)

KINDS = {
    "ddp": ("torch DDP", INK),
    "gradients": ("gradients every step", COLOURS[0]),
    "local": ("parameters averaged, int4", COLOURS[1]),
    "diloco": ("DiLoCo, int4", COLOURS[2]),
}
"""By kind of way: what the legend says, and its colour."""


@in_paceline_style
def draw_time(result: dict[str, Any]) -> Chart:
    """Return held-out loss over wall time: every seed, and when ours had reached what DDP ends with."""
    figure, (over_time, over_bytes) = stacked_panels(width=10, height=8.4, heights=(1.0, 1.0))
    found = LossResult.from_json(result)
    for index, (ddp, ours) in enumerate(zip(found.ddp, found.ours, strict=True)):
        label = {"label": "torch DDP"} if index == 0 else {}
        seconds = [step * found.ddp_step for step in ddp.steps]
        over_time.plot(seconds, ddp.loss, color=INK, linewidth=1.4, **label)
        over_bytes.plot([sent / 1e6 for sent in ddp.sent], ddp.loss, color=INK, linewidth=1.4)
        label = {"label": result["ours"]["way"]["name"]} if index == 0 else {}
        over_time.plot(ours.seconds, ours.loss, color=COLOURS[1], linewidth=1.4, **label)
        over_bytes.plot([sent / 1e6 for sent in ours.sent], ours.loss, color=COLOURS[1], linewidth=1.4)
        over_time.axhline(ddp.loss[-1], color=INK, linewidth=0.6, linestyle=(0, (2, 3)))
    settings = result["settings"]
    over_time.set_title(
        f"Held-out loss of {settings['size']}, {settings['hosts']} hosts, links of {settings['rate']}",
        loc="left",
        fontsize=11,
        fontweight="bold",
    )
    over_time.set_xlabel("seconds (dotted: what DDP ends with)")
    over_bytes.set_xlabel("MB that a host has sent")
    over_bytes.set_xscale("log")
    over_bytes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    over_time.set_xlim(0, None)
    for axes in (over_time, over_bytes):
        axes.set_ylabel("nats per token")
        axes.set_ylim(None, min(3.0, max(found.ddp[0].loss)))
    over_time.legend(frameon=False, fontsize=10)
    return Chart(figure)


@in_paceline_style
def draw_tradeoff(result: dict[str, Any]) -> Chart:
    """Return the last loss of each way against the bytes that it sends for a parameter and step."""
    figure, (axes,) = stacked_panels(width=10, height=7.5)
    named: list[tuple[float, float]] = []
    for row in result["rows"]:
        kind, last = row["way"]["kind"], Curve.from_json(row["curve"])
        nbytes, loss = last.sent[-1] / last.steps[-1] / result["settings"]["parameters"], last.loss[-1]
        axes.plot([nbytes], [loss], "o", color=KINDS[kind][1], markersize=7)
        crowded = any(abs(nbytes / x - 1) < 0.1 and abs(loss / y - 1) < 0.02 for x, y in named)
        axes.annotate(
            _short(row["way"]["name"]),
            (nbytes, loss),
            (-8 if crowded else 8, 0),
            textcoords="offset points",
            ha="right" if crowded else "left",
            va="center",
            fontsize=9,
        )
        named.append((nbytes, loss))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(None, 20)
    axes.legend(handles=[legend_patch(*each) for each in KINDS.values()], frameon=False, fontsize=10)
    axes.set_xlabel("bytes that a rank sends for each parameter and step")
    axes.set_ylabel(f"held-out loss after {result['rows'][0]['way']['steps']} steps, nats per token")
    axes.set_title(
        "Less sent, less learnt: all at the same number of steps", loc="left", fontsize=11, fontweight="bold"
    )
    return Chart(figure)


def _short(name: str) -> str:
    """Return the name of a way without what the legend says of it."""
    for said in ("gradients every step, ", "averaged ", "DiLoCo "):
        name = name.removeprefix(said)
    return name if name in ("int4", "int8") else name.removesuffix(", int4")


def main(
    folder: Annotated[Path, typer.Argument(help="Where the results lie.")] = Path(__file__).parent,
) -> None:
    """Draw the results in a folder."""
    for name, draw in (("loss-4x100Mbit.json", draw_time), ("tradeoff.json", draw_tradeoff)):
        path = folder / name
        print(draw(json.loads(path.read_text(encoding="utf-8"))).save(path.with_suffix(".png")))


if __name__ == "__main__":
    typer.run(main)
