"""A fragment on a worker's side: the delta rule, the whole, and what is declined."""

import pytest
import torch
from torch import nn

from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.worker.fragment_replica import FragmentReplica, FragmentState


def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, FragmentReplica]:
    net = nn.Linear(5, 4).to(dtype)
    (fragment,) = ParameterLayout.of(net).fragments
    side = FragmentReplica(fragment, dict(net.named_parameters()), UpdateCodec(fragment, "fp32"))
    return net, side


def weights(net: nn.Linear) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1).float() for param in (net.weight, net.bias)])


def learn(net: nn.Linear, by: float) -> None:
    with torch.no_grad():
        for param in net.parameters():
            param.add_(by)


def offered(side: FragmentReplica) -> torch.Tensor:
    return torch.frombuffer(bytearray(side.pack()), dtype=torch.float32)


def arrive(side: FragmentReplica, numbers: torch.Tensor, revision: int = 1) -> None:
    packing = UpdateCodec(side.fragment, "fp32")
    side.state = FragmentState.OUT
    side.arrive(revision, "fp32", packing.pack(numbers))


def test_the_delta_rule_keeps_what_was_learnt_meanwhile() -> None:
    net, side = made()
    centre = torch.linspace(-1, 1, 24)
    side.snapshot()
    learn(net, 0.25)
    arrive(side, centre)
    assert side.state is FragmentState.READY
    side.take()
    torch.testing.assert_close(weights(net), centre + 0.25)
    assert (side.state, side.revision) == (FragmentState.HERE, 1)


def test_without_steps_in_between_the_worker_has_exactly_the_centre() -> None:
    net, side = made()
    centre = torch.randn(24, generator=torch.Generator().manual_seed(0))
    side.snapshot()
    arrive(side, centre)
    side.take()
    assert torch.equal(weights(net), centre)


def test_the_next_update_has_all_steps_since_the_last_snapshot_and_none_twice() -> None:
    net, side = made()
    side.whole = True
    arrive(side, torch.zeros(24))
    side.take()
    learn(net, 1.0)
    side.snapshot()
    first = offered(side)
    learn(net, 0.5)  # while the update is under way
    arrive(side, torch.full((24,), 10.0))
    side.take()
    learn(net, 0.25)
    side.snapshot()
    second = offered(side)
    assert torch.equal(first, torch.full((24,), -1.0))
    assert torch.equal(second, torch.full((24,), -0.75))


def test_the_whole_drops_what_was_learnt() -> None:
    net, side = made()
    side.snapshot()
    learn(net, 3.0)
    side.whole = True
    arrive(side, torch.ones(24))
    side.take()
    assert torch.equal(weights(net), torch.ones(24))
    assert side.whole is False


@pytest.mark.parametrize(("was_offered", "delta"), [(True, -0.5), (False, -1.5)])
def test_after_declining_only_what_was_withheld_is_offered_again(was_offered: bool, delta: float) -> None:
    net, side = made()
    side.whole = True
    arrive(side, torch.zeros(24))
    side.take()
    learn(net, 1.0)
    side.snapshot()
    side.offered = was_offered
    if was_offered:
        side.pack()
    arrive(side, torch.full((24,), 9.0), revision=2)
    side.decline()
    assert torch.equal(weights(net), torch.ones(24))
    learn(net, 0.5)
    side.snapshot()
    assert torch.equal(offered(side), torch.full((24,), delta))
    assert (side.revision == 2) == was_offered


def test_swapping_twice_changes_nothing() -> None:
    net, side = made()
    before = weights(net)
    side.snapshot()
    arrive(side, torch.full((24,), 5.0))
    side.swap()
    assert torch.equal(weights(net), torch.full((24,), 5.0))
    side.swap()
    assert torch.equal(weights(net), before)
    side.take()
    torch.testing.assert_close(weights(net), torch.full((24,), 5.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_other_precision_are_kept_as_float32_on_the_way(dtype: torch.dtype) -> None:
    net, side = made(dtype)
    side.snapshot()
    learn(net, 0.5)
    arrive(side, torch.linspace(0, 2, 24))
    side.take()
    torch.testing.assert_close(weights(net), torch.linspace(0, 2, 24) + 0.5, rtol=1e-2, atol=1e-2)
