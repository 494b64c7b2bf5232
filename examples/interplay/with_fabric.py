"""Ways to use Paceline in a loop written for Lightning Fabric, each compared with one process on the whole batch.

pip install lightning-fabric
torchrun --nproc-per-node 2 examples/interplay/with_fabric.py

Results and conclusions: docs/interplay.md.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, SingleDeviceStrategy
from problem import RATE, SAMPLES, STEPS, Gap, build, gap, learn, loss_of, one_process, run_trials
from torch.nn.parallel import DistributedDataParallel

import paceline

CLIP = 0.1


def world_fabric() -> Fabric:
    """Return a Fabric on the paceline backend; the first call creates the process group."""
    strategy = DDPStrategy(process_group_backend="paceline")
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    return fabric


def wrapped(sync: str) -> tuple[paceline.DataParallel, paceline.ShardedOptimizer]:
    """Return Paceline's model and optimizer, in the existing process group."""
    model = paceline.DataParallel(build(), sync=sync)
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=RATE)


def ddp_on_our_backend() -> Gap:
    """Fabric with torch's DDP, on the paceline backend selected by name."""
    fabric, net = world_fabric(), build()
    model, optim = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=RATE))
    assert dist.get_backend() == "paceline"
    learn(model, optim, fabric.backward, fabric.global_rank)
    return gap(list(net.parameters()), one_process(fabric.world_size))


def our_model_in_its_world() -> Gap:
    """Fabric sets up the optimizer, but not the model; `paceline.init()` is not called."""
    fabric = world_fabric()
    model, optim = wrapped("sharded")
    optim = fabric.setup_optimizers(optim)
    learn(model, optim, fabric.backward, fabric.global_rank)
    return gap(model.whole_parameters(), one_process(fabric.world_size))


def accumulated() -> Gap:
    """Accumulate with `model.accumulate()`: `fabric.no_backward_sync` needs a model that Fabric set up."""
    fabric = world_fabric()
    model, optim = wrapped("sharded")
    optim = fabric.setup_optimizers(optim)
    for number in range(2 * STEPS):
        with contextlib.nullcontext() if number % 2 else model.accumulate():
            fabric.backward(loss_of(model, number, fabric.global_rank) / 2)
        if number % 2:
            optim.step()
            optim.zero_grad()
    assert model.engine.step == STEPS, "one round of synchronisation per step"
    return gap(model.whole_parameters(), one_process(fabric.world_size, micro=2))


def no_backward_sync() -> Gap:
    """Use Fabric's own accumulation context."""
    with world_fabric().no_backward_sync(wrapped("bucketed")[0]):
        return 0.0


def clipped_by_fabric_sharded() -> Gap:
    """Fabric clips, but ``param.grad`` is None: its norm is 0, and nothing is clipped."""
    fabric = world_fabric()
    model, optim = wrapped("sharded")
    optim = fabric.setup_optimizers(optim)
    clip = partial(fabric.clip_gradients, model, optim, max_norm=CLIP)
    learn(model, optim, fabric.backward, fabric.global_rank, clip)
    return gap(model.whole_parameters(), one_process(fabric.world_size, clip=CLIP))


def set_up_in_ddp() -> Gap:
    """Fabric also sets up the model: its strategy wraps it in DDP, which sends everything a second time."""
    fabric = world_fabric()
    ours, optim = wrapped("bucketed")
    model, optim = fabric.setup(ours, optim)
    assert isinstance(model._forward_module, DistributedDataParallel)
    learn(model, optim, fabric.backward, fabric.global_rank)
    return gap(ours.whole_parameters(), one_process(fabric.world_size))


def set_up_one_device_each() -> Gap:
    """Fabric manages one device, Paceline the ranks; Fabric sets up model and optimizer, samples are weights."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=SingleDeviceStrategy("cpu"))
    ours, optim = wrapped("sharded")
    model, optim = fabric.setup(ours, optim)
    backward = partial(model.backward, samples=SAMPLES)
    learn(model, optim, backward, dist.get_rank(), partial(model.clip_grad_norm_, CLIP))
    return gap(ours.whole_parameters(), one_process(dist.get_world_size(), clip=CLIP))


def loader() -> Gap:
    """Fabric sets up a `paceline.Loader`."""
    world_fabric().setup_dataloaders(paceline.Loader(list(range(10)), batch_size=2))
    return 0.0


TRIALS = [
    ddp_on_our_backend,
    our_model_in_its_world,
    accumulated,
    no_backward_sync,
    clipped_by_fabric_sharded,
    set_up_in_ddp,
    set_up_one_device_each,
    loader,
]


if __name__ == "__main__":
    run_trials(TRIALS)
    dist.destroy_process_group()
