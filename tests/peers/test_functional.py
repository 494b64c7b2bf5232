"""Other interfaces of collectives: functional ones, DTensor, objects, batches of messages, nested groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from both import max_difference, on_both, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def values(rank, rows, dtype=torch.float32):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank)).to(dtype)


def functional_collectives(group, rank, size, dtype):
    mine, long = values(rank, 4, dtype), values(rank, 2 * size, dtype)
    ring = [(each + 1) % size for each in range(size)]
    splits = [rank + 1] * size, [each + 1 for each in range(size)]
    outcomes = [
        functional.all_reduce(mine, "sum", group),
        functional.all_reduce(mine, "max", group),
        functional.all_gather_tensor(mine, 0, group),
        functional.all_gather_tensor(mine, 1, group),
        functional.reduce_scatter_tensor(long, "sum", 0, group),
        functional.broadcast(mine, size - 1, group),
        functional.all_to_all_single(long, None, None, group),
        functional.all_to_all_single(values(rank, sum(splits[1]), dtype), *splits, group),
        functional.permute_tensor(mine.flatten(), ring, group),
        *functional.all_reduce_coalesced([mine, long], "sum", group),
        *functional.all_gather_into_tensor_coalesced([mine, long], group),
        *functional.reduce_scatter_tensor_coalesced([long, 2 * long], "sum", [0, 0], group),
    ]
    return [functional.wait_tensor(outcome) for outcome in outcomes]


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_functional_collectives(pool, tmp_path, size, dtype):
    for ours, gloos in pool(size).run(on_both, str(tmp_path), functional_collectives, dtype, world=False):
        assert max_difference(ours, gloos) <= 1e-6


def gradients(group, rank, size):
    """Return the gradients through collectives."""
    mine, long = values(rank, 4).requires_grad_(), values(rank, 2 * size).requires_grad_()
    loss = (functional.all_gather_tensor_autograd(mine, 0, group) * values(9, 4 * size)).sum()
    loss = loss + functional.reduce_scatter_tensor_autograd(long, "sum", 0, group).square().sum()
    loss = loss + functional.all_to_all_single_autograd(long, None, None, group).square().sum()
    loss = loss + differentiable.all_reduce(mine, group=group).square().sum()
    loss.backward()
    return [mine.grad, long.grad]


def test_gradients_through_collectives(pool, tmp_path):
    for ours, gloos in pool(2).run(on_both, str(tmp_path), gradients, world=False):
        assert max_difference(ours, gloos) <= 1e-5


PLACEMENTS = [[Shard(0)], [Shard(1)], [Replicate()]]


def redistribute(rank, size, folder):
    """Return how far a DTensor is from the whole after every change of placement."""
    with world(rank, size, folder):
        mesh = init_device_mesh("cpu", (size,))
        whole = torch.randn(5, 7, generator=torch.Generator().manual_seed(5))
        gaps = []
        for before in PLACEMENTS:
            spread = distribute_tensor(whole, mesh, before)
            moved = [spread.redistribute(mesh, after).full_tensor() for after in PLACEMENTS]
            gaps += [max_difference([each], [whole]) for each in moved]
            summed = (spread @ spread.t()).redistribute(mesh, [Replicate()]).to_local()
            gaps.append(max_difference([summed], [whole @ whole.t()]))
        return max(gaps)


@pytest.mark.parametrize("size", [2, 3])
def test_dtensor_is_redistributed(pool, tmp_path, size):
    assert max(pool(size).run(redistribute, str(tmp_path), world=False)) <= 1e-5


def tensor_parallel(rank, size, folder):
    with world(rank, size, folder):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "model"))
        torch.manual_seed(1)
        whole = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        expected = whole(values(mesh["data"].get_local_rank(), 4))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallel = parallelize_module(whole, mesh["model"], plan)
        return max_difference([parallel(values(mesh["data"].get_local_rank(), 4))], [expected])


def test_tensor_parallel_layers_on_a_mesh_of_two_dimensions(pool, tmp_path):
    assert max(pool(4).run(tensor_parallel, str(tmp_path), world=False)) <= 1e-6


def objects(group, rank, size):
    mine = {"rank": rank, "text": "x" * (1000 * rank), "tensor": values(rank, 2).tolist()}
    gathered, received, shown = [None] * size, [None], [mine, rank] if rank == 1 else [None, None]
    dist.all_gather_object(gathered, mine, group=group)
    at_root = [None] * size if rank == 0 else None
    dist.gather_object(mine, at_root, dst=0, group=group)
    dist.broadcast_object_list(shown, src=1, group=group)
    dist.scatter_object_list(received, list(range(size)) if rank == 0 else None, src=0, group=group)
    passed = [None]
    if rank == 0:
        dist.send_object_list([mine], dst=1, group=group)
    elif rank == 1:
        dist.recv_object_list(passed, src=0, group=group)
    return gathered, at_root, shown, received, passed


def test_objects(pool, tmp_path):
    for ours, gloos in pool(3).run(on_both, str(tmp_path), objects, world=False):
        assert ours == gloos


def messages(group, rank, size, dtype):
    """Exchange with both neighbours in a ring, in one batch, with long and short messages and tags."""
    after, before = (rank + 1) % size, (rank - 1) % size
    incoming = [torch.empty(shape, dtype=dtype) for shape in ((300_000,), (0, 2), (2, 2), ())]
    outgoing = [torch.full_like(each, rank) for each in incoming]
    ops = [dist.P2POp(dist.irecv, each, before, group, tag) for tag, each in enumerate(incoming)]
    ops += [dist.P2POp(dist.isend, outgoing[tag], after, group, tag) for tag in (2, 0, 3, 1)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return incoming


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex64, torch.bfloat16])
def test_batches_of_messages(pool, tmp_path, dtype):
    results = pool(3).run(on_both, str(tmp_path), messages, dtype, world=False)
    for rank, (ours, gloos) in enumerate(results):
        assert ours[0].eq((rank - 1) % 3).all()
        assert max_difference(ours, gloos) == 0.0


def views(rank, size, folder):
    """Return received views: transposed, lazily negated, with gaps, repeated; and values received into such views."""
    with world(rank, size, folder):
        plain = torch.arange(8).view(2, 4) * (1 + 1j) * (rank + 1)
        sent = [plain.t(), plain.conj().imag, plain[:, ::2], plain.real[:1].expand(3, 4)]
        gathered = [[torch.zeros(each.shape, dtype=each.dtype) for _ in range(size)] for each in sent]
        for places, each in zip(gathered, sent, strict=True):
            dist.all_gather(places, each)
        received = [torch.zeros(each.shape[::-1], dtype=each.dtype).t() for each in sent]
        for place, each in zip(received, sent, strict=True):
            works = dist.irecv(place, 1 - rank), dist.isend(each, 1 - rank)
            for work in works:
                work.wait()
        return sent, gathered, received


def test_views_are_sent_as_their_elements(pool, tmp_path):
    results = pool(2).run(views, str(tmp_path), world=False)
    for rank, (_, gathered, received) in enumerate(results):
        for source, (sent, _, _) in enumerate(results):
            assert all(torch.equal(places[source], each) for places, each in zip(gathered, sent, strict=True))
        assert all(map(torch.equal, received, results[1 - rank][0]))


def groups(rank, size, folder):
    """Return the sums over groups of every kind, and the resources left after they are destroyed."""
    with world(rank, size, folder):
        found = {}
        for name, ranks in (("pair", [2, 0]), ("alone", [1]), ("rest", [1, 3]), ("turned", [3, 2, 1, 0])):
            group = dist.new_group(ranks)
            if rank in ranks:
                tensor = torch.tensor([rank + 1.0])
                dist.all_reduce(tensor, group=group)
                found[name] = tensor.item()
                dist.destroy_process_group(group)
        halves, _ = dist.new_subgroups(2)
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=halves)
        dist.barrier()
        return found | {"half": tensor.item()}


def test_groups_of_some_ranks(pool, tmp_path):
    assert pool(4).run(groups, str(tmp_path), world=False) == [
        {"pair": 4.0, "turned": 10.0, "half": 3.0},
        {"alone": 2.0, "rest": 6.0, "turned": 10.0, "half": 3.0},
        {"pair": 4.0, "turned": 10.0, "half": 7.0},
        {"rest": 6.0, "turned": 10.0, "half": 7.0},
    ]
