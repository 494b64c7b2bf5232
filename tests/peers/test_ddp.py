"""torch's DistributedDataParallel trains on "paceline" as it does on gloo.

On two ranks to the same bits; on more to 1e-6, as the backends add the ranks in different orders.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from both import compare, max_difference, world
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import model_zoo

STEPS = 4
WAYS = {
    "plain": {},
    "many buckets": {"bucket_cap_mb": 0.0001},
    "gradients as views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "all": {"gradient_as_bucket_view": True, "find_unused_parameters": True, "bucket_cap_mb": 0.0001},
}
HOOKS = {
    "all-reduce": default_hooks.allreduce_hook,
    "float16": default_hooks.fp16_compress_hook,
}


def batch(rank, size, step, samples=8):
    generator = torch.Generator().manual_seed(1000 * step)
    x = torch.randn(size * samples, model_zoo.WIDTH, generator=generator)
    y = torch.randn(size * samples, 1, generator=generator)
    return x.chunk(size)[rank], y.chunk(size)[rank]


def build(name, group, **options):
    torch.manual_seed(3)
    model = DistributedDataParallel(model_zoo.MODELS[name](), process_group=group, **options)
    return model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.02)


def train(group, rank, size, name, options, hook=None, accumulate=1):
    model, optim = build(name, group, **options)
    if hook is not None:
        model.register_comm_hook(group, HOOKS[hook])
    for step in range(STEPS):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                model_zoo.loss_of(model, name, *batch(rank, size, step * accumulate + micro)).backward()
        optim.step()
        optim.zero_grad()
    return [param.detach() for param in model.parameters()]


def train_uneven(group, rank, size, static):
    """Train with more batches on some ranks than on others, by DDP's join."""
    model, optim = build("Plain", group)
    with model.join(divide_by_initial_world_size=static):
        for step in range(2 + rank):
            model_zoo.loss_of(model, "Plain", *batch(rank, size, step)).backward()
            optim.step()
            optim.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.sweep
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3])
def test_options(pool, tmp_path, size, way):
    name = "Branches" if "find_unused_parameters" in WAYS[way] else "Plain"
    compare(pool, tmp_path, size, train, name, WAYS[way])


@pytest.mark.parametrize("name", ["Tied", "Frozen", "Strided", "Checkpointed"])
def test_models(pool, tmp_path, name):
    compare(pool, tmp_path, 2, train, name, {})


@pytest.mark.parametrize("hook", HOOKS)
def test_communication_hooks(pool, tmp_path, hook):
    compare(pool, tmp_path, 2, train, "Plain", {"gradient_as_bucket_view": True}, hook)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_accumulated_without_synchronisation(pool, tmp_path, size):
    compare(pool, tmp_path, size, train, "Plain", {}, None, 3)


@pytest.mark.parametrize("static", [True, False], ids=["all ranks count", "ranks with data count"])
def test_uneven_numbers_of_batches(pool, tmp_path, static):
    compare(pool, tmp_path, 3, train_uneven, static)


def train_power_sgd(group, rank, size):
    """Train with torch's PowerSGD, whose callbacks make collectives and wait for them; in float64."""
    model = DistributedDataParallel(model_zoo.build("Tied"), process_group=group, bucket_cap_mb=0.0001)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(6):
        model_zoo.loss_of(
            model, "Tied", *(each.double() for each in batch(rank, size, step, 24 // size))
        ).backward()
        optim.step()
        optim.zero_grad()
    return [param.detach() for param in model.parameters()]


def power_sgd_together_and_alone(rank, size, folder):
    with world(rank, size, folder) as group:
        alone, _ = dist.new_subgroups(1)
        return train_power_sgd(group, rank, size), train_power_sgd(alone, 0, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_power_sgd(pool, tmp_path, size):
    """It is linear in the gradients: so ranks that share a batch get the result of one process."""
    results = pool(size).run(power_sgd_together_and_alone, str(tmp_path), world=False)
    for together, alone in results:
        assert max_difference(together, results[0][0]) == 0.0
        assert max_difference(together, alone) <= 1e-9


def train_compiled(group, rank, size):
    """Train a compiled model; the backend only traces, so that no compiler is needed."""
    torch.manual_seed(3)
    model = DistributedDataParallel(model_zoo.MODELS["Plain"](), process_group=group)
    optim = torch.optim.AdamW(model.parameters(), lr=0.02)
    compiled = torch.compile(model, backend="eager")
    for step in range(STEPS):
        model_zoo.loss_of(compiled, "Plain", *batch(rank, size, step)).backward()
        optim.step()
        optim.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.thorough
def test_a_compiled_model(pool, tmp_path):
    compare(pool, tmp_path, 2, train_compiled)


def lose_a_rank(rank, size, folder):
    dist.init_process_group("paceline", init_method=f"file://{folder}/world", rank=rank, world_size=size)
    model, _ = build("Plain", None)
    loss = model_zoo.loss_of(model, "Plain", *batch(rank, size, 0))
    if rank == 1:
        dist.destroy_process_group()
        return ""
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_left_is_named_by_backward(pool, tmp_path):
    texts = pool(3).run(lose_a_rank, str(tmp_path), world=False)
    assert all("rank 1" in text and "left the group" in text for text in (texts[0], texts[2])), texts
