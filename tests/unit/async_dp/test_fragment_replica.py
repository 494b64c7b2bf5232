"""A worker's replica of a fragment: delta rule, overwriting, discarding."""

import pytest
import torch
from torch import nn

from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.worker.fragment_replica import FragmentReplica, FragmentState


def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, FragmentReplica]:
    net = nn.Linear(5, 4).to(dtype)
    (fragment,) = ParameterLayout.of(net).fragments
    replica = FragmentReplica(fragment, dict(net.named_parameters()), UpdateCodec(fragment, "fp32"))
    return net, replica


def weights(net: nn.Linear) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1).float() for param in (net.weight, net.bias)])


def learn(net: nn.Linear, by: float) -> None:
    with torch.no_grad():
        for param in net.parameters():
            param.add_(by)


def packed_update(replica: FragmentReplica) -> torch.Tensor:
    return torch.frombuffer(bytearray(replica.pack()), dtype=torch.float32)


def receive(replica: FragmentReplica, numbers: torch.Tensor, revision: int = 1) -> None:
    packing = UpdateCodec(replica.fragment, "fp32")
    replica.state = FragmentState.EXCHANGING
    replica.receive(revision, "fp32", packing.pack(numbers))


def test_the_delta_rule_keeps_steps_since_the_snapshot() -> None:
    net, replica = made()
    params = torch.linspace(-1, 1, 24)
    replica.snapshot()
    learn(net, 0.25)
    receive(replica, params)
    assert replica.state is FragmentState.RECEIVED
    replica.apply_received()
    torch.testing.assert_close(weights(net), params + 0.25)
    assert (replica.state, replica.revision) == (FragmentState.IDLE, 1)


def test_without_steps_since_the_snapshot_the_worker_has_exactly_the_global_parameters() -> None:
    net, replica = made()
    params = torch.randn(24, generator=torch.Generator().manual_seed(0))
    replica.snapshot()
    receive(replica, params)
    replica.apply_received()
    assert torch.equal(weights(net), params)


def test_the_next_update_has_all_steps_since_the_last_snapshot_and_none_twice() -> None:
    net, replica = made()
    replica.overwrite = True
    receive(replica, torch.zeros(24))
    replica.apply_received()
    learn(net, 1.0)
    replica.snapshot()
    first = packed_update(replica)
    learn(net, 0.5)  # while the update is under way
    receive(replica, torch.full((24,), 10.0))
    replica.apply_received()
    learn(net, 0.25)
    replica.snapshot()
    second = packed_update(replica)
    assert torch.equal(first, torch.full((24,), -1.0))
    assert torch.equal(second, torch.full((24,), -0.75))


def test_overwrite_drops_local_steps() -> None:
    net, replica = made()
    replica.snapshot()
    learn(net, 3.0)
    replica.overwrite = True
    receive(replica, torch.ones(24))
    replica.apply_received()
    assert torch.equal(weights(net), torch.ones(24))
    assert replica.overwrite is False


@pytest.mark.parametrize(("was_sent", "delta"), [(True, -0.5), (False, -1.5)])
def test_after_discarding_only_withheld_updates_are_sent_again(was_sent: bool, delta: float) -> None:
    net, replica = made()
    replica.overwrite = True
    receive(replica, torch.zeros(24))
    replica.apply_received()
    learn(net, 1.0)
    replica.snapshot()
    replica.sent = was_sent
    if was_sent:
        replica.pack()
    receive(replica, torch.full((24,), 9.0), revision=2)
    replica.discard_received()
    assert torch.equal(weights(net), torch.ones(24))
    learn(net, 0.5)
    replica.snapshot()
    assert torch.equal(packed_update(replica), torch.full((24,), delta))
    assert (replica.revision == 2) == was_sent


def test_swapping_twice_changes_nothing() -> None:
    net, replica = made()
    before = weights(net)
    replica.snapshot()
    receive(replica, torch.full((24,), 5.0))
    replica.swap_received()
    assert torch.equal(weights(net), torch.full((24,), 5.0))
    replica.swap_received()
    assert torch.equal(weights(net), before)
    replica.apply_received()
    torch.testing.assert_close(weights(net), torch.full((24,), 5.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_other_dtypes_are_sent_as_float32(dtype: torch.dtype) -> None:
    net, replica = made(dtype)
    replica.snapshot()
    learn(net, 0.5)
    receive(replica, torch.linspace(0, 2, 24))
    replica.apply_received()
    torch.testing.assert_close(weights(net), torch.linspace(0, 2, 24) + 0.5, rtol=1e-2, atol=1e-2)
