"""Wrapping a model: ranks are made equal, groups train separately, invalid arguments are refused by name."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import model_zoo
import paceline
from engine_cases import ALL, loss_on, same_on_all_ranks
from model_zoo import max_difference
from paceline.errors import MismatchError, SyncError, UsageError
from rank_pool import RankError


def different_models(rank, size, what):
    torch.manual_seed(rank)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 4 + (what == "shape" and rank == 2)), torch.nn.BatchNorm1d(4)
    )
    if what == "order" and rank == 1:
        net = torch.nn.Sequential(net[1], net[0])
    if what == "dtype" and rank == 1:
        net.half()
    if what == "frozen" and rank == 2:
        net[0].weight.requires_grad_(False)
    paceline.DataParallel(net, sync="flat" if what == "plan" and rank == 1 else "bucketed")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("shape", r"rank 2.*'0.weight': shape \[4, 4\].*'0.weight': shape \[5, 4\]"),
        ("order", r"rank 1.*parameter '0.weight': shape \[4, 4\].*parameter '0.weight': shape \[4\]"),
        ("dtype", r"rank 1.*'0.weight'.*float32.*float16"),
        ("frozen", r"rank 2.*'0.weight'.*frozen"),
        ("plan", r"rank 1.*sync plan"),
    ],
)
def test_ranks_with_different_models_get_the_parameter_and_the_rank(pool, what, message):
    with pytest.raises(RankError) as caught:
        pool(3).run(different_models, what)
    assert isinstance(caught.value.cause, MismatchError)
    assert len(caught.value.failures) == 3
    assert re.search(message, str(caught.value.cause), re.DOTALL)


def values_after_wrapping(rank, size, sync):
    torch.manual_seed(rank)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1, dtype=torch.bfloat16)
    )
    net[1].running_mean.fill_(rank + 1)
    model = paceline.DataParallel(net, sync=sync)
    whole = model.whole_parameters()
    return same_on_all_ranks(whole), same_on_all_ranks(list(net.buffers())), net[1].running_mean[0].item()


@pytest.mark.parametrize("sync", ALL)
def test_parameters_and_buffers_come_from_rank_0(pool, sync):
    assert pool(2).run(values_after_wrapping, sync) == [(True, True, 1.0)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce_dtype": torch.int32}, "reduce_dtype=torch.int32 is no floating-point dtype"),
        ({"reduce_dtype": "float32"}, "reduce_dtype='float32'"),
        ({"sync": "full-shard", "gather_dtype": torch.int8}, "gather_dtype=torch.int8"),
        ({"sync": ["bucketed"]}, "unknown strategy"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        paceline.DataParallel(torch.nn.Linear(2, 2).bfloat16(), **options)


@pytest.mark.parametrize("wrap", [paceline.DataParallel, list], ids=["twice", "a list"])
def test_only_a_bare_module_is_accepted(wrap):
    with pytest.raises(UsageError, match=r"pass the bare torch\.nn\.Module"):
        paceline.DataParallel(wrap(torch.nn.Sequential(torch.nn.Linear(1, 1))))


def test_a_loss_that_is_no_tensor_is_refused():
    with pytest.raises(UsageError, match="the loss is a float, not a tensor"):
        paceline.DataParallel(torch.nn.Linear(1, 1)).backward(0.5, samples=1)


def test_overlap_is_yes_or_no():
    with pytest.raises(UsageError, match="overlap='no'"):
        paceline.Sync(overlap="no")


def test_sparse_embeddings_are_refused_by_name():
    net = torch.nn.ModuleDict({"words": torch.nn.Embedding(5, 2, sparse=True)})
    with pytest.raises(UsageError, match=r"'words.weight' has sparse gradients"):
        paceline.DataParallel(net)


def functional_sparse(rank, size):
    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(5, 2))

        def forward(self, index):
            return torch.nn.functional.embedding(index, self.table, sparse=True)

    model = paceline.DataParallel(Words())
    with pytest.raises(SyncError, match="'table' has a sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()


def test_sparse_gradients_are_refused_by_name(pool):
    pool(2).run(functional_sparse)


def in_two_groups(rank, size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = paceline.DataParallel(
        model_zoo.build("Plain", seed=rank // 2), sync="sharded", group=groups[rank // 2]
    )
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model.backward(loss_on(model, rank), samples=6)
    optim.step()
    reference = model_zoo.build("Plain", seed=rank // 2)
    first = rank // 2 * 2
    sum(loss_on(reference, r) / 2 for r in (first, first + 1)).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    return max_difference(model.whole_parameters(), reference.parameters())


def test_groups_of_ranks_train_separately(pool):
    assert all(gap < 1e-13 for gap in pool(4).run(in_two_groups))


def outside_the_group(rank, size):
    group = dist.new_group([0])
    if rank == 1:
        for wrap in (
            lambda net: paceline.DataParallel(net, group=group),
            lambda net: paceline.DataParallel(net, group=[0]),
        ):
            with pytest.raises(UsageError, match="is no process group that this process is in"):
                wrap(model_zoo.build("Plain"))


def test_a_rank_outside_the_group_is_refused(pool):
    pool(2).run(outside_the_group)


def along_a_mesh_axis(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    model = paceline.DataParallel(model_zoo.build("Plain"), group=mesh["data"])
    model.backward(loss_on(model, rank), samples=6)
    return model.comm.size, model.samples


def test_the_data_axis_of_a_device_mesh_is_a_group(pool):
    assert pool(4).run(along_a_mesh_axis) == [(2, 12.0)] * 4


def foreign_unit(rank, size):
    with pytest.raises(UsageError, match="unit Linear is not a submodule"):
        paceline.DataParallel(model_zoo.build("Plain"), sync="full-shard", units=[torch.nn.Linear(2, 2)])


def test_units_must_be_submodules(pool):
    pool(2).run(foreign_unit)


def train_in_worlds(rank, size, folder):
    """Train on a later group of one world, then on all ranks of a second one; return each parameter's group and sum."""
    found = []
    for number in range(2):
        paceline.init("paceline", init_method=f"file://{folder}/{number}", rank=rank, size=size, timeout=60)
        group = [dist.new_group() for _ in range(3)][-1] if number == 0 else None
        torch.manual_seed(0)
        model = paceline.DataParallel(torch.nn.Linear(4, 4), sync="full-shard", group=group)
        model.backward(model(torch.ones(2, 4)).mean(), samples=2)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        of_params = {param.device_mesh.get_group() for param in model.module.parameters()}
        found.append(
            (of_params == {group or dist.group.WORLD}, [w.sum().item() for w in model.whole_parameters()])
        )
        paceline.shutdown()
    return found


def test_a_model_of_a_second_world_uses_its_group(pool, tmp_path):
    for first, second in pool(2).run(train_in_worlds, tmp_path, world=False):
        assert first[0]
        assert second[0]
        assert first[1] == second[1]
