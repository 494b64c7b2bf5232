"""Program of two ranks on one card, or over NCCL on two: ``two_ranks.py BACKEND DEVICE OUT.json``.

Writes, for every case, the difference from one process on both ranks' batches, or the error. DEVICE
is the same for both ranks (``cuda:0``), or ``cuda``: each its own. (With ``cpu`` the cases without graphs run too.)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import on_device as on
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import paceline
from bench_harness.ranks import on_one_gpu
from paceline.parallel.gradient_collectives import Comm
from paceline.world.control_collectives import gather_texts

STEPS = 10
"""From the fifth on, statuses are read one step late over NCCL."""

STRATEGIES = ("naive", "flat", "overlap", "bucketed", "sharded")
if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch 2.13 has it
    STRATEGIES += ("full-shard",)
SMALL = {"small buckets": paceline.Sync(2**-9), "small shards": paceline.Sync(2**-9, shard="optimizer")}


def train(model: paceline.DataParallel, rank: int, device: str, steps: int = STEPS) -> None:
    """Train on this rank's batches."""
    optim = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=on.RATE)
    for step in range(steps):
        model.backward(on.loss_of(model, *on.batch(step, [rank], device)), samples=on.SAMPLES)
        optim.step()
        optim.zero_grad()


def gap(model: paceline.DataParallel, name: str, device: str) -> float:
    """Return the largest difference between `model` and one process."""
    return on.max_difference(model.whole_parameters(), on.one_process(name, device, STEPS, ranks=(0, 1)))


def strategies(rank: int, device: str) -> dict[str, float]:
    """Train both models with every strategy."""
    found = {}
    for name in on.MODELS:
        for title, sync in {**dict(zip(STRATEGIES, STRATEGIES, strict=True)), **SMALL}.items():
            model = paceline.DataParallel(on.build(name, device), sync=sync)
            train(model, rank, device)
            found[f"{name}, {title}"] = gap(model, name, device)
    return found


def matrix_optimizers(rank: int, device: str) -> dict[str, float]:
    """Train with Muon on hidden matrices and AdamW on the rest; one process has the same optimizers."""
    reference = on.build("Plain", device)
    matrices, rest = paceline.matrix_parameters(reference)
    plain = [torch.optim.Muon(matrices, lr=on.RATE), torch.optim.AdamW(rest, lr=on.RATE)]
    for step in range(STEPS):
        inputs, targets = on.batch(step, [0, 1], device)
        on.loss_of(reference, inputs, targets).backward()
        for optim in plain:
            optim.step()
            optim.zero_grad()
    found = {}
    for sync in ("bucketed", *STRATEGIES[4:], "zero2"):
        model = paceline.DataParallel(on.build("Plain", device), sync=sync)
        matrices, rest = paceline.matrix_parameters(model)
        optims = [
            paceline.ShardedOptimizer(model, torch.optim.Muon, matrices, lr=on.RATE),
            paceline.ShardedOptimizer(model, torch.optim.AdamW, rest, lr=on.RATE),
        ]
        for step in range(STEPS):
            model.backward(on.loss_of(model, *on.batch(step, [rank], device)), samples=on.SAMPLES)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        found[f"Muon, {sync}"] = on.max_difference(model.whole_parameters(), list(reference.parameters()))
    return found


def on_a_stream_of_the_program(rank: int, device: str) -> float:
    """Train on a stream that is not the default one."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        model = paceline.DataParallel(on.build("TwoStreams", device), sync=paceline.Sync(2**-9))
        train(model, rank, device)
        found = gap(model, "TwoStreams", device)
    torch.cuda.current_stream(device).wait_stream(stream)
    return found


def module_in_a_graph(rank: int, device: str) -> float:
    """Wrap a module whose forward and backward are CUDA graphs."""
    net = on.build("Plain", device)
    graphed = torch.cuda.make_graphed_callables(net, (on.batch(0, [rank], device)[0],))
    model = paceline.DataParallel(graphed, sync="bucketed")
    train(model, rank, device)
    return gap(model, "Plain", device)


def sharded_graph(rank: int, device: str) -> str:
    """Try to shard such a module, which would move its parameters; return the error."""
    net = on.build("Plain", device)
    graphed = torch.cuda.make_graphed_callables(net, (on.batch(0, [rank], device)[0],))
    try:
        paceline.DataParallel(graphed, sync="sharded")
    except paceline.PacelineError as error:
        return str(error)
    return "nothing"


def captured_backward(rank: int, device: str) -> str:
    """Try to capture a whole step; return the error; a step without a graph succeeds before."""
    model = paceline.DataParallel(on.build("Plain", device))
    inputs, targets = on.batch(0, [rank], device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            model.backward(on.loss_of(model, inputs, targets), samples=on.SAMPLES)
            model.zero_grad()
    torch.cuda.current_stream(device).wait_stream(side)
    message = "nothing"
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model.backward(on.loss_of(model, inputs, targets), samples=on.SAMPLES)
    except paceline.PacelineError as error:
        message = str(error)
    model.zero_grad()
    model.backward(on.loss_of(model, inputs, targets), samples=on.SAMPLES)
    return message


def compiled(rank: int, device: str) -> float:
    """Train a compiled module."""
    net = on.build("Plain", device)
    model = paceline.DataParallel(torch.compile(net))
    train(model, rank, device)
    return gap(model, "Plain", device)


def mixed_precision(rank: int, device: str) -> float:
    """Train in float16 with a scaler whose first steps overflow, both ranks on the same batches."""

    def trained(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        model = wrap(on.build("Plain", device).float())
        optim = torch.optim.AdamW(model.parameters(), lr=on.RATE)
        scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=2.0**40)
        for step in range(3 * STEPS):
            inputs, targets = (each.float() for each in on.batch(step, [0], device))
            with torch.autocast(torch.device(device).type, torch.float16):
                loss = on.loss_of(model, inputs, targets)
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
        assert scaler.get_scale() < 2.0**40
        return list(model.parameters())

    return on.max_difference(trained(paceline.DataParallel), trained(lambda net: net))


def collectives(rank: int, device: str) -> float:
    """Return the largest difference of any collective's result from the one by hand."""
    comm = Comm()
    numbers = torch.arange(8, dtype=torch.float64, device=device)
    mine, both = numbers + 10 * rank, numbers + 5
    rows = (
        torch.arange(2.0, dtype=torch.float64, device=device if comm.stream_ordered else "cpu")[:, None]
        + 10 * rank
    )
    half = slice(4 * rank, 4 * rank + 4)
    summed, scattered, gathered, received = mine.clone(), mine.clone(), mine.clone(), torch.zeros_like(rows)
    comm.all_reduce(summed, mean=True).wait()
    comm.reduce_scatter(scattered, mean=True).wait()
    comm.all_gather(gathered).wait()
    comm.all_to_all_rows(rows, received, lambda peer: None, comm.reserve_tags(1)).wait()
    sent = mine.clone()
    comm.broadcast(sent, 1)
    other = 1 - rank
    found = [summed, scattered[half], gathered, received[other], sent, *comm.gather_values(mine)]
    parts = torch.cat([numbers[:4], numbers[4:] + 10])
    crossed = torch.full_like(received[other], rank + 10.0 * other)
    assert comm.largest(rank, torch.device(device)) == 1
    assert gather_texts(f"rank {rank}") == ["rank 0", "rank 1"]
    return on.max_difference(found, [both, both[half], parts, crossed, numbers + 10, numbers, numbers + 10])


def start(backend: str, device: str) -> paceline.World:
    """Initialize the world."""
    return on_one_gpu() if (backend, device) == ("nccl", "cuda:0") else paceline.init(backend, device=device)


def main(backend: str, device: str, out: str) -> None:
    """Do all of it."""
    world = start(backend, device)
    here = world.device
    found: dict[str, float | str] = dict(strategies(world.rank, here))
    found |= matrix_optimizers(world.rank, here)
    found["compiled"] = compiled(world.rank, here)
    found["mixed precision"] = mixed_precision(world.rank, here)
    found["collectives"] = collectives(world.rank, here)
    if here != "cpu":
        found["a stream of the program"] = on_a_stream_of_the_program(world.rank, here)
        found["module in a graph"] = module_in_a_graph(world.rank, here)
        found["sharded graph"] = sharded_graph(world.rank, here)
        found["captured"] = captured_backward(world.rank, here)
    Path(f"{out}.{world.rank}").write_text(json.dumps(found), encoding="utf-8")
    paceline.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
