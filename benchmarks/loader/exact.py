"""Gradients of uneven data, held against one process in float64: Paceline, torch DDP, and DDP with Join.

    python benchmarks/loader/exact.py

Four ranks over gloo have the shares .25 .25 .10 .40 of 1000 samples. At every optimizer step each rank computes the
true gradient itself: that of the mean over all samples that all ranks have in the step, in one backward. Writes
``exact.json`` beside this file: the largest ‖g − g*‖ / ‖g*‖ of any step and rank.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline._core.files import write_json
from paceline.data.batch_assignment import SampleOrder
from paceline.data.map_loader_state import DispatchSettings, LoaderPosition
from paceline.data.sampling.block_dispatch import dispatch_blocks
from paceline.launch.process.local_ranks import run_ranks
from paceline.tools.result_files import result_head

HERE = Path(__file__).parent
RATE = 0.1
SHARES, SAMPLES, BATCH, BLOCK, WIDTH = [0.25, 0.25, 0.10, 0.40], 1000, 16, 5, 12


class Numbered:
    """Samples that bring their number."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, WIDTH, generator=draw, dtype=torch.float64)
        self.y = (self.x.sin().sum(1, keepdim=True) + self.x[:, :1].exp()).tanh()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        return self.x[number], self.y[number], number


DATA = Numbered()


def build() -> nn.Module:
    """Return the same model every time."""
    torch.manual_seed(0)
    units = nn.ModuleList([nn.Linear(WIDTH, 32), nn.Linear(32, 32)])
    return nn.Sequential(units[0], nn.Tanh(), units[1], nn.Tanh(), nn.Linear(32, 1)).double()


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (model(x) - y).square().mean()


def plan(uneven: str) -> list[list[list[int]]]:
    """Return the samples that each rank takes in each step, from the pure parts alone."""
    shares = dispatch_blocks(SAMPLES, len(SHARES), shares=SHARES).shares
    recipe = DispatchSettings(shares, BLOCK, "round_robin", BATCH, uneven)
    epoch = LoaderPosition.start(SampleOrder(SAMPLES), recipe).epoch
    steps = range(epoch.portions.steps)
    return [[epoch.batch(rank, step).tolist() for rank in range(len(SHARES))] for step in steps]


def true_gradient(parameters: list[Tensor], numbers: list[int]) -> Tensor:
    """Return the gradient of the mean over these samples, in one process."""
    reference = build()
    with torch.no_grad():
        for own, given in zip(reference.parameters(), parameters, strict=True):
            own.copy_(given)
    loss_of(reference, DATA.x[numbers], DATA.y[numbers]).backward()
    return torch.cat([param.grad.flatten() for param in reference.parameters()])


def apart(found: Tensor, true: Tensor) -> float:
    """Return ‖found − true‖ / ‖true‖."""
    return float((found - true).norm() / true.norm())


def paceline_errors(strategy: str, uneven: str, accumulate: int) -> Iterator[float]:
    """Train an epoch by SGD; yield the error of every step's gradient."""
    shares = {"shares": SHARES, "block": BLOCK, "uneven": uneven}
    loader = paceline.Loader(DATA, BATCH, **shares)
    model = paceline.DataParallel(build(), sync=strategy, units=[])
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=RATE)
    planned, steps = plan(uneven), len(loader)
    together: list[int] = []
    for step, batch in enumerate(loader):
        x, y, _ = batch
        together += [number for of_rank in planned[step] for number in of_rank]
        last = (step + 1) % accumulate == 0 or step + 1 == steps
        if not last:
            with model.accumulate():
                model.backward(loss_of(model, x, y), samples=batch.samples)
            continue
        model.backward(loss_of(model, x, y), samples=batch.samples)
        before = model.whole_parameters()
        optim.step()
        moved = [(a - b) / RATE for a, b in zip(before, model.whole_parameters(), strict=True)]
        yield apart(torch.cat([each.flatten() for each in moved]), true_gradient(before, together))
        optim.zero_grad()
        together = []


def ddp(**options: Any) -> DistributedDataParallel:
    """Return torch's DDP around the same model."""
    return DistributedDataParallel(build(), gradient_as_bucket_view=True, **options)


def ddp_errors(uneven: str, by_hand: bool) -> Iterator[float]:
    """Let DDP train on batches of unequal sizes, plain or with the loss weighted by hand."""
    model, rank = ddp(), dist.get_rank()
    optim = torch.optim.SGD(model.parameters(), lr=RATE)
    for of_rank in plan(uneven):
        mine, together = of_rank[rank], [number for each in of_rank for number in each]
        weight = len(mine) * len(SHARES) / len(together) if by_hand else 1.0
        before = [param.detach().clone() for param in model.parameters()]
        (loss_of(model, DATA.x[mine], DATA.y[mine]) * weight).backward()
        yield apart(_gradient(model), true_gradient(before, together))
        optim.step()
        optim.zero_grad()


def join_errors(divide_by_initial_world_size: bool) -> Iterator[float]:
    """Let DDP train inside Join, each rank on its own batches, until the last rank runs dry."""
    model, rank = ddp(), dist.get_rank()
    optim = torch.optim.SGD(model.parameters(), lr=RATE)
    with Join([model], divide_by_initial_world_size=divide_by_initial_world_size):
        for of_rank in plan("join"):
            mine, together = of_rank[rank], [number for each in of_rank for number in each]
            if not mine:
                break
            before = [param.detach().clone() for param in model.parameters()]
            loss_of(model, DATA.x[mine], DATA.y[mine]).backward()
            yield apart(_gradient(model), true_gradient(before, together))
            optim.step()
            optim.zero_grad()


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def contestants() -> dict[str, Callable[[], Iterator[float]]]:
    """Return everybody, by name."""
    made: dict[str, Callable[[], Iterator[float]]] = {
        "torch DDP, batches in proportion": lambda: ddp_errors("rebalance", by_hand=False),
        "torch DDP, batches in proportion, loss weighted by hand": lambda: ddp_errors(
            "rebalance", by_hand=True
        ),
        "torch DDP in Join, divided by the initial world size": lambda: join_errors(True),
        "torch DDP in Join, divided by the ranks that are left": lambda: join_errors(False),
    }
    for uneven in ("join", "rebalance"):
        for strategy in ("bucketed", "sharded", "full-shard"):
            for accumulate in (1, 2):
                name = f"Paceline {strategy}, {uneven}" + (
                    f", accumulation {accumulate}" if accumulate > 1 else ""
                )
                made[name] = lambda s=strategy, u=uneven, a=accumulate: paceline_errors(s, u, a)
    return made


def rank_main(out: str) -> None:
    """Measure everybody on this rank; rank 0 writes."""
    paceline.init("gloo")
    torch.set_num_threads(1)
    rows = []
    for name, errors in contestants().items():
        found = list(errors())
        worst = torch.tensor([max(found), float(len(found))], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        rows.append({"name": name, "steps": int(worst[1]), "error": float(worst[0])})
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows), encoding="utf-8")
    paceline.shutdown()


def main() -> None:
    """Start the ranks and write what they found."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "rows.json")
        run_ranks([__file__, str(found)], len(SHARES), timeout=600)
        rows = json.loads(found.read_text(encoding="utf-8"))
    result = result_head("uneven-gradients") | {
        "settings": {
            "shares": SHARES,
            "samples": SAMPLES,
            "batch_size": BATCH,
            "block": BLOCK,
            "dtype": "float64",
        },
        "rows": rows,
    }
    write_json(HERE / "exact.json", result)
    for row in rows:
        print(f"{row['error']:.2e}  {row['steps']:3d} steps  {row['name']}")


if __name__ == "__main__":
    rank_main(sys.argv[1]) if len(sys.argv) > 1 else main()
