"""Converted checkpoints of several ranks: runs go on as if nothing had been converted; torch's FSDP2 loads them."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import paceline
from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.interop.convert import convert_checkpoint
from paceline.checkpoint.storage.local_folder import LocalFiles


class Uneven(nn.Module):
    """Dropout draws random numbers; 2 and 3 ranks can't divide the rows evenly."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.last(nn.functional.dropout(torch.tanh(self.first(x)), 0.25, self.training))


def build():
    torch.manual_seed(0)
    return Uneven().double()


@contextlib.contextmanager
def silent(total):
    yield lambda: None


class Job:
    """A training with compression residuals of each rank, a scheduler and a loader."""

    def __init__(self, folder, sync, container="paceline"):
        paceline.init()
        plan = sync if sync == "full-shard" else paceline.Sync(shard="optimizer", compression="int8")
        self.model = paceline.DataParallel(build(), sync=plan)
        self.optimizer = paceline.ShardedOptimizer(self.model, torch.optim.AdamW, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        data = torch.randn(60, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        self.loader = paceline.Loader(data, 2)
        objects = self.model, self.optimizer, self.scheduler, self.loader
        self.checkpoint = paceline.Checkpoint(folder, *objects, format=container)

    def run(self, steps, path=None):
        found = self.checkpoint.load(path)
        for batch in self.loader:
            self.model.backward(self.model(batch).square().mean(), samples=batch.samples)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            if self.checkpoint.step == steps:
                break
        self.checkpoint.save(wait=True)
        self.checkpoint.close()
        return found, [param.clone() for param in self.model.whole_parameters()]


def train(rank, size, folder, sync, container, steps, path=None):
    found, weights = Job(folder, sync, container).run(steps, path)
    return found and found.ranks, weights, torch.rand(1).item()


@pytest.mark.parametrize("sync", ["sharded", "full-shard"])
@pytest.mark.parametrize(("first", "to"), [("paceline", "dcp"), ("dcp", "paceline")])
def test_a_run_goes_on_from_a_converted_checkpoint_bit_by_bit(pool, tmp_path, sync, first, to):
    expected = pool(3, "paceline").run(train, tmp_path / "whole", sync, first, 3)
    pool(3, "paceline").run(train, tmp_path / "whole", sync, first, 6, tmp_path / "whole" / "step-00000003")
    converted = tmp_path / "converted" / "step-00000003"
    assert convert_checkpoint(tmp_path / "whole" / "step-00000003", converted, to, silent) == []
    again = tmp_path / "again"
    convert_checkpoint(converted, again, first, silent)
    expected = pool(3, "paceline").run(
        train, tmp_path / "a", sync, first, 6, tmp_path / "whole" / "step-00000003"
    )
    for path in (converted, again):
        found = pool(3, "paceline").run(train, tmp_path / f"on-{path.name}", sync, to, 6, path)
        for (ranks, weights, drawn), (_, theirs, also) in zip(found, expected, strict=True):
            assert ranks == 3
            assert all(map(torch.equal, weights, theirs))
            assert drawn == also
    fewer = pool(2, "paceline").run(train, tmp_path / "fewer", sync, to, 6, converted)
    assert [ranks for ranks, *_ in fewer] == [3, 3]


def load_with_torch(rank, size, path):
    """Load into a model and an optimizer of torch's, sharded by FSDP2; return their whole state."""
    net = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    for layer in (net.first, net.last, net):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=9.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {
        "model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer),
        "scheduler": scheduler.state_dict(),
    }  # fmt: skip
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(net, state["model"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = get_model_state_dict(net, options=whole)
    found = get_optimizer_state_dict(net, optimizer, options=whole)
    return model, found.get("state"), optimizer.param_groups[0]["lr"], state["scheduler"]["last_epoch"]


@pytest.mark.parametrize("sync", ["sharded", "full-shard"])
def test_torch_loads_a_converted_checkpoint_into_fsdp2(pool, tmp_path, sync):
    weights = pool(3, "paceline").run(train, tmp_path / "run", sync, "paceline", 3)[0][1]
    convert_checkpoint(tmp_path / "run", tmp_path / "x", "dcp", silent)
    model, state, lr, last_epoch = pool(2).run(load_with_torch, tmp_path / "x")[0]
    assert all(map(torch.equal, weights, model.values()))
    assert (lr, last_epoch) == (0.005, 3)
    reader = CheckpointReader(LocalFiles(tmp_path / "run" / "step-00000003"))
    for name, entries in state.items():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(entries[key], reader.tensor(f"optimizer.state.{name}.{key}"))
    reader.close()
