"""What synchronising costs on many small parameters, where the engine's work per parameter decides.

    python benchmarks/small-parameters/small_parameters.py run
    python benchmarks/small-parameters/small_parameters.py run --gpu
    python benchmarks/small-parameters/small_parameters.py table

Two ranks on one thread each, with ``--gpu`` on one card; in every round each kind of model takes a turn of several
steps. The cost is the time of a step less that of the same step without synchronisation.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import nn
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.markdown import table
from bench_harness.ranks import on_one_gpu, tuned_ddp
from bench_harness.turns import alternating, ratio_of, take_turns
from paceline.parallel.data_parallel import DataParallel
from paceline.parallel.ddp import DistributedDataParallel
from paceline.tools.cli.shared_options import JsonOption
from paceline.world import init, shutdown
from paceline.world.control_collectives import sum_over_ranks

NUMEL = 64
"""Elements of a parameter."""

BACKENDS = ("gloo", "paceline")
OURS = ("DataParallel", "DistributedDataParallel")

bench = Benchmark(__file__)


class ManyParameters(nn.Module):
    """A sum of products, one for each parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((NUMEL,), 1e-3)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        return torch.stack([(weight * x).sum() for weight in self.weights]).sum()


@bench.run
def run(
    parameters: Annotated[int, Option(min=1, help="Number of parameters.")] = 1000,
    rounds: Annotated[int, Option(min=1, help="Turns of each kind.")] = 40,
    gpu: Annotated[bool, Option("--gpu", help="Both ranks on one GPU, over NCCL.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Measure all kinds of models on both backends of the CPU, or on a GPU."""
    path = bench.output(json_file, "small-parameters-gpu" if gpu else "small-parameters")
    settings = {"parameters": parameters, "numel": NUMEL, "rounds": rounds, "steps_in_a_turn": 10}
    cases = [
        {
            "backend": each,
            "seconds": bench.start_ranks(settings | {"backend": each}, 2, turns=rounds, title=each),
        }
        for each in (["nccl"] if gpu else BACKENDS)
    ]
    bench.write(path, "small-parameters", settings, cases=cases)


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, list[float]] | None:
    """Return the seconds of a step of each kind by round, means over ranks."""
    world = on_one_gpu() if job["backend"] == "nccl" else init(job["backend"])
    torch.set_num_threads(1)
    nets = [ManyParameters(job["parameters"]).to(world.device) for _ in range(4)]
    models: dict[str, nn.Module] = {
        "without": nets[0],
        "torch DDP": tuned_ddp(nets[1], 25),
        "DataParallel": DataParallel(nets[2]),
        "DistributedDataParallel": DistributedDataParallel(nets[3], broadcast_buffers=False),
    }
    x, steps = torch.ones(NUMEL, device=world.device), job["steps_in_a_turn"]

    def turn(model: nn.Module) -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            model(x).backward()
            for param in model.parameters():
                param.grad = None
        if x.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps

    turns = {name: lambda model=model: turn(model) for name, model in models.items()}
    times = take_turns(turns, job["rounds"], bench.tick, warm_up=2, order=alternating)
    mean = sum_over_ranks(torch.tensor(list(times.values()), dtype=torch.float64)) / world.size
    shutdown()
    return dict(zip(times, mean.tolist(), strict=True)) if world.rank == 0 else None


def rows(case: dict[str, Any]) -> list[list[str]]:
    """Return the cells of a backend's models."""
    seconds = case["seconds"]
    cost = {
        name: [own - bare for own, bare in zip(times, seconds["without"], strict=True)]
        for name, times in seconds.items()
    }
    return [
        [
            case["backend"],
            name,
            f"{1e3 * median(seconds[name]):.2f}",
            f"{1e3 * median(cost[name]):.2f}",
            f"{ratio_of(cost[name], cost['torch DDP']):.3f}" if name in OURS else "",
        ]
        for name in seconds
    ]


@bench.tables
def tables() -> dict[str, str]:
    """Return a table for each result."""
    titles = ["backend", "model", "step, ms", "cost of synchronising, ms", "÷ torch DDP"]
    return {
        name: table(titles, [row for case in result["cases"] for row in rows(case)], words=2)
        for name, result in bench.find("small-parameters*").items()
    }


if __name__ == "__main__":
    bench.main()
