"""Loss against bytes: many methods of synchronising, each with the same number of steps.

    python benchmarks/slow-networks/tradeoff.py run
    python benchmarks/slow-networks/tradeoff.py table
    python benchmarks/slow-networks/tradeoff.py chart

Trains the reference model `mini` in four processes of one host, once by each method. What is learnt does not depend on
the network, and the library reports what is sent; `step.py` and the tests compare that with interfaces.
"""

from __future__ import annotations

from typing import Annotated, Any

from loss_curve import DDP, FACTS, method, sent_until, train_as_rank
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.errors import unknown
from paceline.testing.netlab import Lab
from paceline.tools.bench.progress_bar import ProgressBar
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.report.charts.chart_style import (
    COLOURS,
    INK,
    Chart,
    in_paceline_style,
    legend_patch,
    set_title,
    stacked_panels,
)

RANKS, EVERY = 4, 100
KINDS = {
    "ddp": ("torch DDP", INK),
    "gradients": ("gradients every step", COLOURS[0]),
    "local": ("parameters averaged, int4", COLOURS[1]),
    "diloco": ("DiLoCo, int4", COLOURS[2]),
}
"""By kind of method: label of the legend, and colour."""


def gradients(name: str, compression: str | dict[str, Any]) -> dict[str, Any]:
    """Return compressed gradients every step."""
    return method(f"gradients every step, {name}", "gradients", 1e-3, gradients=compression)


def averaged(name: str, **options: Any) -> dict[str, Any]:
    """Return parameters averaged every so many steps."""
    return method(f"averaged every {name}", "local", 2e-3, options={"compression": "int4"} | options)


def diloco(name: str, **options: Any) -> dict[str, Any]:
    """Return DiLoCo every so many steps."""
    return method(f"DiLoCo every {name}, int4", "diloco", 1e-3, options=options)


METHODS = [
    DDP,
    gradients("bf16", "bf16"),
    gradients("int8", "int8"),
    gradients("int4", "int4"),
    gradients("PowerSGD rank 16", {"name": "powersgd", "rank": 16}),
    gradients("PowerSGD rank 4", "powersgd"),
    gradients("largest 10 %", {"name": "topk", "keep": 0.1}),
    gradients("largest 1 %", {"name": "topk", "keep": 0.01}),
    averaged("2, int4", every=2),
    averaged("4, int4", every=4),
    averaged("4, 2 late, int4", every=4, delay=2),
    averaged("8, int4", every=8),
    averaged("20, int4", every=20),
    averaged("20, largest 1 %", every=20, compression={"name": "topk", "keep": 0.01}),
    diloco("10", every=10),
    diloco("20", every=20),
    diloco("20, momentum 0.5", every=20, outer_momentum=0.5),
]
"""All with an equal number of steps, each at the best of a few learning rates for its kind."""

bench = Benchmark(__file__)
bench.rank(train_as_rank)


@bench.run
def run(
    only: Annotated[list[str] | None, Option(metavar="NAME", help="Names of methods; else all.")] = None,
    seed: Annotated[int, Option(help="Seed of parameters and data.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Train by many methods, and show the loss that each reached and the bytes that it sent."""
    known = [each["name"] for each in METHODS]
    for name in only or []:
        if name not in known:
            raise unknown("method", name, known)
    path = bench.output(json_file, "tradeoff")
    chosen = [each for each in METHODS if each["name"] in (only or known)]
    rows, turns = [], sum(each["steps"] // EVERY for each in chosen)
    with ProgressBar("loss against bytes", turns) as tick, Lab(1) as lab:
        for each in chosen:
            job = {"method": each, "seed": seed, "timed": 0, "every": EVERY}
            curve = bench.run_in_lab(lab, job, tick, per_host=RANKS)
            rows.append({"way": each, "curve": curve})
            print(
                f"{each['name']}: loss {curve[-1]['loss']:.4f}, {curve[-1]['foretold'] / 1e6:.0f} MB",
                flush=True,
            )
    bench.write(path, "loss-against-bytes", {"ranks": RANKS, "seed": seed} | FACTS, rows=rows)


# ---------------------------------------------------------------------- results


def bytes_and_loss(result: dict[str, Any]) -> list[tuple[dict[str, Any], float, float]]:
    """Return each method, the bytes that it sends for a parameter and step, and its last loss."""
    return [
        (
            row["way"],
            sent_until(row["curve"])[-1] / row["curve"][-1]["step"] / result["settings"]["parameters"],
            row["curve"][-1]["loss"],
        )
        for row in result["rows"]
    ]


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: a row per method."""
    found = bytes_and_loss(bench.read("tradeoff"))
    first = found[0][2]
    rows = [
        [
            each["name"],
            f"{each['lr']:g}",
            f"{nbytes:.3g}",
            f"{loss:.3f}",
            f"{100 * (loss / first - 1):+.1f} %",
        ]
        for each, nbytes, loss in found
    ]
    titles = ["", "learning rate", "bytes a parameter and step", "held-out loss", "beside DDP"]
    return {"trade-off": table(titles, rows)}


@bench.charts
def charts() -> dict[str, Chart]:
    """Return the chart of the result."""
    return {"tradeoff.png": draw(bench.read("tradeoff"))}


@in_paceline_style
def draw(result: dict[str, Any]) -> Chart:
    """Return the last loss of each method against the bytes that it sends for a parameter and step."""
    figure, (axes,) = stacked_panels(width=10, height=7.5)
    drawn: list[tuple[float, float]] = []
    for each, nbytes, loss in bytes_and_loss(result):
        axes.plot([nbytes], [loss], "o", color=KINDS[each["kind"]][1], markersize=7)
        crowded = any(abs(nbytes / x - 1) < 0.1 and abs(loss / y - 1) < 0.02 for x, y in drawn)
        axes.annotate(
            short(each["name"]),
            (nbytes, loss),
            (-8 if crowded else 8, 0),
            textcoords="offset points",
            ha="right" if crowded else "left",
            va="center",
            fontsize=9,
        )
        drawn.append((nbytes, loss))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(None, 20)
    axes.legend(handles=[legend_patch(*each) for each in KINDS.values()], frameon=False, fontsize=10)
    axes.set_xlabel("bytes that a rank sends for each parameter and step")
    axes.set_ylabel(f"held-out loss after {result['rows'][0]['way']['steps']} steps, nats per token")
    set_title(axes, "Less sent, less learnt: all at the same number of steps")
    return Chart(figure)


def short(name: str) -> str:
    """Return the name of a method without what the legend says."""
    for prefix in ("gradients every step, ", "averaged ", "DiLoCo "):
        name = name.removeprefix(prefix)
    return name if name in ("int4", "int8") else name.removesuffix(", int4")


if __name__ == "__main__":
    bench.main()
