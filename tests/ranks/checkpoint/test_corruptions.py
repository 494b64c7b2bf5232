"""Checkpoints of several ranks with a file damaged at random: the damage is found and named, and never loaded."""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import paceline
from checkpoint_layouts import Layout, Training
from paceline.checkpoint.format.manifest import CHECKSUM, MANIFEST
from paceline.checkpoint.newest_checkpoint import find_problem
from paceline.checkpoint.parts import model_weights
from paceline.checkpoint.storage.local_folder import LocalFolder
from paceline.errors import CheckpointError
from same_states import difference

OLD, NEW = "step-00000001", "step-00000002"


# ------------------------------------------------------------------ damage


def flip(data, rng, others):
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8


def zero(data, rng, others):
    at = rng.randrange(len(data))
    stop = rng.randint(at + 1, min(len(data), at + rng.choice([1, 64, 1 << 20])))
    data[at:stop] = bytes(stop - at)


def cut(data, rng, others):
    del data[rng.randrange(len(data)) :]


def extend(data, rng, others):
    data += rng.randbytes(rng.choice([1, 7, 4096]))


def shift(data, rng, others):
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.randint(1, 9))
    del data[-1]


def swap(data, rng, others):
    data[:] = rng.choice(others)


DAMAGES = [flip, zero, cut, extend, shift, swap, None]
"""Ways to change the bytes of a file, `others` being the contents of other files; None: it is removed."""


def damage(path, how, rng, others):
    """Damage a file; return whether it is another one now."""
    if how is None:
        path.unlink()
        return True
    before = path.read_bytes()
    data = bytearray(before)
    if data:
        how(data, rng, others)
    path.write_bytes(data)
    return bytes(data) != before


# ------------------------------------------------------------------ on the ranks


def save_two(rank, size, layout, format, folder):
    """Save two checkpoints, with the weights in several files; return nothing, but write the older whole state."""
    paceline.init()
    model_weights._MIN_PART_NBYTES, before = 256, model_weights._MIN_PART_NBYTES
    try:
        training = Training("adamw", layout)
        with training.checkpoint(folder, format=format, keep=5) as checkpoint:
            for step in (1, 2):
                training.train(1, rank)
                checkpoint.step = step
                checkpoint.save(wait=True)
                if step == 1:
                    state = copy.deepcopy(training.state(rank))
    finally:
        model_weights._MIN_PART_NBYTES = before
    if rank == 0:
        torch.save(state, Path(folder, "old.pt"))


def corrupt_many(rank, size, layout, pristine, scratch, seed, count):
    """Damage a file of the newest checkpoint `count` times, and load; return what went wrong."""
    paceline.init()
    rng, problems = random.Random(seed), []
    expected = torch.load(Path(pristine, "old.pt"), weights_only=False)
    training = Training("adamw", layout, seed=9)
    training.train(1, rank)
    contents = [path.read_bytes() for path in sorted(Path(pristine).glob("step-*/*"))]
    for number in range(count):
        only = number % 4 == 0
        folder = Path(scratch, str(number))
        if rank == 0:
            for name in [NEW] if only else [OLD, NEW]:
                shutil.copytree(Path(pristine, name), folder / name)
        dist.barrier()
        path = rng.choice(sorted(Path(pristine, NEW).iterdir()))
        how = rng.choice(DAMAGES)
        what = f"{number}: {path.name} {how.__name__ if how else 'removed'}"
        changed = [damage(folder / NEW / path.name, how, rng, contents) if rank == 0 else None]
        dist.broadcast_object_list(changed)
        if changed[0]:
            found = load_damaged(training, folder, rank, expected, only=only)
            named = MANIFEST if path.name == CHECKSUM and how is not None else path.name
            if rank == 0 and named not in (text := find_problem(LocalFolder(folder).files(NEW))):
                found = found or f"the damage is called {text!r}"
            problems += [f"{what}: {found}"] if found else []
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
    return problems


def load_damaged(training, folder, rank, expected, *, only):
    """Load from a folder whose newest, or only, checkpoint is damaged; return what is wrong with the result."""
    scramble(training, rank)
    before = own_state(training) if only else None
    with training.checkpoint(folder) as checkpoint:
        checkpoint._store.set_aside = lambda name: None  # it is verified later
        try:
            found = checkpoint.load()
        except CheckpointError as error:
            if not only:
                return f"the older checkpoint was not loaded: {error}"
            return difference(own_state(training), before, "changed") or (
                "" if "none of the 1 checkpoints" in str(error) else str(error)
            )
        finally:
            del checkpoint._store.set_aside
    if only or found is None:
        return "it was loaded"
    if (found.step, len(found.passed_over)) != (1, 1):
        return f"step {found.step} was loaded"
    weights, buffers, states = training.state(rank)
    return (
        difference(weights, expected[0], "weights")
        or difference(buffers, expected[1], "buffers")
        or (difference(states, expected[2], "states") if rank == 0 else "")
    )


def scramble(training, rank):
    """Change the weights, so that what was not loaded shows."""
    with torch.no_grad():
        for param in training.model.module.parameters():
            getattr(param, "_local_tensor", param).mul_(-1.5)
    training.train(1, rank)


def own_state(training):
    """Return a copy of all that a load changes on this rank."""
    return copy.deepcopy(
        (
            training.model.module.state_dict(),
            [each.own_state_dict() for each in training.optims],
            torch.get_rng_state(),
        )
    )


# ------------------------------------------------------------------ tests


CASES = [
    (Layout("sharded", 3), Layout("sharded", 2), 120),
    (Layout("full-shard", 2), Layout("bucketed", 1), 150),
    (Layout("bucketed", 3), Layout("sharded", 1), 150),
    (Layout("sharded", 4, 2), Layout("full-shard", 2), 100),
]
"""Layouts that write and that load, and the number of damages for each format: 1040 in all."""


def corrupt(pool, tmp_path, case, format, count, seed=3):
    source, target, _ = case
    pool(source.ranks).run(save_two, source, format, tmp_path / "pristine")
    found = pool(target.ranks).run(
        corrupt_many, target, tmp_path / "pristine", tmp_path / "scratch", seed, count, timeout=280
    )
    return [text for problems in found for text in problems]


@pytest.mark.thorough
@pytest.mark.parametrize("format", ["paceline", "dcp"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-on-{case[1]}")
def test_1000_damages_are_found_and_none_is_loaded(pool, tmp_path, case, format):
    assert corrupt(pool, tmp_path, case, format, case[2]) == []


@pytest.mark.parametrize("format", ["paceline", "dcp"])
def test_some_damages_are_found_and_none_is_loaded(pool, tmp_path, format):
    assert corrupt(pool, tmp_path, CASES[0], format, 12, seed=4) == []
