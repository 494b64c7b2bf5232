"""Time per training step on a slow network: torch DDP and its fp16 hook, beside Paceline's compression and DiLoCo.

    python benchmarks/slow-networks/step.py run      (as root, on Linux: plays the hosts with `paceline.testing.netlab`)
    python benchmarks/slow-networks/step.py table
    python benchmarks/slow-networks/step.py chart

One rank per host. All variants live in the same processes and take turns ([Note: turns] in
`paceline.tools.bench.turn_statistics`); at the end it is checked that the parameters of all ranks are equal.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from typer import Option
from workload import ADAMW, EVERY, FACTS, SIZE, batch_of, digest_of, model_and_optimizer, stepper, train_step

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.ranks import WIRE_OVERHEAD, gather, interface_bytes, tuned_ddp
from bench_harness.turns import Ratio, ratio_of, take_turns
from paceline._core.units import parse_rate
from paceline.errors import unknown
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.report.charts.chart_style import (
    COLOUR_OF_PHASE,
    INK,
    PAPER,
    Chart,
    in_paceline_style,
    legend_patch,
    set_title,
    stacked_panels,
)
from paceline.tools.train.traffic_counter import float32_gradient_nbytes

if TYPE_CHECKING:
    from paceline.tools.report.charts.chart_style import Axes

NO_SYNC = "no synchronisation"
BUCKET_MIB = 5.0  # of Paceline's compressed gradients

bench = Benchmark(__file__)


# ---------------------------------------------------------------------- variants


@dataclass(frozen=True)
class Variant:
    """A way to train, built on each rank.

    Attributes:
        step: one training step.
        model: whose parameters it trains.
        sent: bytes that a host is expected to send in one step, without headers; a round's bytes / `every`.
        every: steps after which the ranks are equal; a turn is a multiple of it.
        equal: whether anything is equal on all ranks after a round.
        agreed: returns what is; None: the model's parameters.
    """

    step: Callable[[], object]
    model: torch.nn.Module
    sent: float
    every: int = 1
    equal: bool = True
    agreed: Callable[[], Iterable[torch.Tensor]] | None = None


def no_sync(_group: dist.ProcessGroup) -> Variant:
    """Return a model that every rank trains for itself: the time of computing."""
    model, optimizer = model_and_optimizer()
    return Variant(step_of(model, optimizer), model, 0.0, equal=False)


def ddp(group: dist.ProcessGroup, *, mib: int | None, fp16: bool = False) -> Variant:
    """Return torch DDP with buckets of `mib` MiB; None: its default, a first bucket of 1 MiB, then 25."""
    net, optimizer = model_and_optimizer()
    model = tuned_ddp(net, mib, group)
    sent = float32_gradient_nbytes(SIZE.parameters(), dist.get_world_size())
    if fp16:
        model.register_comm_hook(group, fp16_compress_hook)
        sent /= 2
    return Variant(step_of(model, optimizer), net, sent)


def compressed(group: dist.ProcessGroup, *, compression: str) -> Variant:
    """Return compressed gradients, with error feedback as is usual for that compression."""
    net, optimizer = model_and_optimizer()
    plan = paceline.Sync(bucket_mib=BUCKET_MIB, compression=compression)
    model = paceline.DataParallel(net, sync=plan, group=group)
    step = step_of(model, optimizer)
    step()  # learns the order of the buckets
    step()
    return Variant(step, net, model.timings.sent_nbytes)


def exact(_group: dist.ProcessGroup, *, sync: paceline.Sync | str) -> Variant:
    """Return float32 gradients over the "paceline" backend; ``"auto"`` once it has chosen a strategy."""
    net, _ = model_and_optimizer()
    model = paceline.DataParallel(net, sync=sync)
    optimizer = paceline.ShardedOptimizer(model, torch.optim.AdamW, **ADAMW)
    step = step_of(model, optimizer)
    step()  # learns the order of the buckets
    while model.tuning is not None and model.tuning.settled is None:
        step()
    return Variant(step, net, float32_gradient_nbytes(SIZE.parameters(), dist.get_world_size()))


def diloco(group: dist.ProcessGroup, *, fragments: int, delay: int) -> Variant:
    """Return local steps, with an int4 exchange of what was learnt every 20th."""
    net, optimizer = model_and_optimizer()
    loop = paceline.DiLoCo(net, optimizer, EVERY, fragments=fragments, delay=delay, group=group)
    loop.__enter__()  # as long as the process lives
    step = step_of(net, optimizer)
    return Variant(step, net, loop.round_nbytes / EVERY, every=EVERY, agreed=lambda: loop.shared().values())


def step_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a training step; what synchronises has hooked into the model or the optimizer."""
    return partial(train_step, model, batch_of(dist.get_rank()), stepper(optimizer))


EXACT = {f"Paceline, {mib} MiB": partial(exact, sync=paceline.Sync(bucket_mib=mib)) for mib in (5, 25)}
AUTO = "Paceline, auto"
DDP = {
    "torch DDP, default": partial(ddp, mib=None),
    **{f"torch DDP, {mib} MiB": partial(ddp, mib=mib) for mib in (1, 5, 25, 100)},
}

VARIANTS: dict[str, Callable[[dist.ProcessGroup], Variant]] = {
    NO_SYNC: no_sync,
    **DDP,
    **{f"torch DDP, fp16 hook, {mib} MiB": partial(ddp, mib=mib, fp16=True) for mib in (1, 25)},
    **EXACT,
    AUTO: partial(exact, sync="auto"),
    **{
        f"Paceline, {name}": partial(compressed, compression=name)
        for name in ("bf16", "int8", "int4", "powersgd")
    },
    "Paceline DiLoCo, int4": partial(diloco, fragments=1, delay=0),
    "Paceline DiLoCo, int4, 2 fragments, delay 5": partial(diloco, fragments=2, delay=5),
}
"""They take a gloo group; the world's group is the "paceline" backend."""


# ---------------------------------------------------------------------- measuring


@bench.run
def run(
    hosts: Annotated[int, Option(min=2, help="Hosts around the switch, a rank on each.")] = 4,
    rate: Annotated[str, Option(help="Rate of every link, each direction.")] = "200Mbit/s",
    rounds: Annotated[int, Option(min=1, help="Turns of each variant.")] = 5,
    steps: Annotated[int, Option(min=1, help="Steps of a turn, at least.")] = 2,
    only: Annotated[
        list[str] | None, Option(metavar="NAME", help="This variant, and others so named; else all.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Time training steps of the reference GPT on slow links, by variant, and count the bytes."""
    for name in only or []:
        if name not in VARIANTS:
            raise unknown("variant", name, VARIANTS)
    path = bench.output(json_file, f"step-{hosts}x{rate.removesuffix('/s')}")
    names = [name for name in VARIANTS if not only or name in only]
    job = {"names": names, "rounds": rounds, "steps": steps}
    rows = bench.start_ranks(job, hosts, rate=rate, turns=(1 + rounds) * len(names), title="steps")
    settings = {"hosts": hosts, "rate": rate, "rounds": rounds, "steps": steps} | FACTS
    print(figures(bench.write(path, "step-on-slow-network", settings, rows=rows)["rows"]))


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, Any] | None:
    """Build all variants on a gloo group, let them take turns, and compare the parameters of all ranks."""
    dist.init_process_group("paceline")
    gloo: Any = dist.new_group(backend="gloo")  # typed as if it could be none, as for other ranks
    variants = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # a choice of "auto" for other links is no choice for these
        for name in job["names"]:
            variants[name] = VARIANTS[name](gloo)
            turn(variants[name], 2)  # warms up; DDP lays out its buckets anew after its first step
    rows = measure(variants, job["rounds"], job["steps"])
    for name, variant in variants.items():
        check_equal(name, variant)
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return rows if first else None


def turn(variant: Variant, least: int) -> tuple[float, int, int]:
    """Return the seconds, and the bytes that this host sent and received, per step of a turn.

    A turn has whole rounds of the variant, and at least so many steps: with one step it would begin at a barrier each
    time, where no step can run into the next.
    """
    steps = -(-least // variant.every) * variant.every
    dist.barrier()
    before, started = interface_bytes(), time.perf_counter()
    for _ in range(steps):
        variant.step()
    dist.barrier()  # parameters may still be gathered, which belongs to the turn; then all its bytes have arrived
    seconds = time.perf_counter() - started
    passed = interface_bytes() - before
    bench.tick()
    return seconds / steps, passed.sent // steps, passed.received // steps


def measure(variants: dict[str, Variant], rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """Return, by variant, seconds per step of each round, bytes [sent, received] of each round and host."""
    turns = take_turns(
        {name: partial(turn, variant, steps) for name, variant in variants.items()}, rounds, warm_up=0
    )
    mine = torch.tensor([turns[name] for name in variants], dtype=torch.float64)
    seconds = mine[:, :, 0].contiguous()
    passed = torch.zeros(len(variants), rounds, dist.get_world_size(), 2, dtype=torch.float64)
    passed[:, :, dist.get_rank()] = mine[:, :, 1:]
    for values in (seconds, passed):
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return {
        name: {
            "seconds": seconds[index].tolist(),
            "passed": passed[index].tolist(),
            "expected_sent": variant.sent,
            "every": variant.every,
        }
        for index, (name, variant) in enumerate(variants.items())
    }


def check_equal(name: str, variant: Variant) -> None:
    """Raise unless what must be equal on all ranks is, bit for bit."""
    agreed = variant.model.parameters() if variant.agreed is None else variant.agreed()
    if variant.equal != (len(set(gather(digest_of(agreed)))) == 1):
        found = "differ" if variant.equal else "are equal, though nothing was exchanged"
        raise RuntimeError(f"{name}: after whole rounds the parameters of the ranks {found}")


# ---------------------------------------------------------------------- results


Rows = dict[str, dict[str, Any]]
"""By variant, what `measure` returns."""


def seconds_of(row: dict[str, Any]) -> float:
    """Return the seconds of a step: median over rounds."""
    return median(row["seconds"])


def best_ddp(rows: Rows) -> str | None:
    """Return torch DDP with the bucket size that is fastest here; None: it was not measured."""
    return min((name for name in rows if name in DDP), key=lambda name: seconds_of(rows[name]), default=None)


def speedup(rows: Rows, name: str) -> Ratio | None:
    """Return how many times faster than torch DDP at its best a variant is."""
    best = best_ddp(rows)
    return None if best is None else ratio_of(rows[best]["seconds"], rows[name]["seconds"])


def sent_by_host(row: dict[str, Any]) -> list[float]:
    """Return the bytes that each host sent in a step: medians over rounds."""
    return [median(sent for sent, _ in turns) for turns in zip(*row["passed"], strict=True)]


def sent_ratio(row: dict[str, Any]) -> float:
    """Return what a host sent ÷ what was expected: mean over hosts."""
    return fmean(sent_by_host(row)) / row["expected_sent"]


def figures(rows: Rows) -> str:
    """Return the table of steps: a row per variant, torch DDP with its fastest bucket in bold."""
    cells = []
    for name, row in rows.items():
        shown = f"**{name}**" if name == best_ddp(rows) else name
        sent = [f"{max(sent_by_host(row)) / 1e6:.4g}", f"{row['expected_sent'] / 1e6:.4g}"]
        ratio = "" if name == NO_SYNC else f"{sent_ratio(row):.3f}"
        cells.append([shown, f"{seconds_of(row):.3g}", str(speedup(rows, name) or ""), *sent, ratio])
    return table(["", "s per step", "DDP's best ÷", "MB sent per step", "expected", "÷ expected"], cells)


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md."""
    links = bench.find("exact-*")
    return {
        "steps": figures(bench.read("step-4x200Mbit")["rows"]),
        "exact": "\n\n".join(exact_figures(links[name]) for name in sorted(links)),
    }


def exact_figures(result: dict[str, Any]) -> str:
    """Return the table of float32 steps on one kind of link: each variant's time, and its ratio to each DDP."""
    rows, settings = result["rows"], result["settings"]
    bases = [name for name in rows if name in DDP]
    cells = [
        [name, f"{seconds_of(row):.3f}", f"{wire_share(row, settings['rate']):.3f}"]
        + [f"{ratio_of(row['seconds'], rows[base]['seconds']):.3f}" for base in bases]
        for name, row in rows.items()
        if name != NO_SYNC
    ]
    head = f"{settings['hosts']} hosts, {settings['rate']}"
    return table([head, "s per step", "wire's share", *(f"÷ {base}" for base in bases)], cells)


def wire_share(row: dict[str, Any], rate: str) -> float:
    """Return the share of a step in which a link carries what it has to, with headers, at its full rate."""
    return row["expected_sent"] * WIRE_OVERHEAD / parse_rate(rate) / seconds_of(row)


@bench.charts
def charts() -> dict[str, Chart]:
    """Return the chart of the result."""
    return {"step-4x200Mbit.png": draw(bench.read("step-4x200Mbit"))}


@in_paceline_style
def draw(result: dict[str, Any]) -> Chart:
    """Return the chart: a bar per variant, above its time, below what a host sends."""
    rows, settings = result["rows"], result["settings"]
    figure, (times, sent) = stacked_panels(width=10, height=1.9 + 0.62 * len(rows), heights=(1.0, 1.0))
    draw_times(times, rows)
    draw_sent(sent, {name: row for name, row in rows.items() if row["expected_sent"]})
    title = f"One training step, {settings['parameters'] / 1e6:.0f} M parameters"
    set_title(times, f"{title}, {settings['hosts']} hosts, links of {settings['rate']}")
    return Chart(figure)


def draw_times(axes: Axes, rows: Rows) -> None:
    """Draw the seconds of a step, split at the seconds without synchronisation."""
    seconds = [seconds_of(row) for row in rows.values()]
    alone = seconds_of(rows[NO_SYNC]) if NO_SYNC in rows else 0.0
    computing = [min(alone, whole) for whole in seconds]
    waiting = [whole - part for whole, part in zip(seconds, computing, strict=True)]
    parts = {"as without synchronisation": "forward", "waiting beyond that": "exposed"}
    draw_bars(axes, rows, computing, COLOUR_OF_PHASE["forward"])
    draw_bars(axes, rows, waiting, COLOUR_OF_PHASE["exposed"], left=computing)
    for place, name in enumerate(rows):
        ratio = speedup(rows, name)
        remark = "" if ratio is None else f"   DDP's best ÷ {ratio.median:.2f}"
        annotate(axes, seconds[place], place, f"{seconds[place]:.2f} s{remark}")
    axes.set_xlim(0, 1.35 * max(seconds))
    axes.set_xlabel("seconds of one step")
    handles = [legend_patch(label, COLOUR_OF_PHASE[phase]) for label, phase in parts.items()]
    axes.legend(handles=handles, loc="lower right", frameon=False, fontsize=9)


def draw_sent(axes: Axes, rows: Rows) -> None:
    """Draw the bytes that a host sends in a step, and what was expected."""
    sent = [max(sent_by_host(row)) / 1e6 for row in rows.values()]
    draw_bars(axes, rows, sent, COLOUR_OF_PHASE["backward"])
    for place, row in enumerate(rows.values()):
        axes.plot([row["expected_sent"] / 1e6] * 2, [place - 0.42, place + 0.42], color=INK, linewidth=2)
        annotate(axes, sent[place], place, f"{sent[place]:.3g} MB, {sent_ratio(row):.3f} of expected")
    axes.set_xscale("log")
    axes.set_xlim(min(1.0, min(sent) / 2), 12 * max(sent))
    axes.xaxis.set_major_formatter(lambda megabytes, _: f"{megabytes:g}")
    axes.set_xlabel("MB that a host sends in one step, at its interface (line: expected)")


def draw_bars(
    axes: Axes, rows: Rows, values: list[float], colour: str, left: list[float] | float = 0.0
) -> None:
    """Draw a bar per variant, the first one on top."""
    axes.barh(range(len(rows)), values, left=left, color=colour, height=0.7, edgecolor=PAPER)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.yaxis.set_inverted(True)


def annotate(axes: Axes, value: float, place: int, text: str) -> None:
    """Write a text to the right of a bar."""
    axes.annotate(text, (value, place), (6, 0), textcoords="offset points", va="center", fontsize=9.5)


if __name__ == "__main__":
    bench.main()
