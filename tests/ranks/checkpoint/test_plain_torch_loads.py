"""Checkpoints with ``format="dcp"`` loaded by plain torch, to the bit, on numbers of ranks of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import paceline
from same_states import difference

WIDTH = 6


class Net(nn.Module):
    """Weights of several shapes, of which one is frozen, and buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 11), nn.BatchNorm1d(11)
        self.conv = nn.Conv1d(1, 3, 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.last = nn.Linear(27, 1)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.conv(hidden[:, None])).flatten(1)) + self.frozen.sum()


def built(kind, sync, group=None):
    torch.manual_seed(0)
    net = Net().bfloat16() if kind == "master" else Net()
    model = paceline.DataParallel(net, sync=sync, group=group)
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.0625, "betas": (0.5, 0.75)}]
    optimizer = paceline.ShardedOptimizer(model, torch.optim.AdamW, groups, lr=0.125, amsgrad=True)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def save(rank, size, sync, axes, folder):
    """Train and save; rank 0 returns the whole state under the names of torch's state dicts."""
    paceline.init()
    mesh = None
    if axes == 2:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer, schedule = built("adamw", sync, mesh)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        model.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with paceline.Checkpoint(folder, model, optimizer, schedule, format="dcp") as checkpoint:
        checkpoint.save()
        weights = [param.detach().clone() for param in model.whole_parameters()]
        optimizer.consolidate_state_dict()
        checkpoint.wait()
    if rank:
        return None
    names = [name for name, _ in model.module.named_parameters()]
    whole = dict(zip(names, weights, strict=True)) | dict(model.module.named_buffers())
    return {
        "model": {name: whole[name] for name in model.module.state_dict()},
        "optimizer": named(optimizer, model, optimizer.state_dict()),
        "scheduler": schedule.state_dict(),
    }


def named(optimizer, model, packed):
    """Return a state in torch's format with the names of parameters in place of numbers."""
    name_of = {id(param): name for name, param in model.engine.named_parameters()}
    params = [name_of[id(param)] for group in optimizer.param_groups for param in group["params"]]
    state = {params[number]: entry for number, entry in packed["state"].items()}
    groups = [
        {**group, "params": [params[number] for number in group["params"]]}
        for group in packed["param_groups"]
    ]
    return {"state": state, "param_groups": groups}


PROGRAM = '''
"""A program that has nothing of Paceline: it loads with torch.distributed.checkpoint, and continues."""
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch import nn

WIDTH = 6

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 11), nn.BatchNorm1d(11)
        self.conv = nn.Conv1d(1, 3, 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.last = nn.Linear(27, 1)

    def forward(self, x):
        hidden = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.conv(hidden[:, None])).flatten(1)) + self.frozen.sum()

rank, size, store, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
mesh = init_device_mesh("cpu", (size,))
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
for folder in sys.argv[5:]:
    torch.manual_seed(99)
    net = Net()
    if how == "sharded":
        fully_shard(net, mesh=mesh)
    params = [param for param in net.parameters() if param.requires_grad]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 7.0, "betas": (0.9, 0.9)}]
    optimizer = torch.optim.AdamW(groups, lr=3.0, amsgrad=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    state = {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
        "scheduler": schedule.state_dict(),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(net, state["model"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    schedule.load_state_dict(state["scheduler"])
    found = {
        "model": get_model_state_dict(net, options=whole),
        "optimizer": get_optimizer_state_dict(net, optimizer, options=whole),
        "scheduler": schedule.state_dict(),
    }
    if rank == 0:
        torch.save(found, f"{folder}/../{size}-{how}.pt")
    net(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    schedule.step()
assert not [name for name in sys.modules if name.startswith("paceline")]
dist.destroy_process_group()
'''


def load_with_torch(tmp_path, folders, ranks, how):
    """Run the program on some ranks; return the whole state that it has after loading each of the checkpoints."""
    program, store = tmp_path / "program.py", tmp_path / "store"
    program.write_text(PROGRAM)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # which would import paceline, if it is installed
    children = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(ranks), store, how, *folders],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [child.communicate(timeout=200)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0] * ranks, "\n".join(errors)
    return [torch.load(folder.parent / f"{ranks}-{how}.pt", weights_only=False) for folder in folders]


def without_names(state):
    """Return a state whose groups list their parameters in one order."""
    groups = [{**group, "params": sorted(group["params"])} for group in state["optimizer"]["param_groups"]]
    return {**state, "optimizer": {**state["optimizer"], "param_groups": groups}}


SOURCES = [
    ("sharded", 1, 1), ("sharded", 2, 1), ("full-shard", 2, 1), ("sharded", 4, 1), ("full-shard", 4, 1),
    ("full-shard", 4, 2), ("bucketed", 2, 1), ("sharded", 4, 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """Checkpoints of all strategies, and the state that belongs to each."""
    found = []
    for source in SOURCES:
        sync, ranks, axes = source
        folder = tmp_path_factory.mktemp("run")
        state = pool(ranks).run(save, sync, axes, folder)[0]
        found.append((source, *folder.glob("step-*"), state))
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(("size", "how"), [(1, "whole"), (3, "sharded"), (2, "whole"), (2, "sharded")])
def test_plain_torch_loads_model_optimizer_and_scheduler(saved, tmp_path, size, how):
    states = load_with_torch(tmp_path, [folder for _, folder, _ in saved], size, how)
    for (source, _, expected), found in zip(saved, states, strict=True):
        assert difference(without_names(found), without_names(expected)) == "", source


@pytest.mark.parametrize("sync", ["sharded", "full-shard", "bucketed"])
def test_dcp_to_torch_save_makes_one_file(pool, tmp_path, sync):
    expected = pool(3).run(save, sync, 1, tmp_path / "run")[0]
    (folder,) = Path(tmp_path, "run").glob("step-*")
    dcp_to_torch_save(folder, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    assert difference(found["model"], expected["model"]) == ""
    Net().load_state_dict(found["model"])
    found = without_names({name: found[name] for name in expected})
    assert difference(found, without_names(expected)) == ""
