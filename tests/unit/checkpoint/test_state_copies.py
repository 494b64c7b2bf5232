"""Copies of the state that the writing thread completes: of the moment of the save, or the checkpoint is given up."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint.state_copies import StateCopy


class Run:
    """A model whose weights and optimizer state are large enough to be copied later, and its checkpoints.

    Attributes:
        hold: cleared: the writing thread does not begin to copy.
    """

    def __init__(self, folder, monkeypatch, **options):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(256, 128), nn.BatchNorm1d(128))
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.checkpoint = paceline.Checkpoint(folder, self.net, self.optim, **options)
        self.hold = threading.Event()
        self.hold.set()
        self.order: list[str] = []
        finish = StateCopy.finish

        def held(copy):
            self.hold.wait()
            finish(copy)
            self.order.append("copied")

        monkeypatch.setattr(StateCopy, "finish", held)

    def step(self):
        self.net(torch.randn(8, 256)).square().sum().backward()
        self.optim.step()
        self.optim.zero_grad()
        self.order.append("stepped")

    def state(self):
        moments = [value.clone() for state in self.optim.state.values() for value in state.values()]
        return [*(each.detach().clone() for each in self.net.state_dict().values()), *moments]

    def loaded(self):
        """Return the state that the newest checkpoint restores, and close."""
        self.checkpoint.close()
        with paceline.Checkpoint(self.checkpoint.folder, self.net, self.optim) as checkpoint:
            assert checkpoint.load() is not None
            return checkpoint.step, self.state()


@pytest.fixture
def run(tmp_path, monkeypatch):
    made = Run(tmp_path / "run", monkeypatch)
    yield made
    made.hold.set()
    made.checkpoint.close()


def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_step_waits_for_the_copy_and_the_checkpoint_has_the_state_of_the_save(run):
    run.step()
    run.checkpoint.save(wait=True)  # finds out, at the next step, whether copying can wait
    run.step()
    run.hold.clear()
    run.order.clear()
    expected = run.state()
    run.checkpoint.save()
    run.net(torch.randn(8, 256))  # the running statistics change: they were copied at once
    threading.Timer(0.2, run.hold.set).start()
    run.step()
    assert run.order == ["copied", "stepped"]
    step, found = run.loaded()
    assert step == 2
    assert same(found, expected)


def test_the_first_save_of_a_run_is_copied_at_once(run):
    run.step()
    run.hold.clear()
    expected = run.state()
    run.checkpoint.save()
    run.step()
    assert run.order == ["stepped", "stepped"]
    run.hold.set()
    step, found = run.loaded()
    assert step == 1
    assert same(found, expected)


@pytest.mark.parametrize("write", ["data", "numpy", "state"])
def test_a_checkpoint_is_given_up_if_the_program_changes_the_state_in_between(run, caplog, write):
    for _ in range(2):
        run.step()
        run.checkpoint.save(wait=True)
    complete = run.checkpoint.newest_step
    run.step()
    run.hold.clear()
    run.checkpoint.save()
    weight = run.net[0].weight
    if write == "data":
        weight.data[3, 4] += 1
    elif write == "numpy":
        weight.detach().numpy()[3, 4] += 1
    else:
        run.optim.state[weight]["exp_avg"][3, 4] += 1
    run.hold.set()
    run.checkpoint.wait()
    assert run.checkpoint.newest_step == complete == 2
    (warning,) = [record.getMessage() for record in caplog.records]
    name = "optimizer.state.0.weight.exp_avg" if write == "state" else "model.0.weight"
    assert f"the program changed '{name}' between save() and the next step" in warning

    run.step()  # from now on everything is copied at once
    run.hold.clear()
    expected = run.state()
    run.checkpoint.save()
    weight.data[3, 4] += 1
    run.step()
    run.hold.set()
    step, found = run.loaded()
    assert step == 4
    assert same(found, expected)


def test_a_program_that_always_writes_between_steps_loses_no_checkpoint(run, caplog):
    for step in range(1, 4):
        run.step()
        run.hold.clear()
        expected = run.state()
        run.checkpoint.save()
        run.net[0].weight.data.clamp_(-0.01, 0.01)
        run.hold.set()
        run.checkpoint.wait()
        assert run.checkpoint.newest_step == step
    assert not caplog.records
    _, found = run.loaded()
    assert same(found, expected)


def test_loading_waits_for_the_copy(run):
    run.step()
    run.checkpoint.save(wait=True)
    run.step()
    run.checkpoint.save(wait=True)
    run.step()
    run.hold.clear()
    run.checkpoint.save()
    threading.Timer(0.2, run.hold.set).start()
    run.checkpoint.load()  # writes to the weights
    run.checkpoint.wait()
    assert run.checkpoint.newest_step == 3


def test_without_an_optimizer_everything_is_copied_at_once(tmp_path, monkeypatch):
    weight = nn.Linear(256, 128)
    hold = threading.Event()
    finish = StateCopy.finish
    monkeypatch.setattr(StateCopy, "finish", lambda copy: (hold.wait(), finish(copy)))
    with paceline.Checkpoint(tmp_path / "run", weight) as checkpoint:
        for step in range(1, 4):
            checkpoint.step = step
            hold.clear()
            expected = weight.weight.detach().clone()
            checkpoint.save()
            weight.weight.data.add_(1)
            hold.set()
            checkpoint.wait()
        checkpoint.load()
    assert torch.equal(weight.weight, expected)


def test_state_that_was_replaced_does_not_stay_in_memory(run):
    """A copy refers to the tensors only until it is complete."""
    run.step()
    run.checkpoint.save(wait=True)
    run.step()
    run.checkpoint.save(wait=True)
    copy = run.checkpoint._writer.latest._copy
    assert copy._steady == []
