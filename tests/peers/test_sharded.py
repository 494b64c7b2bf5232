"""Sharded models and optimizers on "paceline" and gloo: bitwise equal on two ranks, else to 1e-6."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from both import compare, max_difference, world
from test_ddp import STEPS, batch, build
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import model_zoo


def shard(group, mesh=None, **options):
    """Return a model sharded by FSDP2, layer by layer."""
    torch.manual_seed(3)
    model = model_zoo.MODELS["Tied"]()
    mesh = mesh or DeviceMesh.from_group(group, "cpu")
    for layer in (model.head, model):
        fully_shard(layer, mesh=mesh, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def advance(model, optim, rank, size, steps):
    for step in steps:
        model_zoo.loss_of(model, "Tied", *batch(rank, size, step)).backward()
        optim.step()
        optim.zero_grad()


def whole(model):
    return [param.full_tensor().detach() for param in model.parameters()]


def train_fsdp2(group, rank, size, options):
    model, optim = shard(group, **options)
    advance(model, optim, rank, size, range(STEPS))
    return whole(model)


def train_fsdp1(group, rank, size):
    torch.manual_seed(3)
    model = FullyShardedDataParallel(
        model_zoo.MODELS["Tied"](), process_group=group, device_id=torch.device("cpu"), use_orig_params=True
    )
    advance(model, torch.optim.AdamW(model.parameters(), lr=0.02), rank, size, range(STEPS))
    with FullyShardedDataParallel.summon_full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def train_zero(group, rank, size):
    model, _ = build("Tied", group)
    optim = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, lr=0.02, parameters_as_bucket_view=True
    )
    advance(model, optim, rank, size, range(STEPS))
    optim.consolidate_state_dict(to=0)
    return [param.detach() for param in model.parameters()]


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reshard", [True, False], ids=["shards again", "stays whole"])
def test_fsdp2(pool, tmp_path, size, reshard):
    compare(pool, tmp_path, size, train_fsdp2, {"reshard_after_forward": reshard})


def test_fsdp1(pool, tmp_path):
    compare(pool, tmp_path, 2, train_fsdp1)


@pytest.mark.parametrize("size", [2, 3])
def test_zero_redundancy_optimizer(pool, tmp_path, size):
    compare(pool, tmp_path, size, train_zero)


def train_hybrid(rank, size, folder):
    """Shard within pairs of ranks and replicate over the pairs."""
    with world(rank, size, folder):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        model, optim = shard(None, mesh)
        advance(model, optim, rank, size, range(STEPS))
        plain, other = build("Tied", None)
        advance(plain, other, rank, size, range(STEPS))
        return whole(model), [param.detach() for param in plain.parameters()]


def test_sharding_inside_groups_that_are_replicated(pool, tmp_path):
    for hybrid, ddp in pool(4).run(train_hybrid, str(tmp_path), world=False):
        assert max_difference(hybrid, ddp) <= 1e-6


def save_and_resume(rank, size, folder):
    """Save a sharded model and its optimizer in the middle, and resume with new ones."""
    with world(rank, size, folder) as group:
        model, optim = shard(group)
        advance(model, optim, rank, size, range(2))
        dcp.save({"model": model.state_dict(), "optim": optim.state_dict()}, checkpoint_id=f"{folder}/saved")
        advance(model, optim, rank, size, range(2, 4))

        resumed, other = shard(group)
        advance(resumed, other, rank, size, range(1))  # gives the optimizer a state to load into
        state = {"model": resumed.state_dict(), "optim": other.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/saved")
        resumed.load_state_dict(state["model"])
        other.load_state_dict(state["optim"])
        advance(resumed, other, rank, size, range(2, 4))
        return whole(model), whole(resumed)


def test_distributed_checkpoint(pool, tmp_path):
    for straight, resumed in pool(2).run(save_and_resume, str(tmp_path), world=False):
        assert max_difference(straight, resumed) == 0.0


def test_the_world_is_a_paceline_one(pool, tmp_path):
    assert pool(2).run(backend_names, str(tmp_path), world=False) == [["paceline", "paceline", "gloo"]] * 2


def backend_names(rank, size, folder):
    with world(rank, size, folder) as group:
        others = dist.new_group([0, 1]), dist.new_group([0, 1], backend="gloo")
        return [dist.get_backend(each) for each in (group, *others)]
