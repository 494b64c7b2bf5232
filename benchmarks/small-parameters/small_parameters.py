"""What synchronising costs on many small parameters, where the engine's work per parameter decides.

    python benchmarks/small-parameters/small_parameters.py run
    python benchmarks/small-parameters/small_parameters.py run --gpu
    python benchmarks/small-parameters/small_parameters.py table

Two ranks on one thread each, with ``--gpu`` on one card; in every round each kind of model takes a turn of several
steps. The cost is the time of a step less that of the same step without synchronisation; a rank's own part of it is
what its threads compute meanwhile, without waiting for the other rank.
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

CLOCKS = {"seconds": time.perf_counter, "own_seconds": time.process_time}
WITHOUT, DDP = "without", "torch DDP"
OURS = ("DataParallel", "DistributedDataParallel")

bench = Benchmark(__file__)


class SumOfProducts(torch.autograd.Function):
    """The sum of ``(weight * x).sum()`` over all weights, in a few operators, so that other costs stand out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        ctx.save_for_backward(x)
        return (torch.stack(weights) @ x).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return a tensor of its own for each weight."""
        (x,) = ctx.saved_tensors
        return None, *torch._foreach_mul([x] * (len(ctx.needs_input_grad) - 1), grads[0])


class ManyParameters(nn.Module):
    """A sum of products, one for each parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((NUMEL,), 1e-3)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a scalar."""
        return SumOfProducts.apply(x, *self.weights)


@bench.run
def run(
    parameters: Annotated[int, Option(min=1, help="Number of parameters.")] = 1000,
    rounds: Annotated[int, Option(min=1, help="Turns of each kind.")] = 40,
    gpu: Annotated[bool, Option("--gpu", help="Both ranks on one GPU, over NCCL.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Measure all kinds of models on both backends of the CPU, or on a GPU."""
    path = bench.output(json_file, "small-parameters-gpu" if gpu else "small-parameters")
    settings = {"parameters": parameters, "numel": NUMEL, "rounds": rounds, "steps_in_a_turn": 20}
    backends = ["nccl"] if gpu else ["gloo", "paceline"]
    found = bench.start_ranks(settings | {"backends": backends}, 2, turns=rounds)
    bench.write(path, "small-parameters", settings, backends=backends, **found)


@bench.rank
def rank(job: dict[str, Any]) -> dict[str, dict[str, list[float]]] | None:
    """Return the seconds of a step by clock, kind and round, means over ranks."""
    torch.set_num_threads(1)
    *others, main = job["backends"]
    world = on_one_gpu() if main == "nccl" else init(main)
    groups = {name: dist.new_group(backend=name) for name in others} | {main: dist.group.WORLD}

    def net() -> nn.Module:
        return ManyParameters(job["parameters"]).to(world.device)

    models = {WITHOUT: net()}
    for name, group in groups.items():
        ours = {"process_group": group, "broadcast_buffers": False}
        models[kind(name, DDP)] = tuned_ddp(net(), 25, group)
        models[kind(name, OURS[0])] = DataParallel(net(), group=group)
        models[kind(name, OURS[1])] = DistributedDataParallel(net(), **ours)
    x, steps = torch.ones(NUMEL, device=world.device), job["steps_in_a_turn"]

    def turn(model: nn.Module) -> list[float]:
        dist.barrier()
        started = [clock() for clock in CLOCKS.values()]
        for _ in range(steps):
            model(x).backward()
            for param in model.parameters():
                param.grad = None
        if x.is_cuda:
            torch.cuda.synchronize()
        return [(clock() - start) / steps for clock, start in zip(CLOCKS.values(), started, strict=True)]

    turns = {name: lambda model=model: turn(model) for name, model in models.items()}
    times = take_turns(turns, job["rounds"], bench.tick, warm_up=2, order=alternating)
    mean = sum_over_ranks(torch.tensor(list(times.values()), dtype=torch.float64)) / world.size
    shutdown()
    if world.rank != 0:
        return None
    by_clock = mean.permute(2, 0, 1).tolist()
    return {name: dict(zip(times, each, strict=True)) for name, each in zip(CLOCKS, by_clock, strict=True)}


def kind(backend: str, model: str) -> str:
    """Return the name of a model on a backend."""
    return f"{model} over {backend}"


def costs(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the cost of synchronising by kind and round."""
    return {
        name: [own - bare for own, bare in zip(times, seconds[WITHOUT], strict=True)]
        for name, times in seconds.items()
    }


def rows(result: dict[str, Any]) -> list[list[str]]:
    """Return the cells of all kinds of models."""
    backends, step = result["backends"], result["seconds"]
    clocks = [costs(result[name]) for name in CLOCKS if name in result]
    references = [kind(backend, DDP) for backend in backends]
    cells = []
    for backend in backends:
        for name in (kind(backend, model) for model in (DDP, *OURS)):
            times = [f"{1e3 * median(each[name]):.2f}" for each in (step, *clocks)]
            ratios = [
                "" if name == other else f"{ratio_of(cost[name], cost[other]):.2f}"
                for cost in clocks
                for other in references
            ]
            cells.append([name, *times, *ratios])
    return cells


@bench.tables
def tables() -> dict[str, str]:
    """Return a table for each result."""
    found = {}
    for name, result in bench.find("small-parameters*").items():
        own = ["own part, ms"] if "own_seconds" in result else []
        over = [f"÷ DDP over {each}" for each in result["backends"]]
        titles = ["model", "step, ms", "cost, ms", *own, *over, *(f"own {each}" for each in over if own)]
        found[name] = table(titles, rows(result), words=1)
    return found


if __name__ == "__main__":
    bench.main()
