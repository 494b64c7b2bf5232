"""Paceline in a loop written for Lightning Fabric, way by way, each held against one process on the whole batch.

pip install lightning-fabric
torchrun --nproc-per-node 2 examples/interplay/with_fabric.py

What came of it, and what follows: docs/interplay.md.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, SingleDeviceStrategy
from problem import RATE, SAMPLES, STEPS, Gap, build, gap, learn, loss_of, one_process, tried
from torch.nn.parallel import DistributedDataParallel

import paceline

CLIP = 0.1


def fabric_of_all() -> Fabric:
    """Return a Fabric that has made (or, after the first, found) the process group, on our backend."""
    strategy = DDPStrategy(process_group_backend="paceline")
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    return fabric


def wrapped(sync: str) -> tuple[paceline.DataParallel, paceline.ShardedOptimizer]:
    """Return Paceline's model and optimizer, in the process group that is there."""
    model = paceline.DataParallel(build(), sync=sync)
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=RATE)


def ddp_on_our_backend() -> Gap:
    """Use Fabric as it is, with torch's DDP, on our backend by its name."""
    fabric, net = fabric_of_all(), build()
    model, optim = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=RATE))
    assert dist.get_backend() == "paceline"
    learn(model, optim, fabric.backward, fabric.global_rank)
    return gap(list(net.parameters()), one_process(fabric.world_size))


def our_model_in_its_world() -> Gap:
    """Set up the optimizer, not the model; `paceline.init()` is not called."""
    fabric = fabric_of_all()
    model, optim = wrapped("sharded")
    optim = fabric.setup_optimizers(optim)
    learn(model, optim, fabric.backward, fabric.global_rank)
    return gap(model.whole_parameters(), one_process(fabric.world_size))


def accumulated() -> Gap:
    """Accumulate with the model's own context: `fabric.no_backward_sync` wants a model that was set up."""
    fabric = fabric_of_all()
    model, optim = wrapped("sharded")
    optim = fabric.setup_optimizers(optim)
    for number in range(2 * STEPS):
        with contextlib.nullcontext() if number % 2 else model.accumulate():
            fabric.backward(loss_of(model, number, fabric.global_rank) / 2)
        if number % 2:
            optim.step()
            optim.zero_grad()
    assert model.engine.step == STEPS, "one round of synchronisation for each step"
    return gap(model.whole_parameters(), one_process(fabric.world_size, micro=2))


def no_backward_sync() -> Gap:
    """Ask Fabric for its own context."""
    with fabric_of_all().no_backward_sync(wrapped("bucketed")[0]):
        return 0.0


def clipped_by_fabric_sharded() -> Gap:
    """Clip as Fabric does, where ``param.grad`` is None: its norm is 0, and nothing is clipped."""
    fabric = fabric_of_all()
    model, optim = wrapped("sharded")
    optim = fabric.setup_optimizers(optim)
    clip = partial(fabric.clip_gradients, model, optim, max_norm=CLIP)
    learn(model, optim, fabric.backward, fabric.global_rank, clip)
    return gap(model.whole_parameters(), one_process(fabric.world_size, clip=CLIP))


def set_up_in_ddp() -> Gap:
    """Give Fabric the model too: its strategy wraps it in DDP, which sends everything a second time."""
    fabric = fabric_of_all()
    ours, optim = wrapped("bucketed")
    model, optim = fabric.setup(ours, optim)
    assert isinstance(model._forward_module, DistributedDataParallel)
    learn(model, optim, fabric.backward, fabric.global_rank)
    return gap(ours.whole_parameters(), one_process(fabric.world_size))


def set_up_one_device_each() -> Gap:
    """Let Fabric care for one device, Paceline for the ranks: model and optimizer set up, weights by samples."""
    fabric = Fabric(accelerator="cpu", devices=1, strategy=SingleDeviceStrategy("cpu"))
    ours, optim = wrapped("sharded")
    model, optim = fabric.setup(ours, optim)
    backward = partial(model.backward, samples=SAMPLES)
    learn(model, optim, backward, dist.get_rank(), partial(model.clip_grad_norm_, CLIP))
    return gap(ours.whole_parameters(), one_process(dist.get_world_size(), clip=CLIP))


def loader() -> Gap:
    """Ask Fabric to set up a `paceline.Loader`."""
    fabric_of_all().setup_dataloaders(paceline.Loader(list(range(10)), batch_size=2))
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
    tried(TRIALS)
    dist.destroy_process_group()
