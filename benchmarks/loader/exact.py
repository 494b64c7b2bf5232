"""Gradients of uneven data, compared with one process in float64: Paceline, torch DDP, and DDP with Join.

    python benchmarks/loader/exact.py run
    python benchmarks/loader/exact.py table

Four ranks over gloo have the shares .25 .25 .10 .40 of 1000 samples. At every optimizer step each rank computes the
true gradient itself: that of the mean over all samples that all ranks have in the step, in one backward. The result is
the largest ‖g − g*‖ / ‖g*‖ of any step and rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from paceline.data.map_loader_state import DispatchSettings, LoaderPosition
from paceline.data.resumable_batch_indices import SampleOrder
from paceline.data.sampling.block_dispatch import dispatch_blocks
from paceline.tools.bench.device_clock import slowest_rank
from paceline.tools.cli.shared_options import JsonOption

RATE = 0.1
SHARES, SAMPLES, BATCH, BLOCK, WIDTH = [0.25, 0.25, 0.10, 0.40], 1000, 16, 5, 12

bench = Benchmark(__file__)


@bench.run
def run(json_file: JsonOption = None) -> None:
    """Compare the gradients of every training on uneven data with those of one process."""
    path = bench.output(json_file, "exact")
    settings = {"shares": SHARES, "samples": SAMPLES, "batch_size": BATCH, "block": BLOCK, "dtype": "float64"}
    rows = bench.start_ranks({}, len(SHARES), timeout=600)
    bench.write(path, "uneven-gradients", settings, rows=rows)


@bench.rank
def rank(_: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the steps and the largest error of every training."""
    paceline.init("gloo")
    rows, first = [], dist.get_rank() == 0
    for name, errors in trainings().items():
        found = list(errors)
        error, steps = slowest_rank([max(found), len(found)], "cpu")
        rows.append({"name": name, "steps": int(steps), "error": error})
        if first:
            print(f"{error:.2e}  {steps:3.0f} steps  {name}", flush=True)
    paceline.shutdown()
    return rows if first else None


def trainings() -> dict[str, Iterator[float]]:
    """Return the errors of every training by name; a training starts when its errors are iterated over."""
    found = {
        "torch DDP, batches in proportion": ddp_errors("rebalance"),
        "torch DDP, batches in proportion, loss weighted by hand": ddp_errors("rebalance", weighted=True),
        "torch DDP in Join, divided by the initial world size": ddp_errors("join", by_initial_size=True),
        "torch DDP in Join, divided by the ranks that are left": ddp_errors("join", by_initial_size=False),
    }
    for uneven in ("join", "rebalance"):
        for strategy in ("bucketed", "sharded", "full-shard"):
            for accumulate in (1, 2):
                name = f"Paceline {strategy}, {uneven}"
                name += f", accumulation {accumulate}" if accumulate > 1 else ""
                found[name] = paceline_errors(strategy, uneven, accumulate)
    return found


def dataset() -> TensorDataset:
    """Return samples of (x, y, number)."""
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return TensorDataset(x, (x.sin().sum(1, keepdim=True) + x[:, :1].exp()).tanh(), torch.arange(SAMPLES))


DATA = dataset()


def build() -> nn.Module:
    """Return the same model every time."""
    torch.manual_seed(0)
    units = nn.ModuleList([nn.Linear(WIDTH, 32), nn.Linear(32, 32)])
    return nn.Sequential(units[0], nn.Tanh(), units[1], nn.Tanh(), nn.Linear(32, 1)).double()


def loss_of(model: nn.Module, numbers: list[int] | Tensor) -> Tensor:
    """Return the mean squared error over samples."""
    return (model(DATA.tensors[0][numbers]) - DATA.tensors[1][numbers]).square().mean()


def gradient(model: nn.Module) -> Tensor:
    """Return all gradients, joined."""
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def plan(uneven: str) -> list[list[list[int]]]:
    """Return the samples that each rank takes in each step, computed without a loader."""
    shares = dispatch_blocks(SAMPLES, len(SHARES), shares=SHARES).shares
    settings = DispatchSettings(shares, BLOCK, "round_robin", BATCH, uneven)
    epoch = LoaderPosition.start(SampleOrder(SAMPLES), settings).epoch
    steps = range(epoch.portions.steps)
    return [[epoch.batch(rank, step).tolist() for rank in range(len(SHARES))] for step in steps]


def error_of(found: Tensor, parameters: list[Tensor], numbers: list[int]) -> float:
    """Return ‖found − true‖ / ‖true‖; true is the gradient of the mean over these samples, in one process."""
    reference = build()
    with torch.no_grad():
        for own, given in zip(reference.parameters(), parameters, strict=True):
            own.copy_(given)
    loss_of(reference, numbers).backward()
    true = gradient(reference)
    return float((found - true).norm() / true.norm())


def paceline_errors(strategy: str, uneven: str, accumulate: int) -> Iterator[float]:
    """Train an epoch by SGD; yield the error of every step's gradient."""
    loader = paceline.Loader(DATA, BATCH, shares=SHARES, block=BLOCK, uneven=uneven)
    model = paceline.DataParallel(build(), sync=strategy, units=[])
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=RATE)
    planned, steps = plan(uneven), len(loader)
    together: list[int] = []
    for step, batch in enumerate(loader):
        together += [number for of_rank in planned[step] for number in of_rank]
        last = (step + 1) % accumulate == 0 or step + 1 == steps
        with nullcontext() if last else model.accumulate():
            model.backward(loss_of(model, batch[2]), samples=batch.samples)
        if last:
            before = model.whole_parameters()
            optim.step()
            moved = [(a - b) / RATE for a, b in zip(before, model.whole_parameters(), strict=True)]
            yield error_of(torch.cat([each.flatten() for each in moved]), before, together)
            optim.zero_grad()
            together = []


def ddp_errors(
    uneven: str, *, weighted: bool = False, by_initial_size: bool | None = None
) -> Iterator[float]:
    """Train an epoch by torch's DDP and SGD on batches of unequal sizes; yield the error of every step's gradient.

    Args:
        uneven: how samples are divided into batches, as for `paceline.Loader`.
        weighted: the loss, by hand.
        by_initial_size: what Join divides by; None: without Join.
    """
    model, rank = DistributedDataParallel(build(), gradient_as_bucket_view=True), dist.get_rank()
    optim = torch.optim.SGD(model.parameters(), lr=RATE)
    joined = by_initial_size is not None
    with Join([model], divide_by_initial_world_size=by_initial_size) if joined else nullcontext():
        for of_rank in plan(uneven):
            mine, together = of_rank[rank], [number for each in of_rank for number in each]
            if not mine:
                break
            weight = len(mine) * len(SHARES) / len(together) if weighted else 1.0
            before = [param.detach().clone() for param in model.parameters()]
            (loss_of(model, mine) * weight).backward()
            yield error_of(gradient(model), before, together)
            optim.step()
            optim.zero_grad()


@bench.tables
def tables() -> dict[str, str]:
    """Return the table of gradient errors."""
    rows = [
        [
            row["name"],
            str(row["steps"]),
            f"{row['error']:.0%}" if row["error"] > 1e-3 else f"{row['error']:.0e}",
        ]
        for row in bench.read("exact")["rows"]
    ]
    return {"exact": table(["training", "steps", "largest error"], rows)}


if __name__ == "__main__":
    bench.main()
