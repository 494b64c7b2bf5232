"""State of a run on two axes: saved once per part, resumed on one axis and back, also under another strategy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import model_zoo
import paceline
from model_zoo import max_difference
from paceline.checkpoint.parts.boxes import Box
from paceline.checkpoint.parts.optimizer_parts import collect_optimizer
from paceline.checkpoint.parts.state_parts import StateParts

ADAMW = {"lr": 0.02, "weight_decay": 0.05}
SAMPLES = 18
TOLERANCE = 1e-12


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, model_zoo.WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64)


def built(sync, size):
    """Return a model and its optimizer, on 2 × 2 ranks where there are four, else along one axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if size == 4 else None
    model = paceline.DataParallel(model_zoo.build("Plain"), sync=sync, group=mesh)
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, **ADAMW)


def train(model, optim, rank, size, steps):
    for step in steps:
        x, y = (side.tensor_split(size)[rank] for side in batch(step))  # unequal on 4 ranks
        model.backward(model_zoo.loss_of(model, "Plain", x, y), samples=len(x))
        optim.step()
        optim.zero_grad()


def one_process(steps):
    model = model_zoo.build("Plain")
    optim = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in steps:
        model_zoo.loss_of(model, "Plain", *batch(step)).backward()
        optim.step()
        optim.zero_grad()
    return model, optim


def part_of_a_run(rank, size, folder, sync, until):
    """Continue from the checkpoint, if there is one, to step `until`, and save; return the gap to one process."""
    model, optim = built(sync, size)
    with paceline.Checkpoint(folder, model, optim) as checkpoint:
        checkpoint.load()
        train(model, optim, rank, size, range(checkpoint.step, until))
        checkpoint.save(wait=True)
    return max_difference(model.whole_parameters(), one_process(range(until))[0].parameters())


@pytest.mark.parametrize(
    ("backend", "strategies"),
    [
        ("paceline", ["sharded"] * 4),
        ("gloo", ["full-shard"] * 4),
        ("gloo", ["sharded", "full-shard", "bucketed", "full-shard"]),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_a_checkpoint_fits_one_axis_and_two(pool, tmp_path, backend, strategies):
    gaps = []
    for number, (size, sync) in enumerate(zip([4, 2, 3, 4], strategies, strict=True)):
        gaps += pool(size, backend).run(part_of_a_run, tmp_path / "run", sync, 2 * number + 2)
    assert max(gaps) <= TOLERANCE


def boxes_of(rank, size, sync):
    model, optim = built(sync, size)
    train(model, optim, rank, size, range(2))
    names = {id(param): name for name, param in model.engine.named_parameters()}
    parts = StateParts(rank)
    collect_optimizer("optimizer", optim, names, parts, size)
    found = [part for file in parts.files.values() for part in file.values()]
    return [(part.name, part.box) for part in found if part.name.endswith("exp_avg")]


@pytest.mark.parametrize("sync", ["sharded", "full-shard"])
def test_each_part_is_saved_by_one_replica(pool, sync):
    found = [each for boxes in pool(4).run(boxes_of, sync) for each in boxes]
    for name, param in model_zoo.build("Plain").named_parameters():
        covered = torch.zeros(param.shape)
        for each, box in found:
            if each == f"optimizer.state.{name}.exp_avg":
                covered[box.index_in(Box.whole(param.shape))] += 1
        assert covered.eq(1).all()


def consolidated(rank, size, sync):
    model, optim = built(sync, size)
    train(model, optim, rank, size, range(2))
    optim.consolidate_state_dict(to=2)
    state = optim.state_dict()
    expected = one_process(range(2))[1].state_dict()
    if rank != 2:
        return 0.0
    pairs = [
        (mine["exp_avg_sq"], theirs["exp_avg_sq"])
        for mine, theirs in zip(state["state"].values(), expected["state"].values(), strict=True)
    ]
    return max_difference(*zip(*pairs, strict=True))


@pytest.mark.parametrize("sync", ["sharded", "full-shard"])
def test_the_whole_state_is_that_of_the_plain_optimizer(pool, sync):
    assert max(pool(4).run(consolidated, sync)) <= TOLERANCE


def carried_over(rank, size, sync):
    """Go on with a second model that has loaded the shards of its own rank only."""
    model, optim = built(sync, size)
    train(model, optim, rank, size, range(2))
    other, loaded = built(sync, size)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    loaded.load_state_dict(copy.deepcopy(optim.state_dict()))
    train(model, optim, rank, size, range(2, 4))
    train(other, loaded, rank, size, range(2, 4))
    return max_difference(model.whole_parameters(), other.whole_parameters())


@pytest.mark.parametrize("sync", ["sharded", "full-shard"])
def test_each_rank_loads_its_own_shards(pool, sync):
    assert max(pool(4, "paceline").run(carried_over, sync)) <= TOLERANCE
