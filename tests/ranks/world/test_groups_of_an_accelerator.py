"""Groups that serve an accelerator alone, named or not, on the simulated device: control messages and training."""

from __future__ import annotations

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.checkpoint.parts.state_parts import TensorPart
from paceline.checkpoint.state_copies import HostBuffers
from paceline.errors import MismatchError
from paceline.parallel.buckets.bucket_builder import build_buckets
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.strategy import Sync
from paceline.world import accelerator
from paceline.world.control_collectives import (
    barrier,
    broadcast_text,
    gather_texts,
    sum_over_ranks,
    verify_same,
)
from paceline.world.value_collectives import broadcast_value, gather_values
from simulated_accelerator import simulated_device, simulated_world

STEPS = 3


@contextlib.contextmanager
def world(rank, size, path, backend):
    """A world of simulated devices; without a backend's name torch makes one for the device alone."""
    default = mock.patch.dict(dist.Backend.default_device_backend_map, {"sim": "simccl"})
    with default, simulated_world(rank, size, path, backend) as simulator:
        yield simulator


def control_messages(rank, size, path, backend):
    with world(rank, size, path, backend):
        names = dist.get_backend(), Comm().backend, Comm().stream_ordered
        verify_same(["alike"], "this")
        with pytest.raises(MismatchError, match="rank 1 has 1"):
            verify_same([str(rank)], "this")
        barrier()
        assert gather_texts("x" * rank) == ["", "x"]
        assert broadcast_text(f"rank {rank}") == "rank 0"
        assert sum_over_ranks(torch.tensor([rank + 1.0])).tolist() == [3.0]
        assert broadcast_value({"rank": rank}, 1) == {"rank": 1}
        assert [each["x"].tolist() for each in gather_values({"x": torch.tensor([rank])})] == [[0], [1]]
        assert Comm().largest(rank, torch.device("cpu")) == 1
        assert Comm().broadcast_ints([[rank]], torch.device("cpu")) == [[0]]
        return names


@pytest.mark.parametrize("backend", [None, "simccl", "sim:simccl"])
def test_control_messages(simulated_pool, tmp_path, backend):
    found = simulated_pool(2).run(control_messages, str(tmp_path / "store"), backend, world=False)
    assert found == 2 * [(backend or "undefined", "simccl", True)]


def train(rank, size, path, backend, sync):
    """Return the parameters after some steps."""
    with world(rank, size, path, backend):
        torch.manual_seed(5)
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).to("sim")
        model = paceline.DataParallel(net, sync=sync)
        optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        for step in range(STEPS):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to("sim")
            model.backward(model(x).square().mean(), samples=4)
            optim.step()
            optim.zero_grad()
        return [param.detach().cpu() for param in model.whole_parameters()]


def alone():
    """Return the parameters that one process gets from the samples of both ranks."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        parts = [
            torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in (0, 1)
        ]
        net(torch.cat(parts)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return [param.detach() for param in net.parameters()]


@pytest.mark.parametrize("sync", ["bucketed", "sharded", "full-shard"])
def test_training_without_a_name_of_a_backend(simulated_pool, tmp_path, sync):
    for params in simulated_pool(2).run(train, str(tmp_path / "store"), None, sync, world=False):
        torch.testing.assert_close(params, alone())


def status_of_no_slots(rank, size, path, backend):
    """Exchange a round status as when FSDP2 has every parameter."""
    with world(rank, size, path, backend):
        comm = Comm()
        (bucket,) = build_buckets([], [], Sync(), comm, status_length=3, sharded=False, reduce_dtype=None)
        bucket.status.fill_(rank + 1.0)
        comm.all_reduce(bucket.flat).wait()
        return bucket.flat.device.type, bucket.status.tolist()


@pytest.mark.parametrize(
    ("backend", "device"), [(None, "sim"), ("sim:simccl", "sim"), ("cpu:gloo,sim:simccl", "cpu")]
)
def test_the_round_status_where_every_parameter_is_sharded(simulated_pool, tmp_path, backend, device):
    found = simulated_pool(2).run(status_of_no_slots, str(tmp_path / "store"), backend, world=False)
    assert found == 2 * [(device, [3.0, 3.0, 3.0])]


def entered_by_paceline(rank, size, path, **arguments):
    default = mock.patch.dict(dist.Backend.default_device_backend_map, {"sim": "simccl"})
    with simulated_device(rank), default:
        entered = paceline.init(init_method=f"file://{path}", rank=rank, size=size, **arguments)
        try:
            assert gather_texts(str(rank)) == ["0", "1"]
            x = torch.full((3,), rank + 1.0, device=entered.device)
            dist.all_reduce(x)
            assert x.tolist() == [3.0] * 3
            return entered.device, entered.backend
        finally:
            paceline.shutdown()


@pytest.mark.parametrize("arguments", [{"device": "sim:0"}, {"device": "sim:0", "backend": "simccl"}])
def test_init_enters_a_world_of_the_accelerator(simulated_pool, tmp_path, arguments):
    run = partial(entered_by_paceline, **arguments)
    assert simulated_pool(2).run(run, str(tmp_path / "store"), world=False) == 2 * [("sim:0", "simccl")]


def copies_for_a_checkpoint(rank, size):
    with simulated_device(rank):
        x = torch.arange(5.0).to("sim") * 2
        copies = HostBuffers().copy({"file": {"x": TensorPart.whole("x", x)}}).files
        return copies["file"]["x"].data.tolist(), accelerator.find_accelerator()


def test_a_checkpoint_copies_what_the_accelerator_has_computed(simulated_pool):
    (found,) = simulated_pool(1).run(copies_for_a_checkpoint, world=False)
    assert found == ([0.0, 2.0, 4.0, 6.0, 8.0], "sim")
