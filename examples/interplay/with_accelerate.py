"""Ways to use Paceline in a loop written for Accelerate, each compared with one process on the whole batch.

pip install accelerate
torchrun --nproc-per-node 2 examples/interplay/with_accelerate.py

Results and conclusions: docs/interplay.md.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from accelerate import Accelerator
from problem import RATE, STEPS, Gap, build, gap, learn, loss_of, one_process, run_trials
from torch.nn.parallel import DistributedDataParallel

import paceline

CLIP = 0.1


def wrapped(sync: str) -> tuple[paceline.DataParallel, paceline.ShardedOptimizer]:
    """Return Paceline's model and optimizer."""
    model = paceline.DataParallel(build(), sync=sync)
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=RATE)


def prepared_optimizer() -> Gap:
    """Accelerate runs backward and wraps the optimizer, but not the model."""
    accelerator = Accelerator(cpu=True)
    model, optim = wrapped("sharded")
    optim = accelerator.prepare(optim)
    learn(model, optim, accelerator.backward, accelerator.process_index)
    return gap(model.whole_parameters(), one_process(accelerator.num_processes))


def accumulated() -> Gap:
    """Accelerate controls accumulation: it calls the model's `no_sync`."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optim = wrapped("sharded")
    optim = accelerator.prepare(optim)
    for number in range(2 * STEPS):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, number, accelerator.process_index))
            optim.step()
            optim.zero_grad()
    assert model.engine.step == STEPS, "one round of synchronisation per step"
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
    """Accelerate clips; every rank has whole gradients."""
    return _clipped("bucketed", ours=False)


def clipped_by_accelerate_sharded() -> Gap:
    """Accelerate clips, but ``param.grad`` is None: its norm is 0, and nothing is clipped."""
    return _clipped("sharded", ours=False)


def clipped_by_paceline_sharded() -> Gap:
    """Paceline clips by the norm over all shards."""
    return _clipped("sharded", ours=True)


def prepared_model() -> Gap:
    """Accelerate also wraps the model in DDP, which sends everything a second time."""
    accelerator = Accelerator(cpu=True)
    model, optim = wrapped("bucketed")
    twice, optim = accelerator.prepare(model, optim)
    assert isinstance(twice, DistributedDataParallel)
    learn(twice, optim, accelerator.backward, accelerator.process_index)
    return gap(model.whole_parameters(), one_process(accelerator.num_processes))


def ddp_on_our_backend() -> Gap:
    """Accelerate with torch's DDP, in the process group that `paceline.init()` created."""
    accelerator = Accelerator(cpu=True)
    assert dist.get_backend() == "paceline"
    net = build()
    model, optim = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=RATE))
    learn(model, optim, accelerator.backward, accelerator.process_index)
    return gap(list(net.parameters()), one_process(accelerator.num_processes))


def loader_left_alone() -> Gap:
    """Accelerate returns a `paceline.Loader` unchanged; it serves every sample once."""
    accelerator = Accelerator(cpu=True)
    loader = paceline.Loader(list(range(10)), batch_size=2, shuffle=False)
    assert accelerator.prepare(loader) is loader
    local_sum = torch.tensor([sum(batch.sum().item() for batch in loader)])
    return abs(accelerator.reduce(local_sum).item() - sum(range(10)))


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
    paceline.init(device="cpu")  # before the first Accelerator, which then uses this process group
    run_trials(TRIALS)
    paceline.shutdown()
