"""Paceline in a loop written for Accelerate, way by way, each held against one process on the whole batch.

pip install accelerate
torchrun --nproc-per-node 2 examples/interplay/with_accelerate.py

What came of it, and what follows: docs/interplay.md.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from accelerate import Accelerator
from problem import RATE, STEPS, Gap, build, gap, learn, loss_of, one_process, tried
from torch.nn.parallel import DistributedDataParallel

import paceline

CLIP = 0.1


def wrapped(sync: str) -> tuple[paceline.DataParallel, paceline.ShardedOptimizer]:
    """Return Paceline's model and optimizer."""
    model = paceline.DataParallel(build(), sync=sync)
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=RATE)


def prepared_optimizer() -> Gap:
    """Let Accelerate run backward and wrap the optimizer, not the model."""
    accelerator = Accelerator(cpu=True)
    model, optim = wrapped("sharded")
    optim = accelerator.prepare(optim)
    learn(model, optim, accelerator.backward, accelerator.process_index)
    return gap(model.whole_parameters(), one_process(accelerator.num_processes))


def accumulated() -> Gap:
    """Have Accelerate say when to synchronise: it calls the model's `no_sync`."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optim = wrapped("sharded")
    optim = accelerator.prepare(optim)
    for number in range(2 * STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, number, accelerator.process_index))
            optim.step()
            optim.zero_grad()
    assert model.engine.step == STEPS, "one round of synchronisation for each step"
    return gap(model.whole_parameters(), one_process(accelerator.num_processes, micro=2))


def _clipped(sync: str, *, ours: bool) -> Gap:
    accelerator = Accelerator(cpu=True)
    model, optim = wrapped(sync)
    optim = accelerator.prepare(optim)
    theirs = partial(accelerator.clip_grad_norm_, list(model.parameters()), CLIP)
    clip = partial(model.clip_grad_norm_, CLIP) if ours else theirs
    learn(model, optim, accelerator.backward, accelerator.process_index, clip)
    return gap(model.whole_parameters(), one_process(accelerator.num_processes, clip=CLIP))


def clipped_by_accelerate_bucketed() -> Gap:
    """Clip as Accelerate does, where every rank has whole gradients."""
    return _clipped("bucketed", ours=False)


def clipped_by_accelerate_sharded() -> Gap:
    """Clip as Accelerate does, where ``param.grad`` is None: its norm is 0, and nothing is clipped."""
    return _clipped("sharded", ours=False)


def clipped_by_paceline_sharded() -> Gap:
    """Clip by the norm over all shards."""
    return _clipped("sharded", ours=True)


def prepared_model() -> Gap:
    """Give Accelerate the model too: it wraps it in DDP, which sends everything a second time."""
    accelerator = Accelerator(cpu=True)
    model, optim = wrapped("bucketed")
    twice, optim = accelerator.prepare(model, optim)
    assert isinstance(twice, DistributedDataParallel)
    learn(twice, optim, accelerator.backward, accelerator.process_index)
    return gap(model.whole_parameters(), one_process(accelerator.num_processes))


def ddp_on_our_backend() -> Gap:
    """Use Accelerate as it is, with torch's DDP, in the process group that `paceline.init()` made."""
    accelerator = Accelerator(cpu=True)
    assert dist.get_backend() == "paceline"
    net = build()
    model, optim = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=RATE))
    learn(model, optim, accelerator.backward, accelerator.process_index)
    return gap(list(net.parameters()), one_process(accelerator.num_processes))


def loader_left_alone() -> Gap:
    """Prepare a `paceline.Loader`: it comes back as it is, and serves every sample once."""
    accelerator = Accelerator(cpu=True)
    loader = paceline.Loader(list(range(10)), batch_size=2, shuffle=False)
    assert accelerator.prepare(loader) is loader
    mine = torch.tensor([sum(batch.sum().item() for batch in loader)])
    return abs(accelerator.reduce(mine).item() - sum(range(10)))


TRIALS = [
    prepared_optimizer,
    accumulated,
    clipped_by_accelerate_bucketed,
    clipped_by_accelerate_sharded,
    clipped_by_paceline_sharded,
    prepared_model,
    ddp_on_our_backend,
    loader_left_alone,
]


if __name__ == "__main__":
    paceline.init(device="cpu")  # before the first Accelerator, which then takes this process group
    tried(TRIALS)
    paceline.shutdown()
