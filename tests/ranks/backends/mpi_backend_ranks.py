"""Program of the ranks of test_mpi_backend.py: ``python mpi_backend_ranks.py CASE``."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from test_backend_random import SUBGROUPS, messages, near, stream
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from backend_scenes import error_of
from mpi_worlds import report

STREAM, ROUNDS = 70, 10


def collectives(world):
    """Random collectives and messages, on groups of all and of some ranks."""
    SUBGROUPS.setdefault(1, [])
    made, on_gloo, _ = stream(world.rank, world.size, 70 + world.size, STREAM, "mpi4py", near)
    moved = messages(world.rank, world.size, 80 + world.size, ROUNDS, "mpi4py") if world.size > 1 else 0
    return {
        "made": made,
        "on_gloo": on_gloo,
        "moved": moved,
        "widened": widened(world),
        "disagree": disagree(world) if world.size > 1 else [],
        "ddp": ddp(world),
        "objects": objects(world),
        "allocated": dist.group.WORLD.supports_tensor_alloc(torch.device("cpu")),
        "name": dist.get_backend(),
    }


def widened(world):
    """Sums of 16-bit floats that would lose most in 16 bits, and more elements than are reduced at a time."""
    ranks = world.size
    for dtype in (torch.bfloat16, torch.float16):
        tensor = torch.full((1000,), 256.0 if world.rank == 0 else 0.25, dtype=dtype)
        dist.all_reduce(tensor)
        wanted = torch.tensor(256.0 + 0.25 * (ranks - 1)).to(dtype)
        assert tensor.eq(wanted).all(), tensor[:3]
    large = torch.ones((4 << 20) + 77, dtype=torch.bfloat16)
    dist.all_reduce(large, dist.ReduceOp.AVG)
    assert large.eq(1).all()
    return True


def disagree(world):
    """Calls that differ between ranks are refused by all, and the group stays usable."""
    texts = []
    calls = [
        [lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(5))],
        [lambda: dist.all_reduce(torch.ones(4)), lambda: dist.barrier()],
        [lambda: dist.broadcast(torch.ones(4), 0), lambda: dist.broadcast(torch.ones(4), 1)],
    ]
    size, rank = world.size, world.rank
    splits = [1] * size if rank else [2] * size  # rank 0 sends more than the others expect
    given, place = torch.ones(sum(splits)), torch.ones(size)
    calls.append([lambda: dist.all_to_all_single(place, given, [1] * size, splits)] * 2)
    calls.append([lambda: dist.send(torch.ones(2), (rank + 1) % size, tag=2**31 - 1)] * 2)
    calls.append([lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)] * 2)
    for each in calls:
        texts.append(": ".join(error_of(each[min(rank, 1)])))
        total = torch.full((3,), float(rank))
        dist.all_reduce(total)
        assert total.tolist() == [size * (size - 1) / 2] * 3, "the group stays usable"
    return texts


def ddp(world):
    """DistributedDataParallel over MPI trains like over gloo, and like one process with all data."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))
    gloo = dist.new_group(backend="gloo")
    nets = []
    for group in (None, gloo):
        net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))
        net.load_state_dict(plain.state_dict())
        nets.append(DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.0005))
    for step in range(5):
        data = torch.randn(world.size * 4, 6, generator=torch.Generator().manual_seed(step))
        mine = data[world.rank * 4 : world.rank * 4 + 4]
        for net, batch in zip((*nets, plain), (mine, mine, data), strict=True):
            net.zero_grad()
            net(batch).square().mean().backward()
            with torch.no_grad():  # as SGD would: the first optimizer of a process imports for a second
                for param in net.parameters():
                    param -= 0.1 * param.grad
    for over_mpi, over_gloo, alone in zip(*(net.parameters() for net in (*nets, plain)), strict=True):
        torch.testing.assert_close(over_mpi, over_gloo, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(over_mpi, alone, rtol=1e-5, atol=1e-6)
    dist.destroy_process_group(gloo)
    return True


def objects(world):
    """Features that torch builds on tensors: gathered objects, and the future of a message."""
    found = [None] * world.size
    dist.all_gather_object(found, {"rank": world.rank})
    if world.size > 1 and world.rank < 2:
        tensor = torch.full((3,), 7.0) if world.rank == 0 else torch.zeros(3)
        work = dist.isend(tensor, 1) if world.rank == 0 else dist.irecv(tensor, 0)
        assert work.get_future().wait()[0].tolist() == [7.0] * 3
        assert work.is_completed()
        called_back(world.rank)
    return [each["rank"] for each in found]


def called_back(rank):
    """The callback of a message may wait for it and send the next one."""
    place = torch.zeros(3)
    if rank == 0:
        dist.recv(place, 1)  # so that the message of rank 1 is still pending when it adds its callback
        dist.send(torch.ones(3), 1)
        dist.recv(place, 1)
        assert place.tolist() == [2.0] * 3
        return
    request = dist.irecv(place, 0)

    def answer(_):
        request.wait()
        dist.send(place + 1, 0)

    answered = request.get_future().then(answer)
    dist.send(torch.zeros(3), 0)
    answered.wait()


def late(world):
    """Rank 1 is missing: rank 0 reports it, and all ranks end."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))  # ranks may start further apart than this
    if world.rank == 1:
        time.sleep(600)  # longer than the test waits
    dist.all_reduce(torch.ones(3), group=group)


def raising(world):
    """Rank 1 raises while the others wait."""
    if world.rank == 1:
        raise ValueError("an error of the program")
    dist.all_reduce(torch.ones(3))


def unmatched(world):
    """A message of the wrong size is not lost silently, and one that is never received does not hang."""
    if world.rank == 0:
        dist.send(torch.ones(2), 1)
        dist.isend(torch.ones(1_000_000), 1)
    else:
        report(1, error_of(lambda: dist.recv(torch.ones(3), 0)))
        dist.irecv(torch.ones(5), 0, tag=7)
    dist.barrier()


def main():
    case = sys.argv[1]
    world = paceline.init("mpi4py", timeout=60)
    if case in ("late", "raising"):
        report(world.rank, os.getpid())
    result = globals()[case](world)
    if case == "collectives":
        report(world.rank, result)
    paceline.shutdown()


if __name__ == "__main__":
    main()
