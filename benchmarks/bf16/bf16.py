"""The held-out loss of a model whose parameters are bfloat16, with and without float32 copies in the optimizer.

    python benchmarks/bf16/bf16.py run
    python benchmarks/bf16/bf16.py table
    python benchmarks/bf16/bf16.py chart

The reference training of `paceline train` with smaller batches: two ranks, the same windows, schedule and clipping for
every way to train. Logits are turned into float32 for the loss. The loss is that of the model as it was trained, in
its own dtype.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor, nn
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.models.corpus import load_corpus
from paceline.tools.models.gpt import GPT, token_loss
from paceline.tools.models.gpt_sizes import gpt_size
from paceline.tools.models.token_windows import HeldOutWindows, TrainingWindows
from paceline.tools.report.charts.chart_style import (
    COLOURS,
    INK,
    Chart,
    in_paceline_style,
    set_title,
    stacked_panels,
)
from paceline.tools.train.lr_schedule import cosine_lr
from paceline.tools.train.training_job import held_out_loss
from paceline.world import init, shutdown

FLOAT32, MASTERS, STOCHASTIC, PLAIN = (
    "float32",
    "bf16, float32 copies",
    "bf16, float32 copies, stochastic rounding",
    "bf16",
)
OPTIONS: dict[str, dict[str, Any]] = {
    FLOAT32: {},
    MASTERS: {"master_dtype": torch.float32},
    STOCHASTIC: {"master_dtype": torch.float32, "stochastic_rounding": True},
    PLAIN: {},
}
"""What `ShardedOptimizer` is given for each way to train."""

SIZE, LR, CLIP = "mini", 2e-3, 1.0
BATCH, CONTEXT = 4, 64
HELD_OUT = 256  # windows
EVERY = 100

bench = Benchmark(__file__)


class Float32Logits(nn.Module):
    """The reference GPT with logits in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net = GPT(gpt_size(SIZE, context=CONTEXT)).to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[batch, context, vocabulary]``."""
        return self.net(tokens).float()


@bench.run
def run(
    steps: Annotated[int, Option(min=1, help="Steps of a training.")] = 600,
    seeds: Annotated[int, Option(min=1, help="Trainings in each way.")] = 1,
    json_file: JsonOption = None,
) -> None:
    """Train in every way with the same data."""
    path = bench.output(json_file, "bf16")
    curves = {
        way: [bench.start_ranks({"way": way, "seed": seed, "steps": steps}, 2) for seed in range(seeds)]
        for way in OPTIONS
    }
    settings = {"size": SIZE, "lr": LR, "batch": BATCH, "context": CONTEXT, "steps": steps, "seeds": seeds}
    bench.write(path, "bf16", settings | {"held_out_windows": HELD_OUT}, curves=curves)


@bench.rank
def rank(job: dict[str, Any]) -> list[dict[str, float]] | None:
    """Return the curve of a training: steps and held-out losses."""
    world = init("paceline")
    way, steps = job["way"], job["steps"]
    torch.manual_seed(job["seed"])
    dtype = torch.float32 if way == FLOAT32 else torch.bfloat16
    model = paceline.DataParallel(Float32Logits(dtype), sync="sharded", reduce_dtype=torch.float32)
    optimizer = paceline.ShardedOptimizer(
        model, torch.optim.AdamW, lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True, **OPTIONS[way]
    )
    corpus, place = load_corpus(None), {"rank": world.rank, "size": world.size}
    batches = TrainingWindows(corpus.train, BATCH, CONTEXT, seed=job["seed"], **place)
    held_out = HeldOutWindows(corpus.held_out, 16, CONTEXT, limit=HELD_OUT, **place)
    points = [{"step": 0, "loss": held_out_loss(model, held_out, world)}]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = cosine_lr(step, steps=steps, warmup=max(1, steps // 20), peak=LR)
        batch = batches.at(step)
        model.backward(token_loss(model(batch.inputs), batch.targets), samples=batch.samples)
        model.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            points.append({"step": step + 1, "loss": held_out_loss(model, held_out, world)})
    shutdown()
    return points if world.rank == 0 else None


# ---------------------------------------------------------------------- results


def last_losses(result: dict[str, Any], way: str) -> list[float]:
    """Return the loss at the end of each training."""
    return [curve[-1]["loss"] for curve in result["curves"][way]]


@bench.tables
def tables() -> dict[str, str]:
    """Return the table of losses at the end."""
    result, rows = bench.read("bf16"), []
    base = last_losses(result, FLOAT32)
    for way in result["curves"]:
        losses = last_losses(result, way)
        excess = [100 * (loss / other - 1) for loss, other in zip(losses, base, strict=True)]
        rows.append(
            [
                way,
                ", ".join(f"{loss:.4f}" for loss in losses),
                "" if way == FLOAT32 else ", ".join(f"{each:+.2f} %" for each in excess),
            ]
        )
    return {"bf16": table(["parameters", "held-out loss", "beside float32"], rows)}


@bench.charts
def charts() -> dict[str, Chart]:
    """Return the chart of the curves."""
    return {"bf16.png": draw(bench.read("bf16"))}


@in_paceline_style
def draw(result: dict[str, Any]) -> Chart:
    """Return the excess of the loss over that of float32, by step."""
    figure, (axes,) = stacked_panels(10, 4.2)
    colours = dict(zip([way for way in OPTIONS if way != FLOAT32], COLOURS, strict=False))
    for way, colour in colours.items():
        for seed, (curve, base) in enumerate(
            zip(result["curves"][way], result["curves"][FLOAT32], strict=True)
        ):
            points = [
                (mine["step"], 100 * (mine["loss"] / other["loss"] - 1))
                for mine, other in zip(curve, base, strict=True)
            ]
            label = {"label": way} if seed == 0 else {}
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.8, marker="o", **label)
    axes.axhline(0, color=INK, linewidth=1, linestyle=(0, (2, 3)))
    axes.set_ylabel("held-out loss beside float32, %")
    axes.set_xlabel("step")
    axes.legend(frameon=False, fontsize=10)
    set_title(axes, f"{result['settings']['size']} with bf16 parameters, 2 ranks")
    return Chart(figure)


if __name__ == "__main__":
    bench.main()
