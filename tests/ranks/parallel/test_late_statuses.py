"""What a round status that is read one step late reports, on simulated accelerators."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import nn

import model_zoo
import paceline
from paceline.errors import BackwardFailed, ReplicasDiverged, SyncError
from simulated_accelerator import simulated_world

LATE_FROM = 4
"""The first steps are read in time."""


class TwoHeads(nn.Module):
    """Uses its second layer on request."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, both=True):
        return self.first(x) + self.second(x) if both else self.first(x)


def trained(device, steps, sync="bucketed", **options):
    """Return a model and an optimizer after some ordinary steps."""
    model = paceline.DataParallel(TwoHeads().to(device), sync=sync, **options)
    optim = paceline.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(steps):
        step(model, optim)
    return model, optim


def step(model, optim, samples=4, both=True, call=None):
    x = torch.ones(4, 4, device=next(model.parameters()).device)
    loss = None if samples == 0 else model(x, both).square().mean()
    if call is None:
        model.backward(loss, samples=samples)
    else:
        call(loss)
    optim.step()
    optim.zero_grad()


def raised(action, *args, **kwargs):
    """Return type, step and first line of what `action` raises; None if it does not."""
    try:
        action(*args, **kwargs)
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, getattr(error, "step", None), str(error).splitlines()[0]
    return None


def a_rank_fails(rank, size, path):
    with simulated_world(rank, size, path, "sim:simccl"):
        model, optim = trained("sim", LATE_FROM)
        fails = (
            [lambda loss: model.backward(model_zoo.Explode.apply(loss), samples=4)] if rank == 1 else [None]
        )
        return [
            raised(step, model, optim, call=fails[0]),
            raised(step, model, optim),
            raised(step, model, optim),
        ]


def test_a_backward_that_fails_on_one_rank_ends_the_run_on_all_one_step_late(simulated_pool, tmp_path):
    first, second = simulated_pool(2).run(a_rank_fails, str(tmp_path / "store"), world=False)
    assert first[0] is None
    assert second[0] == ("FloatingPointError", None, "injected")
    for found in (first, second):
        assert found[1][:2] == (BackwardFailed.__name__, LATE_FROM)
        assert found[2][0] == SyncError.__name__
        assert f"the update of step {LATE_FROM} was wrong" in found[2][2]


def a_rank_of_a_sharded_model_fails(rank, size, path):
    with simulated_world(rank, size, path, "sim:simccl"):
        model, _ = trained("sim", LATE_FROM, "sharded")
        loss = model(torch.ones(4, 4, device="sim")).square().mean()
        first = raised(model.backward, model_zoo.Explode.apply(loss) if rank == 1 else loss, samples=4)
        return first, raised(model.backward, loss, samples=4) if rank == 1 else None


def test_a_rank_of_a_sharded_model_that_failed_goes_no_further(simulated_pool, tmp_path):
    path = str(tmp_path / "store")
    first, second = simulated_pool(2).run(a_rank_of_a_sharded_model_fails, path, world=False)
    assert first == (None, None)
    assert second[0] == ("FloatingPointError", None, "injected")
    assert second[1][0] == SyncError.__name__
    assert f"backward failed on this rank in step {LATE_FROM}" in second[1][2]


def ranks_mix_calls(rank, size, path):
    with simulated_world(rank, size, path, "sim:simccl"):
        model, optim = trained("sim", LATE_FROM)
        return [
            raised(step, model, optim, call=model.backward if rank == 1 else None),
            raised(step, model, optim),
        ]


def test_mixed_calls_are_found_one_step_late(simulated_pool, tmp_path):
    for found in simulated_pool(2).run(ranks_mix_calls, str(tmp_path / "store"), world=False):
        assert found[0] is None
        assert found[1][:2] == (SyncError.__name__, LATE_FROM)
        assert "ranks [1] called model.backward(loss)" in found[1][2]


def a_parameter_is_unused(rank, size, path, device, varies):
    with simulated_world(rank, size, path, "cpu:gloo,sim:simccl"):
        model, optim = trained(device, LATE_FROM, find_unused_parameters=varies)
        found = [raised(step, model, optim, both=False), raised(step, model, optim)]
        return found, [param.detach().cpu() for param in model.module.parameters()]


def test_other_used_parameters_are_an_error_one_step_late(simulated_pool, tmp_path):
    path = str(tmp_path / "store")
    for (first, second), _ in simulated_pool(2).run(a_parameter_is_unused, path, "sim", False, world=False):
        assert first is None
        assert second[:2] == (SyncError.__name__, LATE_FROM)
        assert "'second." in second[2]


def test_used_parameters_may_vary_where_that_is_said(simulated_pool, tmp_path):
    results = [
        simulated_pool(2).run(a_parameter_is_unused, str(tmp_path / device), device, True, world=False)
        for device in ("cpu", "sim")
    ]
    for (errors, expected), (none, found) in zip(*results, strict=True):
        assert errors == none == [None, None]
        assert all(map(torch.equal, found, expected))


def nobody_has_samples(rank, size, path, device):
    with simulated_world(rank, size, path, "cpu:gloo,sim:simccl"):
        model, optim = trained(device, LATE_FROM)
        before = [param.detach().cpu().clone() for param in model.module.parameters()]
        step(model, optim, samples=0)
        after = [param.detach().cpu().clone() for param in model.module.parameters()]
        counts = [model.samples]
        step(model, optim, samples=rank * 4)
        counts.append(model.samples)
        step(model, optim)
        found = [param.detach().cpu() for param in model.module.parameters()]
        return all(map(torch.equal, before, after)), counts, found


def test_rounds_in_which_ranks_have_no_samples(simulated_pool, tmp_path):
    results = [
        simulated_pool(2).run(nobody_has_samples, str(tmp_path / device), device, world=False)
        for device in ("cpu", "sim")
    ]
    for (same, counts, expected), (same_there, counts_there, found) in zip(*results, strict=True):
        assert same
        assert same_there
        assert counts == counts_there == [0.0, 4.0]
        assert all(map(torch.equal, found, expected))


def replicas_diverge(rank, size, path):
    with simulated_world(rank, size, path, "sim:simccl"):
        model, optim = trained("sim", LATE_FROM)
        model.engine.replica_check_every = 1
        if rank == 1:
            with torch.no_grad():
                model.module.first.bias.add_(1.0)
        return [raised(step, model, optim), raised(step, model, optim)]


def test_replicas_that_differ_are_named_one_step_late(simulated_pool, tmp_path):
    for found in simulated_pool(2).run(replicas_diverge, str(tmp_path / "store"), world=False):
        assert found[0] is None
        assert found[1][:2] == (ReplicasDiverged.__name__, LATE_FROM)
        assert "'first.bias'" in found[1][2]


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def fail_at_last(rank, how, folder):
    """Let the last step fail, and return what is raised by something else than a step."""
    model, optim = trained("sim", LATE_FROM)
    checkpoint = paceline.Checkpoint(folder, model, optim)
    call = (lambda loss: model.backward(model_zoo.Explode.apply(loss), samples=4)) if rank == 1 else None
    raised(step, model, optim, call=call)
    if how == "saved":
        return raised(checkpoint.save)
    if how == "evaluated":
        with torch.no_grad():
            return raised(model, torch.ones(1, 4, device="sim"))
    return raised(model.whole_parameters) if how == "exported" else None


def the_last_step_fails(rank, size, path, how, folder):
    log, kept = logging.getLogger("paceline.parallel"), Kept()
    with simulated_world(rank, size, path, "sim:simccl"):
        log.addHandler(kept)
        found = fail_at_last(rank, how, folder)
        gc.collect()
        log.removeHandler(kept)
    return found, kept.lines


@pytest.mark.parametrize("how", ["saved", "evaluated", "exported", "ended"])
def test_a_failure_of_the_last_step_is_not_lost(simulated_pool, tmp_path, how):
    folder = str(tmp_path / "checkpoints")
    found = simulated_pool(2).run(the_last_step_fails, str(tmp_path / "store"), how, folder, world=False)
    for error, lines in found:
        if how != "ended":
            assert error[:2] == (BackwardFailed.__name__, LATE_FROM)
        if how != "saved":  # which reads the status for good
            assert "backward raised an exception on rank 1" in lines[0]
