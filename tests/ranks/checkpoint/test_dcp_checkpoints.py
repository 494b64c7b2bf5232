"""Checkpoints that plain torch.distributed.checkpoint wrote: resumed to the bit on any number of ranks and strategy."""

from __future__ import annotations

import logging
import random
import re
import struct

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import paceline
from paceline.checkpoint.format.checkpoint_reader import CheckpointReader
from paceline.checkpoint.interop.dcp_reader import DcpReader
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.storage.local_folder import LocalFiles
from paceline.errors import DamagedCheckpoint, UsageError

READERS = [
    (1, "bucketed"), (1, "sharded"), (2, "sharded"), (2, "full-shard"), (3, "bucketed"), (3, "sharded"),
    (3, "full-shard"),
]  # fmt: skip
ENTRIES = ("exp_avg", "exp_avg_sq", "step")


class Uneven(nn.Module):
    """Rows that 2 and 3 ranks can't divide evenly, a persistent buffer, a scalar."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale


def build():
    torch.manual_seed(0)
    return Uneven().double()


def batch(step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(model, optimizer, scheduler, steps):
    for step in steps:
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def wrapped(net, how):
    """Return the net as a program of torch's wraps it."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    hybrid = how == "hsdp"
    shape, axes = ((2, 2), ("replicate", "shard")) if hybrid else ((dist.get_world_size(),), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    for layer in (net.first, net.last, net):
        fully_shard(layer, mesh=mesh)
    return net


def write(rank, size, path, how, form):
    """Train three steps with torch alone and save; return the whole weights and state of the optimizer."""
    model = wrapped(build(), how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    train(model, optimizer, scheduler, range(3))
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, expected = (
        get_model_state_dict(model, options=whole),
        get_optimizer_state_dict(model, optimizer, options=whole),
    )
    scheduled = {"lr_scheduler": scheduler, "train_state": {"step": torch.tensor(3)}, "rng": {"seed": 7}}
    if form == "raw":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **scheduled}
    elif form == "flattened":  # as torchtitan saves
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
        state = {**get_model_state_dict(model), "optimizer": optimizer_state, **scheduled}
    else:
        state = {
            "app": {
                "model": get_model_state_dict(model),
                "optim": get_optimizer_state_dict(model, optimizer),
                **scheduled,
                "lr_scheduler": scheduler.state_dict(),
            }
        }
    if form == "async":
        dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, checkpoint_id=path)
    return weights, expected.get("state"), scheduler.state_dict()


def read(rank, size, folder, target, sync, path=None):
    """Load into Paceline's objects, save in Paceline's format, and make one more step; return what is seen."""
    paceline.init()
    model = paceline.DataParallel(build(), sync=sync)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=9.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    with paceline.Checkpoint(folder, model, optimizer, scheduler, format="dcp", keep=1) as checkpoint:
        resumed = checkpoint.load(path)
    lr, step, schedule = optimizer.param_groups[0]["lr"], checkpoint.step, scheduler.state_dict()
    with paceline.Checkpoint(target, model, optimizer, scheduler) as copy:
        copy.step = step
        copy.save(wait=True)
    train(model, optimizer, scheduler, range(3, 5))
    after = [param.clone() for param in model.whole_parameters()]
    return resumed.step, resumed.ranks, step, lr, schedule, after


def continued():
    """Return the parameters of five steps in one process, with torch alone."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    train(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), range(5))
    return list(model.parameters())


def bits_equal(one, other):
    return one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.parametrize(
    ("ranks", "how", "form"),
    [
        (2, "ddp", "raw"),
        (2, "ddp", "flattened"),
        (2, "fsdp", "app"),
        (3, "fsdp", "flattened"),
        (3, "fsdp", "async"),
        (2, "fsdp", "raw"),
        (4, "hsdp", "app"),
    ],
)
def test_checkpoints_of_torch_are_resumed_to_the_bit(pool, tmp_path, ranks, how, form):
    weights, states, scheduled = pool(ranks).run(write, tmp_path / "run" / "step-3", how, form)[0]
    expected = continued()
    for number, (size, sync) in enumerate(READERS):
        target = tmp_path / f"copy{number}"
        seen = pool(size).run(read, tmp_path / "run", target, sync)
        for step, writers, counted, lr, schedule, after in seen:
            assert (step, counted, lr) == (3, 3, 0.005)
            assert writers == ranks
            assert schedule["last_epoch"] == scheduled["last_epoch"]
            assert (schedule["step_size"], schedule["gamma"]) == (2, 0.5)
            for ours, theirs in zip(after, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
        reader = CheckpointReader(LocalFiles(target / "step-00000003"))
        for name, tensor in weights.items():
            assert bits_equal(reader.tensor(f"model.{name}"), tensor), (sync, size, name)
        for name, state in states.items():
            for entry in ENTRIES:
                saved = reader.tensor(f"optimizer.state.{name}.{entry}")
                assert bits_equal(saved, state[entry]), (sync, size, name, entry)
        reader.close()


def one_rank_is_refused(rank, size, folder):
    """Only rank 1 needs the damaged record: all ranks skip the checkpoint together."""
    paceline.init()
    model = paceline.DataParallel(build(), sync="full-shard")
    optimizer = paceline.ShardedOptimizer(model, torch.optim.AdamW)
    before = [param.clone() for param in model.whole_parameters()]
    checkpoint = paceline.Checkpoint(folder, model, optimizer)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("paceline.checkpoint").addHandler(handler)
    try:
        step = checkpoint.load().step
    except (DamagedCheckpoint, UsageError) as error:
        assert all(map(torch.equal, before, model.whole_parameters()))
        step = str(error)
    finally:
        logging.getLogger("paceline.checkpoint").removeHandler(handler)
        checkpoint.close()
    return step, lines


def test_a_damaged_shard_is_skipped_on_all_ranks(pool, tmp_path):
    for step in (3, 10):
        pool(2).run(write, tmp_path / f"step-{step}", "fsdp", "app")
    file = tmp_path / "step-10" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    for header in re.finditer(
        rb"PK\x03\x04.{26}archive/data/0", bytes(data), re.DOTALL
    ):  # of a tensor's bytes
        data[header.start() + 30 + sum(struct.unpack_from("<HH", data, header.start() + 26))] ^= 16
    file.write_bytes(data)
    results = pool(2).run(one_rank_is_refused, tmp_path)
    assert [step for step, _ in results] == [3, 3]
    assert any("skipped" in line and "__1_0.distcp: wrong checksum of" in line for line in results[0][1])
    assert (tmp_path / "step-10.damaged").is_dir()


def goes_on(rank, size, folder, path):
    """Begin from another program's checkpoint, save, and resume the own one."""
    paceline.init()
    model = paceline.DataParallel(build(), sync="sharded")
    optimizer = paceline.ShardedOptimizer(model, torch.optim.AdamW)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with paceline.Checkpoint(folder, model, optimizer, scheduler, keep=1) as checkpoint:
        found = checkpoint.load() or checkpoint.load(path)
        train(model, optimizer, scheduler, range(found.step, found.step + 1))
        checkpoint.save(wait=True)
    return found.step, checkpoint.step


def test_a_run_goes_on_from_another_programs_checkpoint_and_then_from_its_own(pool, tmp_path):
    theirs = tmp_path / "theirs" / "last"
    pool(2).run(write, theirs, "ddp", "flattened")
    assert pool(2).run(goes_on, tmp_path / "own", theirs) == [(3, 4)] * 2
    assert pool(3).run(goes_on, tmp_path / "own", theirs) == [(4, 5)] * 3
    assert theirs.is_dir()


def test_checkpoints_of_another_program_in_the_folder_are_never_removed(pool, tmp_path):
    for step in (1, 3):
        pool(2).run(write, tmp_path / f"step-{step}", "ddp", "raw")
    for step in (3, 4, 5):
        assert pool(2).run(goes_on, tmp_path, None) == [(step, step + 1)] * 2
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-1", "step-3", "step-00000006"}


def write_grid(rank, size, path):
    """Save tensors that a mesh of 2 x 2 ranks shards in rows and columns; return them whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    generator = torch.Generator().manual_seed(5)
    whole = {
        "both": torch.randn(5, 7, generator=generator), "columns": torch.randn(3, 5, 2, generator=generator),
        "pairs": torch.randn(4, 3, generator=generator, dtype=torch.complex64),
    }  # fmt: skip
    placed = {"both": (Shard(0), Shard(1)), "columns": (Replicate(), Shard(1)), "pairs": (Shard(1), Shard(0))}
    state = {name: distribute_tensor(tensor, mesh, placed[name]) for name, tensor in whole.items()}
    dcp.save({"model": state}, checkpoint_id=path)
    return whole


def test_boxes_across_shards_of_rows_and_columns(pool, tmp_path):
    whole = pool(4).run(write_grid, tmp_path / "x")[0]
    reader = DcpReader(LocalFiles(tmp_path / "x"))
    assert len(reader.index.tensors["model.both"].chunks) == 4
    assert len(reader.index.tensors["model.columns"].chunks) == 2
    chance = random.Random(7)
    for _ in range(60):
        name = chance.choice(list(whole))
        starts = [chance.randrange(size) for size in whole[name].shape]
        sizes = [chance.randint(1, size - at) for at, size in zip(starts, whole[name].shape, strict=True)]
        box = Box(tuple(starts), tuple(sizes))
        expected = whole[name][box.index_in(Box.whole(whole[name].shape))]
        assert torch.equal(reader.tensor(f"model.{name}", box), expected)
    reader.verify()
    reader.close()
