"""A backward that raises, or a lost rank: all ranks get an error, and training continues where possible."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch

import model_zoo
import paceline
from engine_cases import data, loss_on, wrapped
from model_zoo import max_difference
from paceline.errors import BackwardFailed, SyncError, UnsyncedGradients
from rank_pool import RankError, spawn


def fails_on(rank, size, sync, bad, plain):
    torch.manual_seed(3)
    model = paceline.DataParallel(model_zoo.Exploding().double(), sync=sync)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = data(rank, step)
        model.module.broken = broken = step == 2 and rank in bad
        loss = model_zoo.loss_of(model, "Exploding", x, y)
        if step == 2:
            run = loss.backward if plain else partial(model.backward, loss, samples=len(x))
            expected = FloatingPointError if broken else BackwardFailed
            message = "injected" if broken else rf"rank {bad[0]}.*exception on rank"
            with pytest.raises(expected, match=message) as caught:
                run()
            assert broken or caught.value.step == step
            if broken and plain:
                with pytest.raises(UnsyncedGradients, match="ended in an exception") as caught:
                    optim.step()
                assert caught.value.step == step
            optim.zero_grad()
            continue
        loss.backward() if plain else model.backward(loss, samples=len(x))
        optim.step()
        optim.zero_grad()
    reference = one_process_without_step_2(size)
    return max_difference(model.whole_parameters(), reference)


def counts_a_filler(rank, size, sync, plain):
    # Rank 1 runs dry after one step.
    loader = paceline.Loader(list(range(20)), batch_size=4, shares=[0.8, 0.2])
    model = paceline.DataParallel(torch.nn.Linear(1, 1), sync=sync)
    outcomes = []
    for batch in loader:
        loss = model(batch.float()[:, None]).mean()
        try:
            loss.backward() if plain else model.backward(loss)
            outcomes.append((None, ""))
        except SyncError as error:
            outcomes.append((type(error), str(error)))
        model.zero_grad()
    return outcomes


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("sync", ["naive", "bucketed", "sharded"])
def test_a_batch_without_samples_is_never_counted_as_one(pool, sync, plain):
    first, second = pool(2, "paceline").run(counts_a_filler, sync, plain)
    assert [kind for kind, _ in first] == [None, BackwardFailed, BackwardFailed, BackwardFailed]
    assert [kind for kind, _ in second] == [None, SyncError, SyncError, SyncError]
    for step, ((_, other_message), (_, own_message)) in enumerate(
        zip(first[1:], second[1:], strict=True), start=1
    ):
        assert f"[rank 1, step {step}] backward without samples=" in own_message
        assert "model.backward(loss, samples=batch.samples)" in own_message
        assert f"[rank 1, step {step}] backward raised an exception" in other_message


def one_process_without_step_2(size):
    model = model_zoo.build("Plain")
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in (0, 1, 3):
        parts = [data(rank, step) for rank in range(size)]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        model_zoo.loss_of(model, "Plain", x, y).backward()
        optim.step()
        optim.zero_grad()
    return list(model.parameters())


@pytest.mark.sweep
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("bad", [[0], [1], [0, 1, 2]])
@pytest.mark.parametrize("sync", ["naive", "flat", "overlap", "bucketed", "sharded"])
def test_an_exception_in_backward_is_named_and_training_continues(pool, sync, bad, plain):
    assert all(gap < 1e-12 for gap in pool(3).run(fails_on, sync, bad, plain))


def notified_rounds(rank, size, sync):
    """Return the rounds that this rank was notified of; backward raises on rank 1 in the second one."""
    model, rounds = paceline.DataParallel(model_zoo.Exploding().double(), sync=sync), []
    model.engine.on_round_end = rounds.append
    for step in range(3):
        model.module.broken = step == 1 and rank == 1
        try:
            model.backward(loss_on(model, rank, step, "Exploding"), samples=6)
        except (FloatingPointError, BackwardFailed):
            model.zero_grad()
    return rounds


@pytest.mark.parametrize("sync", ["bucketed", "sharded"])
def test_all_ranks_are_notified_of_the_same_rounds(pool, sync):
    """A notified rank may call collectives (`Timeline` compares clocks), so all ranks have to be notified."""
    assert pool(2).run(notified_rounds, sync) == [[1, 3]] * 2


def peer_gone(rank, size, folder, sync, while_clipping):
    paceline.init("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, size=size)
    model, optim = wrapped(sync)
    model.backward(loss_on(model, rank), samples=6)
    optim.step()
    optim.zero_grad()
    loss = loss_on(model, rank)
    if while_clipping:
        model.backward(loss, samples=6)
    if rank == 1:
        os._exit(3)
    with pytest.raises(SyncError, match="another rank ended or stopped answering"):
        model.clip_grad_norm_(1.0) if while_clipping else model.backward(loss, samples=6)
    (Path(folder) / "reported").touch()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("sync", "while_clipping"), [("bucketed", False), ("sharded", False), ("sharded", True)]
)
def test_a_rank_that_has_exited_is_an_error_that_names_it(tmp_path, sync, while_clipping):
    with pytest.raises(RankError) as caught:
        spawn(peer_gone, 2, str(tmp_path), sync, while_clipping)
    assert list(caught.value.failures) == [1]
    assert (tmp_path / "reported").exists()
