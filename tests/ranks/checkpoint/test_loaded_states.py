"""A state that was loaded and that no step has used yet, and other moments between loading and training."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from checkpoint_layouts import Layout, Training
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.errors import CheckpointError, UsageError
from same_states import difference


class Wave(nn.Module):
    """A complex weight, and a real one."""

    def __init__(self):
        super().__init__()
        self.wave = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.linear = nn.Linear(3, 5)

    def forward(self, x):
        return (self.linear(x) @ self.wave.abs()).square().mean()


def wrapped(net, sync, seed=0, **options):
    torch.manual_seed(seed)
    model = paceline.DataParallel(net(), sync=sync)
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, lr=0.125, foreach=False, **options)


def step(model, optimizer, count=1):
    for _ in range(count):
        model.backward(model(torch.ones(2, 3)))
        optimizer.step()
        optimizer.zero_grad()


def whole(model, optimizer):
    """Return all weights and, on rank 0, the whole state; a collective."""
    optimizer.consolidate_state_dict()
    weights = [param.detach().clone() for param in model.whole_parameters()]
    return weights, copy.deepcopy(optimizer.state_dict()) if model.comm.rank == 0 else {}


# ------------------------------------------------------------------ the state of complex parameters


def complex_parameters(rank, size, folder, sync, save):
    paceline.init()
    model, optimizer = wrapped(Wave, sync, seed=save)
    with paceline.Checkpoint(folder, model, optimizer) as checkpoint:
        if save:
            step(model, optimizer, 2)
            checkpoint.save(wait=True)
        else:
            assert checkpoint.load() is not None
    state = whole(model, optimizer)
    step(model, optimizer)
    return state


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sharded", "full-shard"), ("sharded", "bucketed"), ("full-shard", "bucketed"), ("bucketed", "full-shard"),
        ("full-shard", "sharded"), ("bucketed", "sharded"), ("full-shard", "full-shard"), ("sharded", "sharded"),
    ],
)  # fmt: skip
def test_complex_parameters_resume_with_another_strategy(pool, tmp_path, first, second):
    expected = pool(2).run(complex_parameters, tmp_path, first, True)[0]
    assert difference(pool(3).run(complex_parameters, tmp_path, second, False)[0], expected) == ""


# ------------------------------------------------------------------ not used yet


def two_trainings(folder, seed):
    objects = {}
    for at, names in enumerate((("one", "first"), ("two", "second"))):
        objects |= zip(names, wrapped(lambda: nn.Linear(3, 40), "sharded", seed + at), strict=True)
    return objects, paceline.Checkpoint(folder, keep=1, **objects)


def advance(model, optimizer, count=1):
    for _ in range(count):
        model.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()


def save_both(rank, size, folder):
    paceline.init()
    objects, checkpoint = two_trainings(folder, 0)
    advance(objects["one"], objects["first"], 2)
    advance(objects["two"], objects["second"], 2)
    checkpoint.save(wait=True)
    checkpoint.close()
    return whole(objects["two"], objects["second"])


def train_one(rank, size, folder, expected, damage):
    """Train one of two models after loading, so that checkpoints go by before the other's state is used."""
    paceline.init()
    objects, checkpoint = two_trainings(folder, 5)
    checkpoint.load()
    kept, problem = [], ""
    for _ in range(3):
        advance(objects["one"], objects["first"])
        checkpoint.save(wait=True)
        kept.append(names_when_idle(checkpoint, folder))
    if damage and rank == 0:
        Path(folder, "step-00000002", "state-rank3.safetensors").write_bytes(b"")
    torch.distributed.barrier()
    two, second = objects["two"], objects["second"]
    two.backward(two(torch.ones(2, 3)).square().mean())
    second.zero_grad()
    try:
        found = whole(two, second)
    except UsageError as error:
        problem = str(error)
    else:
        problem = difference(found, expected) if rank == 0 else ""
        checkpoint.step += 1
        checkpoint.save(wait=True)
        kept.append(names_when_idle(checkpoint, folder))
    checkpoint.close()
    return problem, kept


def names_when_idle(checkpoint, folder):
    """Return the steps of the checkpoints once old ones are removed, which no rank waits for."""
    checkpoint._writer.latest.join()
    torch.distributed.barrier()
    found = [int(name[5:]) for name in LocalFolder(folder).names()]
    torch.distributed.barrier()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_stays_until_its_state_is_read(pool, tmp_path, ranks):
    expected = pool(2).run(save_both, tmp_path)[0]
    spared = [2] if ranks > 1 else []  # one rank needs no layout
    for problem, kept in pool(ranks).run(train_one, tmp_path, expected, False):
        assert problem == ""
        assert kept == [[3, *spared], [4, *spared], [5, *spared], [6]]


def test_a_file_that_is_damaged_before_that_is_named_on_all_ranks(pool, tmp_path):
    """Not all of them read it."""
    expected = pool(4).run(save_both, tmp_path)[0]
    found = pool(3).run(train_one, tmp_path, expected, True)
    assert len({text for text, _ in found}) == 1
    assert "state-rank3.safetensors ended while it was read" in found[0][0]
    assert "load an intact checkpoint" in found[0][0]


def of_all_ranks(training, rank):
    """Return weights and states; ranks have buffers of their own, of which rank 0's are saved."""
    weights, _, states = training.state(rank)
    return weights, copy.deepcopy(states)


def several_times(rank, size, folder, sync):
    """Load, and look at the state in all ways that programs do, before any step."""
    paceline.init()
    training = Training("adamw", Layout(sync, size))
    training.train(2, rank)
    with training.checkpoint(folder) as checkpoint:
        checkpoint.save(wait=True)
    expected = of_all_ranks(training, rank)
    again = Training("adamw", Layout(sync, size), seed=3)
    problems = []
    with again.checkpoint(folder) as checkpoint:
        for _ in range(2):
            checkpoint.load()
            problems += [difference(of_all_ranks(again, rank), expected) for _ in range(2)]
            other = Training("adamw", Layout(sync, size), seed=4)
            other.model.load_state_dict(copy.deepcopy(again.model.state_dict()))
            for mine, theirs in zip(other.optims, again.optims, strict=True):
                mine.load_state_dict(copy.deepcopy(theirs.own_state_dict()))
            problems.append(difference(of_all_ranks(other, rank), expected))
    return [text for text in problems if text]


@pytest.mark.parametrize("sync", ["sharded", "full-shard", "bucketed"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loaded_state_is_the_same_however_it_is_looked_at(pool, tmp_path, sync, ranks):
    assert pool(ranks).run(several_times, tmp_path, sync) == [[]] * ranks


def consolidated_before_a_save(rank, size, folder, sync):
    """A whole state that was gathered on a rank is no part of what the rank writes."""
    paceline.init()
    training = Training("adamw", Layout(sync, size))
    training.train(2, rank)
    expected = of_all_ranks(training, rank)
    with training.checkpoint(folder) as checkpoint:
        checkpoint.save(wait=True)
    again = Training("adamw", Layout(sync, size), seed=3)
    with again.checkpoint(folder) as checkpoint:
        checkpoint.load()
    return difference(of_all_ranks(again, rank), expected)


@pytest.mark.parametrize("sync", ["sharded", "full-shard", "bucketed"])
def test_a_state_may_be_gathered_before_a_save(pool, tmp_path, sync):
    assert pool(2).run(consolidated_before_a_save, tmp_path, sync) == [""] * 2


def small_training(adds_group):
    """Return a model of small parameters, its optimizer of all or of the first ones, and the others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    model = paceline.DataParallel(net, sync="sharded")
    params = list(model.parameters())
    first, others = (params[:4], params[4:]) if adds_group else (params, [])
    return model, paceline.ShardedOptimizer(model, torch.optim.AdamW, first, lr=0.125), others


def own_shards_only(rank, size, folder, adds_group):
    """Save where each rank has only its own shards for the next step, some of which are whole parameters."""
    paceline.init()
    model, optimizer, others = small_training(adds_group)
    advance(model, optimizer, 2)
    _, expected = whole(model, optimizer)
    if adds_group:
        optimizer.add_param_group({"params": others})
    else:
        optimizer.load_state_dict(copy.deepcopy(optimizer.own_state_dict()))
    with paceline.Checkpoint(folder, model, optimizer) as checkpoint:
        checkpoint.save(wait=True)
    model, optimizer, others = small_training(adds_group)
    if adds_group:
        optimizer.add_param_group({"params": others})
    with paceline.Checkpoint(folder, model, optimizer) as checkpoint:
        checkpoint.load()
    _, found = whole(model, optimizer)
    return difference(found["state"], expected["state"]) if rank == 0 else ""


@pytest.mark.parametrize("adds_group", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_that_only_one_rank_has_are_saved(pool, tmp_path, ranks, adds_group):
    assert pool(ranks).run(own_shards_only, tmp_path, adds_group) == [""] * ranks


# ------------------------------------------------------------------ not changed


def unchanged(rank, size, folder, sync):
    """Try to load a checkpoint of which one rank finds a part damaged; return what has changed."""
    paceline.init()
    training = Training("adamw", Layout(sync, size))
    training.train(2, rank)
    with training.checkpoint(folder) as checkpoint:
        checkpoint.save(wait=True)
    if rank == 0:
        for path in Path(folder, "step-00000000").glob(f"*{size - 1}.safetensors"):
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    torch.distributed.barrier()
    training.train(1, rank)
    before = copy.deepcopy((training.model.state_dict(), [each.own_state_dict() for each in training.optims]))
    random = torch.get_rng_state()
    with training.checkpoint(folder) as checkpoint:
        try:
            checkpoint.load()
        except CheckpointError as error:
            text = str(error)
    after = training.model.state_dict(), [each.own_state_dict() for each in training.optims]
    assert torch.equal(torch.get_rng_state(), random)
    assert (checkpoint.step, checkpoint.resumed) == (0, None)
    return text, difference(after, before)


@pytest.mark.parametrize("sync", ["sharded", "full-shard", "bucketed"])
def test_a_damaged_only_checkpoint_changes_nothing(pool, tmp_path, sync):
    for text, changed in pool(2).run(unchanged, tmp_path, sync):
        assert "none of the 1 checkpoints" in text
        assert "wrong checksum of tensor" in text
        assert changed == ""
