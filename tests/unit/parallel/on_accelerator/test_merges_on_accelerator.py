"""Merges of local SGD on an accelerator: flags, learning rates and results without the host reading them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from paceline.parallel.compression.packet_header import PacketHeader
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.local_sgd.model_fragment import ModelFragment
from paceline.parallel.local_sgd.outer_optimizers import Averaging, Nesterov, SlowMomentum
from paceline.parallel.local_sgd.sync_result import CopiedResult, DeviceResult, RankFlag, SyncResult
from simulated_accelerator import simulated_device

HEADERS = {
    "all count": [PacketHeader(3.0, 0, 0.1), PacketHeader(0.7, 0, 0.25), PacketHeader(11.0, 0, 1e-3)],
    "one is left out": [PacketHeader(3.0, 0, 0.1), PacketHeader(0.0, RankFlag.REJECTED, 0.25)],
    "none counts": [PacketHeader(0.0, RankFlag.REJECTED, 0.1), PacketHeader(0.0, RankFlag.CHANGED, 0.2)],
}


@pytest.mark.parametrize("name", HEADERS)
def test_the_device_finds_in_headers_what_the_host_finds(name):
    expected = SyncResult.of(HEADERS[name])
    with simulated_device() as simulator:
        device = torch.device("sim")
        rows = torch.stack([header.row(device) for header in HEADERS[name]])
        finite = torch.ones(2, dtype=torch.bool, device="sim")
        found = DeviceResult.of(rows)
        copied = CopiedResult(rows, finite)
        assert simulator.synchronisations == []
        assert copied.read() == (expected, [True, True])
        assert (bool(found.counts), float(found.inner_lr)) == (expected.counts, expected.inner_lr)


def test_a_result_that_is_not_waited_for_is_not_there():
    for seed in range(5):
        with simulated_device(seed):
            rows = torch.stack([header.row(torch.device("sim")) for header in HEADERS["all count"]])
            copied = CopiedResult(rows, torch.ones(2, dtype=torch.bool, device="sim"))
            copied._arrived = mock.Mock()
            with pytest.raises(ValueError, match="NaN"):
                copied.read()


@pytest.mark.parametrize("inner_lr", [0.3, 0.0])
def test_slow_momentum_takes_a_learning_rate_from_the_device(inner_lr):
    outer = SlowMomentum(0.9, 0.5)
    theta, gradient, momentum = torch.randn(3, 1003).unbind()
    with simulated_device() as simulator:
        on_device = [each.to("sim") for each in (theta, gradient, momentum)]
        rate = torch.tensor(inner_lr, dtype=torch.float64).to("sim")
        simulator.synchronisations.clear()
        outer.update(*on_device, rate)
        assert simulator.synchronisations == []
        outer.update(theta, gradient.clone(), momentum, inner_lr)
        for one, other in zip((theta, momentum), (on_device[0], on_device[2]), strict=True):
            assert torch.equal(one, other.cpu())


def merged(device, outer, weight, bad):
    """Return θ, the outer momentum and the parameter after two merges of a world of one."""
    torch.manual_seed(2)
    param = torch.nn.Parameter(torch.randn(40).to(device))
    fragment = ModelFragment([("w", param)], Comm(), None, None, outer=outer, delta_rule=True, piece_numel=64)
    for step in range(2):
        with torch.no_grad():
            param.add_(torch.randn(40).to(device))
            if bad and step:
                param[3] = torch.inf
        given = torch.full((), weight, dtype=torch.float64).to(device)
        fragment.send(given, torch.full((), 0.25, dtype=torch.float64).to(device))
        with torch.no_grad():
            param.add_(1.0)
        yield fragment
        fragment.wait(read=False)
        fragment.merge(outer, 0.25)
    momentum = [] if fragment.momentum is None else [fragment.momentum.cpu()]
    yield [fragment.theta.cpu(), *momentum, param.detach().cpu()]


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not finite"])
@pytest.mark.parametrize("weight", [3.0, 0.0])
@pytest.mark.parametrize(
    "outer", [Averaging(), Nesterov(), SlowMomentum()], ids=lambda each: type(each).__name__
)
def test_a_world_of_one_merges_without_waiting(outer, weight, bad):
    *_, expected = merged("cpu", outer, weight, bad)
    with simulated_device() as simulator:
        merging = merged("sim", outer, weight, bad)
        next(merging)
        simulator.run_all()
        waits = len(simulator.synchronisations)
        assert waits, "values were copied to the device"
        *_, found = merging
        kinds = [wait.kind for wait in simulator.synchronisations[waits:]]
    assert set(kinds) <= {"copy to device", "copy to host"}, "of the test itself"
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "not finite"])
def test_a_pending_mean_is_saved_and_merged_after_loading(bad):
    outer = SlowMomentum()
    *_, expected = merged("cpu", outer, 3.0, bad)
    with simulated_device():
        merging = merged("sim", outer, 3.0, bad)
        next(merging)
        saved = next(merging)  # the second exchange is pending
        state, own = saved.state(), saved.rank_state()
        fresh = next(merged("sim", outer, 3.0, bad=False))
        fresh.load(state, own)
        result = fresh.wait(read=False)
        assert result is not None, "it was read when it was saved"
        assert result.rejected == ((0,) if bad else ())
        fresh.merge(outer, 0.25)
        found = [fresh.theta, fresh.momentum, dict(fresh.params)["w"].detach()]
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other.cpu())
