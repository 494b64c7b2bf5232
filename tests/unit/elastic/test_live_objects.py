"""What `Elastic` refuses before it begins, and that it changes nothing where no launcher recovers live."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from foreign_loaders import Countdown, make_loader
from mosaic_streaming import installed, streaming_base, streaming_ranks
from paceline.checkpoint.parts.named_objects import NamedObjects
from paceline.elastic.step_counter import StepCounter
from paceline.elastic.training_state import TrainingState
from paceline.errors import UsageError, WorldError


def check(*objects):
    TrainingState(NamedObjects.of(objects, {})).check()


def test_objects_that_would_lose_something_are_refused_by_name():
    check(paceline.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="not wrapped"):
        check(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="residuals"):
        check(paceline.DataParallel(nn.Linear(2, 2), sync=paceline.Sync(compression="int8")))
    with pytest.raises(UsageError, match="full-shard"):
        check(paceline.DataParallel(nn.Linear(2, 2), sync="full-shard"))
    check(paceline.Loader([1, 2], 1))
    with pytest.raises(UsageError, match="a share for each rank can't move"):
        check(paceline.Loader([1, 2], 1, shares=[1.0]))


LOADERS = ["StatefulDataLoader", "IterableDataset", "torchdata.nodes", "Countdown"]


def refuses(name, kind):
    return pytest.raises(UsageError, match=f"the loader {name!r}, a {kind}, which has no rejoin")


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_of_one_ranks_samples_is_refused_by_name(kind):
    if kind != "Countdown":
        pytest.importorskip("datasets" if kind == "IterableDataset" else "torchdata")
    loader = make_loader(kind, 0, 2)
    name = type(loader).__qualname__
    with refuses("loader", name) as error:
        check(loader)
    assert "paceline.Loader" in str(error.value)
    state = TrainingState(NamedObjects.of((), {}))
    state.add("before", loader)
    with refuses("before", name):
        state.check()
    state = TrainingState(NamedObjects.of((), {}))
    state.check()
    with refuses("after", name):
        state.add("after", loader)
    assert state.objects.others == {}


@pytest.mark.skipif(not installed(), reason="Mosaic's streaming is not installed")
def test_mosaics_loader_is_refused_whatever_its_batching_method(tmp_path):
    with streaming_base().MDSWriter(out=str(tmp_path / "shards"), columns={"x": "int"}) as writer:
        writer.write({"x": 1})
    with streaming_ranks(tmp_path / "locks") as streaming:
        data = streaming.StreamingDataset(
            local=str(tmp_path / "shards"), batch_size=1, batching_method="random"
        )
        with refuses("loader", "StreamingDataLoader"):
            check(streaming.StreamingDataLoader(data, batch_size=1))


def test_a_loader_that_deals_to_other_ranks_is_accepted():
    class Dealt(Countdown):
        def rejoin(self):
            self.skipped = 0

    check(Dealt(0))


def test_loaders_of_the_checkpoint_have_to_move(tmp_path):
    loader, model = paceline.Loader([1, 2], 1), paceline.DataParallel(nn.Linear(2, 2))
    state = TrainingState(NamedObjects.of((model, loader), {}))
    missing = pytest.raises(UsageError, match="without 'loader', a Loader: the checkpoint saves it, but")
    with paceline.Checkpoint(tmp_path, model, data=Countdown(0)) as checkpoint, refuses("data", "Countdown"):
        state.check(checkpoint)
    with paceline.Checkpoint(tmp_path, model, paceline.Loader([1, 2], 1)) as checkpoint, missing:
        state.check(checkpoint)
    with paceline.Checkpoint(tmp_path, model, loader) as checkpoint:
        state.check(checkpoint)
        for other in (
            Countdown(0),
            DataLoader([1, 2]),
        ):  # the second one has no state, but no rejoin() either
            with refuses("loader", type(other).__qualname__):
                next(checkpoint.resume(other))
        assert checkpoint.step == 0


def test_schedulers_of_the_checkpoint_have_to_move(tmp_path):
    model = paceline.DataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with paceline.Checkpoint(tmp_path, model, optimizer, scheduler) as checkpoint:
        TrainingState(NamedObjects.of((model, optimizer, scheduler), {})).check(checkpoint)
        with pytest.raises(UsageError, match="without 'scheduler', a StepLR: the checkpoint saves it, but"):
            TrainingState(NamedObjects.of((model, optimizer), {})).check(checkpoint)


def test_without_a_launcher_steps_are_counted_and_errors_pass():
    model = paceline.DataParallel(nn.Linear(2, 1))
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in model.parameters()]
    named = {f"optimizer{number}": each for number, each in enumerate(optimizers)}
    with paceline.Elastic(model, **named) as elastic:
        assert not elastic.active
        with elastic.attempt():
            for each in optimizers:
                each.step()
        with elastic.attempt():
            pass
        assert elastic.step == 1
        with pytest.raises(ZeroDivisionError), elastic.attempt():
            raise ZeroDivisionError
        with pytest.raises(WorldError, match="between the updates of 2 optimizers"), elastic.attempt():
            optimizers[0].step()


def test_attempts_in_two_places_are_refused_where_ranks_may_join(monkeypatch):
    elastic = paceline.Elastic(paceline.DataParallel(nn.Linear(2, 1)))
    monkeypatch.setattr(elastic, "_membership", object())
    for _ in range(2):
        elastic.attempt()
    with pytest.raises(UsageError, match=r"attempts in two places, .*test_live_objects\.py"):
        elastic.attempt()


def test_a_step_that_fails_again_and_again_ends_the_run():
    steps = StepCounter([], 3)
    for _ in range(20):
        steps.fail(RuntimeError("Connection reset by peer"))
    with pytest.raises(WorldError, match=r"step 3.*20 failures in a row.*reset by peer"):
        steps.fail(RuntimeError("Connection reset by peer"))
    steps.advance()
    steps.fail(RuntimeError("Connection reset by peer"))


def test_attempts_save_the_checkpoint_when_it_is_due(tmp_path):
    model = paceline.DataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with paceline.Checkpoint(tmp_path, model, optimizer, every=2) as checkpoint:
        with paceline.Elastic(model, optimizer, checkpoint=checkpoint) as elastic:
            while elastic.step < 5:
                with elastic.attempt():
                    optimizer.step()
        checkpoint.wait()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004"]
    assert paceline.Elastic(model, optimizer, checkpoint=checkpoint).step == 5


def test_a_step_that_is_given_up_leaves_nothing_behind():
    model = paceline.DataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), virtual_ranks=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = TrainingState(NamedObjects.of((model, optimizer, scheduler), {}))
    model.backward(model(torch.randn(4, 2)).square().mean(), samples=4)
    optimizer.step()
    optimizer.zero_grad()
    before = state.snapshot()
    buffers = {name: each.clone() for name, each in model.module.named_buffers()}
    reference, step = model.engine.weights.reference, model.engine.step
    model.backward(model(torch.randn(7, 2)).square().mean(), samples=7)
    optimizer.step()
    scheduler.step()
    state.give_up(before)
    assert all(torch.equal(each, buffers[name]) for name, each in model.module.named_buffers())
    assert (model.engine.weights.reference, model.engine.step) == (reference, step)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.last_epoch == 0
