"""Options of FSDP2 that full-shard passes through, and meshes and models that are refused before anything happens."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import model_zoo
import paceline
from model_zoo import max_difference
from paceline.errors import MismatchError, UsageError

WIDTH, STEPS = 6, 4
OPTIONS = [
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
    {"reshard_after_forward": 2},
    {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    {"forward_prefetch": 2, "backward_prefetch": 3},
    {"forward_prefetch": 9, "reshard_after_forward": True, "output_dtype": torch.float64},
    {"cast_forward_inputs": False},
]


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def net():
    torch.manual_seed(1)
    return Blocks().double()


def mesh_of(size, axes):
    return (
        init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")) if axes == 2 else None
    )


def steps(model, optim, part):
    for step in range(STEPS):
        x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        rows = part(x)
        loss = model(rows).square().mean()
        if isinstance(model, paceline.DataParallel):
            model.backward(loss, samples=len(rows))
            model.clip_grad_norm_(0.5)
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optim.step()
        optim.zero_grad()


def trained(rank, size, axes, cases):
    """Return the largest difference from one process with each of the options."""
    alone, gaps = net(), []
    steps(alone, torch.optim.AdamW(alone.parameters(), lr=0.02), lambda x: x)
    for options in cases:
        bare = net()
        model = paceline.DataParallel(
            bare, sync="full-shard", group=mesh_of(size, axes), units=list(bare.blocks), fsdp_options=options
        )
        optim = torch.optim.AdamW(model.parameters(), lr=0.02)
        steps(model, optim, lambda x: x.tensor_split([1, 4, 8])[rank] if size == 4 else x.chunk(size)[rank])
        gaps.append(max_difference(model.whole_parameters(), alone.parameters()))
    return gaps


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_the_result_is_that_of_one_process(pool, backend, axes):
    cases = [each for each in OPTIONS if axes == 1 or each.get("reshard_after_forward") != 2]
    for gaps in pool(4, backend).run(trained, axes, cases, timeout=120):
        assert max(gaps) <= 1e-12, gaps


class Wide(nn.Module):
    """Units whose messages are sent point to point over gloo."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(800, 800, bias=False) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def in_smaller_groups(rank, size):
    """Compare gathers from groups of two with those from all four ranks."""
    found = []
    for reshard in (True, 2):
        torch.manual_seed(1)
        model = paceline.DataParallel(
            Wide(), sync="full-shard", fsdp_options={"reshard_after_forward": reshard}
        )
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model.backward(model(torch.ones(2, 800) * (1 + rank)).square().mean(), samples=2)
            optim.step()
            optim.zero_grad()
        found.append(model.whole_parameters())
    return max_difference(*found)


def test_large_units_are_gathered_from_the_group_that_holds_them(pool):
    assert pool(4).run(in_smaller_groups) == [0.0] * 4


def passed_on(rank, size):
    """Return what FSDP2 has of the options."""
    bare = net()
    options = {"reshard_after_forward": False, "forward_prefetch": 2, "backward_prefetch": 1}
    paceline.DataParallel(bare, sync="full-shard", units=list(bare.blocks), fsdp_options=options)
    states = [block._get_fsdp_state() for block in bare.blocks]
    ahead = [
        ([states.index(each) for each in s._states_to_forward_prefetch],
         [states.index(each) for each in s._states_to_backward_prefetch])
        for s in states
    ]  # fmt: skip
    return ahead, [s._fsdp_param_group.post_forward_mesh_info for s in states]


def test_units_are_gathered_ahead(pool):
    for ahead, resharded in pool(2).run(passed_on):
        assert ahead == [([1, 2], []), ([2, 3], [0]), ([3], [1]), ([], [2])]
        assert resharded == [None] * 4


# ------------------------------------------------------------------ refused


def refused_options(rank, size):
    for options, sync, message in [
        ({"reshard_after_forwards": True}, "full-shard", "reshard_after_forward"),
        ({"forward_prefetch": -1}, "full-shard", "forward_prefetch=-1"),
        ({"backward_prefetch": True}, "full-shard", "backward_prefetch=True"),
        ({"offload_policy": "cpu"}, "full-shard", "offload_policy='cpu'"),
        ({"offload_policy": CPUOffloadPolicy()}, "full-shard", "CPUOffloadPolicy.pin_memory=True."),
        ({"output_dtype": torch.int32}, "full-shard", "output_dtype=torch.int32"),
        ({"cast_forward_inputs": 1}, "full-shard", "cast_forward_inputs=1"),
        ({"reshard_after_forward": 3}, "full-shard", "reshard_after_forward=3"),
        ({"reshard_after_forward": True}, "sharded", "does not use FSDP2"),
        ({}, "auto", "does not use FSDP2"),
    ]:
        with pytest.raises(UsageError, match=message):
            paceline.DataParallel(net(), sync=sync, fsdp_options=options)
    with pytest.raises(MismatchError, match="rank 1"):
        paceline.DataParallel(net(), sync="full-shard", fsdp_options={"forward_prefetch": rank})


def test_other_options_are_refused(pool):
    pool(2).run(refused_options)


def refused_meshes(rank, size):
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("between", "inside", "tensor"))
    others = {0: DeviceMesh("cpu", [[0, 1]]), 1: DeviceMesh("cpu", [[2, 3]])}
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    unsorted = DeviceMesh("cpu", [[1, 0], [2, 3]], mesh_dim_names=("replicate", "shard"))
    for sync in ("bucketed", "sharded", "full-shard", "auto"):
        with pytest.raises(
            UsageError, match=r"a device mesh of 3 axes \(2 × 2 × 1\) with axes between, inside"
        ):
            paceline.DataParallel(net(), sync=sync, group=cube)
        with pytest.raises(UsageError, match="not in the device mesh of ranks"):
            paceline.DataParallel(net(), sync=sync, group=others[1 - rank // 2])
    for sync in ("sharded", "full-shard"):
        with pytest.raises(UsageError, match=r"not in ascending order"):
            paceline.DataParallel(net(), sync=sync, group=unsorted)
    compressing = paceline.Sync(shard="optimizer", compression="int8")
    with pytest.raises(UsageError, match=r"on a device mesh of two axes \(2 × 2\)"):
        paceline.DataParallel(net(), sync=compressing, group=square)
    with pytest.raises(MismatchError, match="rank 3"):
        paceline.DataParallel(net(), sync="sharded", group=None if rank == 3 else square)
    slice_of_cube = cube["between", "inside"]
    model = paceline.DataParallel(net(), sync="sharded", group=slice_of_cube)
    assert (model.comm.size, model.comm.shards) == (4, 2)


def test_other_meshes_are_refused(pool):
    pool(4).run(refused_meshes)


def refused_dtensors(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"blocks.0.0": ColwiseParallel()}
    for sync in ("bucketed", "sharded", "full-shard", "auto"):
        parallel = parallelize_module(net(), mesh["tensor"], plan)
        with pytest.raises(
            UsageError, match=r"'blocks.0.0.weight' is a DTensor with placements \(S\(0\)\).*tensor"
        ):
            paceline.DataParallel(parallel, sync=sync, group=mesh["data"])
    bare = model_zoo.build("Plain")
    bare.register_buffer("scales", distribute_tensor(torch.ones(4), mesh["tensor"], [Shard(0)]))
    with pytest.raises(UsageError, match="buffer 'scales' is a DTensor"):
        paceline.DataParallel(bare, group=mesh["data"])


def test_parameters_of_tensor_parallelism_are_refused_by_name(pool):
    pool(4).run(refused_dtensors)
