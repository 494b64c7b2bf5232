"""A training step with Muon on hidden matrices and AdamW on the rest: Paceline's sharded optimizer and torch's ways.

    python benchmarks/muon/muon.py run
    python benchmarks/muon/muon.py table
    python benchmarks/muon/muon.py chart

Two ranks on one thread each; in every round each contestant takes a turn of several steps in the same processes. A turn
begins with a step that does not count, so that what a step leaves under way delays one that does. The slowest rank's
time stands for a step, the median of its steps for a turn. Memory is measured in fresh processes.
"""

from __future__ import annotations

import gc
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from contestants import DDP, FSDP, KINDS, OURS_ON_GLOO, OURS_ON_PACELINE, ZERO, Contestant, build
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.ranks import gather
from bench_harness.turns import alternating, ratio_of, seconds_of, take_turns
from paceline.parallel.data_parallel import DataParallel
from paceline.tools.bench.peak_memory import PeakMemory
from paceline.tools.bench.step.comm_traffic import count_traffic
from paceline.tools.bench.step.strategy_trainers import random_batch
from paceline.tools.models.gpt import token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import TokenBatch
from paceline.tools.report.charts.chart_style import (
    COLOUR_OF_PHASE,
    Chart,
    in_paceline_style,
    legend_patch,
    set_title,
    stacked_panels,
)
from paceline.world import World, init, shutdown

PHASES = ("forward", "backward", "optimizer")
SIZES = {
    "mini": {"steps": 8, "kinds": KINDS},
    "44m": {"steps": 2, "kinds": tuple(k for k in KINDS if k != FSDP)},
}
"""Steps of a turn, and the contestants. torch's fully_shard, which updates the slowest, takes part once."""

BATCH_SIZE, CONTEXT = 2, 64
WARM_UP = 5  # DDP rebuilds its buckets and records the static graph in its first steps

bench = Benchmark(__file__)


@bench.run
def run(
    model: Annotated[str | None, Option(help="mini or 44m; default: both, one after the other.")] = None,
    rounds: Annotated[int, Option(min=1, help="Turns of each contestant.")] = 20,
) -> None:
    """Measure steps, collectives and memory of all contestants."""
    for size in SIZES if model is None else [model]:
        facts = SIZES[size]
        path = bench.output(None, f"muon-{size}")
        job = {"size": size, "kinds": facts["kinds"], "rounds": rounds, "steps": facts["steps"]}
        found = bench.start_ranks(job | {"memory": False}, 2, turns=rounds * len(facts["kinds"]), title=size)
        found["peak_nbytes"] = {
            kind: bench.start_ranks({"size": size, "kinds": [kind], "memory": True}, 2)
            for kind in facts["kinds"]
        }
        settings = {"rounds": rounds, "steps": facts["steps"], "batch_size": BATCH_SIZE, "context": CONTEXT}
        bench.write(path, "muon", settings, model=size, **found)


def results() -> dict[str, Any]:
    """Return what was measured, by model."""
    return {size: bench.read(f"muon-{size}") for size in SIZES}


# ---------------------------------------------------------------------- ranks


@bench.rank
def rank(job: dict[str, Any]) -> Any:
    """Return what rank 0 found: times, collectives and drift of all contestants, or the peak memory of one."""
    world = init("paceline")
    gloo = dist.new_group(backend="gloo")
    assert isinstance(gloo, dist.ProcessGroup)
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    groups = (gloo, dist.group.WORLD)
    size = gpt_size(job["size"])
    batch = random_batch(size, BATCH_SIZE, CONTEXT, world.rank, world.device)
    if job["memory"]:
        found: Any = peak_nbytes(job["kinds"][0], job["size"], batch, groups, world)
    else:
        made = {kind: build(kind, job["size"], *groups) for kind in job["kinds"]}
        found = compare(made, batch, job["rounds"], job["steps"], world)
    shutdown()
    return found if world.rank == 0 else None


def run_step(contestant: Contestant, batch: TokenBatch) -> list[float]:
    """Run a step and return the seconds of its phases on this rank."""
    losses = list[torch.Tensor]()
    forward = seconds_of(lambda: losses.append(token_loss(contestant.model(batch.inputs), batch.targets)))
    backward = seconds_of(lambda: contestant.backward(losses.pop()))
    return [forward, backward, seconds_of(contestant.update)]


def finish(contestant: Contestant) -> None:
    """Wait for what a step leaves under way, which would go on in the turn of another."""
    if isinstance(contestant.model, DataParallel):
        contestant.model.wait_for_parameters()


def compare(
    made: dict[str, Contestant], batch: TokenBatch, rounds: int, steps: int, world: World
) -> dict[str, Any]:
    """Return seconds by contestant, round and phase; collectives of a step; and the drift of the parameters.

    The drift is ‖a − b‖ / ‖b‖ of all parameters after the same steps, where b are those of DDP.
    """
    for contestant in made.values():
        for _ in range(WARM_UP):
            run_step(contestant, batch)
        finish(contestant)
    reference = parameters(made[DDP])
    drift = {
        kind: float((parameters(contestant) - reference).norm() / reference.norm())
        for kind, contestant in made.items()
    }
    calls = {kind: collectives(contestant, batch, world) for kind, contestant in made.items()}
    calls[OURS_ON_GLOO] = calls[
        OURS_ON_PACELINE
    ]  # the same, but over gloo each is sent in pieces, which count too

    def turn(contestant: Contestant) -> list[float]:
        dist.barrier()
        measured = [run_step(contestant, batch) for _ in range(1 + steps)][1:]
        finish(contestant)
        each = gather(measured)
        slowest = [max((parts[at] for parts in each), key=sum) for at in range(steps)]
        return [median(phases) for phases in zip(*slowest, strict=True)] + [median(map(sum, slowest))]

    turns = {kind: lambda contestant=contestant: turn(contestant) for kind, contestant in made.items()}
    seconds = take_turns(turns, rounds, bench.tick, order=alternating)
    return {"seconds": seconds, "calls": calls, "drift": drift}


def parameters(contestant: Contestant) -> torch.Tensor:
    """Return all parameters, whole, as one vector in float64; a collective."""
    if isinstance(contestant.model, DataParallel):
        whole = contestant.model.whole_parameters()
    else:
        params = contestant.net.parameters()
        whole = [param.full_tensor() if isinstance(param, DTensor) else param for param in params]
    return torch.cat([param.detach().reshape(-1).double() for param in whole])


def collectives(contestant: Contestant, batch: TokenBatch, world: World) -> float:
    """Return how many collectives a step launches; those inside operations on DTensors count too."""
    if any(isinstance(param, DTensor) for param in contestant.net.parameters()):
        with CommDebugMode() as counted:
            run_step(contestant, batch)
        return counted.get_total_counts()
    traffic = count_traffic(lambda: run_step(contestant, batch), world.size)
    finish(contestant)
    return traffic.calls


def peak_nbytes(
    kind: str, size: str, batch: TokenBatch, groups: tuple[dist.ProcessGroup, dist.ProcessGroup], world: World
) -> float:
    """Return the bytes that building and three steps need beyond those of the process; the largest rank's."""
    warm = build(kind, "tiny", *groups)
    for seed in range(2):
        run_step(warm, random_batch(gpt_size("tiny"), 1, 8, seed, world.device))
    del warm
    gc.collect()
    dist.barrier()
    with PeakMemory(world.device) as peak:
        contestant = build(kind, size, *groups)
        contestant.optimizers[0].register_step_pre_hook(lambda *_: peak.begin_part())
        for _ in range(3):
            peak.begin_part()
            run_step(contestant, batch)
    return max(gather(float(peak.nbytes)))


# ---------------------------------------------------------------------- results


def steps_of(found: dict[str, Any]) -> dict[str, list[float]]:
    """Return the seconds of a step by contestant and round."""
    return {kind: [turn[-1] for turn in turns] for kind, turns in found["seconds"].items()}


def rows(found: dict[str, Any]) -> list[list[str]]:
    """Return the cells of each contestant."""
    steps, cells = steps_of(found), []
    for kind, turns in found["seconds"].items():
        times = [f"{1e3 * median(turn[at] for turn in turns):.0f}" for at in (3, 0, 1, 2)]
        ratios = [
            "" if kind == other else str(ratio_of(steps[kind], steps[other]))
            for other in (OURS_ON_GLOO, OURS_ON_PACELINE)
        ]
        memory = f"{found['peak_nbytes'][kind] / 2**20:.0f}"
        cells.append([kind, *times, *ratios, f"{found['calls'][kind]:g}", memory])
    return cells


@bench.tables
def tables() -> dict[str, str]:
    """Return a table for each model, and what the parameters differ by."""
    models = results()
    titles = ["contestant", "step, ms", *PHASES, f"÷ {OURS_ON_GLOO}", f"÷ {OURS_ON_PACELINE}"]
    titles += ["collectives", "peak, MiB"]
    blocks = {f"muon-{size}": table(titles, rows(found)) for size, found in models.items()}
    drifts = [
        [
            kind,
            *(f"{found['drift'][kind]:.0g}" if kind in found["drift"] else "" for found in models.values()),
        ]
        for kind in KINDS
    ]
    return blocks | {"muon-drift": table(["contestant", *models], drifts)}


@bench.charts
def charts() -> dict[str, Chart]:
    """Return the chart of both models."""
    return {"muon.png": draw(results())}


@in_paceline_style
def draw(models: dict[str, Any]) -> Chart:
    """Return the phases of a step as bars, a panel for each model."""
    figure, panels = stacked_panels(10, 6.4, [len(found["seconds"]) for found in models.values()])
    for axes, (size, found) in zip(panels, models.items(), strict=True):
        steps = steps_of(found)
        for at, (kind, turns) in enumerate(found["seconds"].items()):
            left = 0.0
            for phase, name in enumerate(PHASES):
                length = 1e3 * median(turn[phase] for turn in turns)
                axes.barh(at, length, 0.62, left, color=COLOUR_OF_PHASE[name])
                left += length
            text = f" {1e3 * median(steps[kind]):.0f} ms"
            if kind in (DDP, ZERO, FSDP):
                text += f", {ratio_of(steps[kind], steps[OURS_ON_PACELINE]).median:.2f}× sharded, paceline"
            axes.text(left, at, text, va="center", fontsize=10)
        axes.set_yticks(range(len(steps)), list(steps))
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.set_xlim(left=0)
        axes.set_xlabel("milliseconds")
        set_title(axes, f"A step of {size}, 2 ranks: Muon on the hidden matrices, AdamW on the rest")
    panels[0].legend(
        handles=[legend_patch(name, COLOUR_OF_PHASE[name]) for name in PHASES], frameon=False, fontsize=10
    )
    return Chart(figure)


if __name__ == "__main__":
    bench.main()
