"""Outer optimizers that merge one arrival at a time, compared with torch's and with the formulas."""

import pytest
import torch

from paceline.async_dp.hub.hub_settings import HubOptimizer
from paceline.async_dp.hub.update_merging import MergedFragment
from paceline.errors import UsageError


def fragment_of(outer: HubOptimizer, numbers: list[float], trained: int | None = None) -> MergedFragment:
    theta = torch.tensor(numbers)
    return MergedFragment(theta, len(numbers) if trained is None else trained, outer)


def test_averaging_moves_by_the_weighted_update() -> None:
    one = fragment_of(HubOptimizer("averaging"), [1.0, 2.0])
    one.merge(torch.tensor([0.4, -0.8]), 0.25, 4)
    assert one.theta.tolist() == pytest.approx([0.9, 2.2])
    assert one.revision == 1


def test_n_arrivals_from_the_same_parameters_give_the_workers_mean() -> None:
    workers = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    one = fragment_of(HubOptimizer("averaging"), [0.0] * 7)
    for worker in workers:
        one.merge(-worker, 1 / 5, 5)
    torch.testing.assert_close(one.theta, workers.mean(0))


def test_delayed_nesterov_with_one_worker_is_torch_sgd_with_nesterov() -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(9, generator=generator)
    param = torch.nn.Parameter(start.clone())
    theirs = torch.optim.SGD([param], lr=0.7, momentum=0.9, nesterov=True)
    ours = MergedFragment(start.clone(), 9, HubOptimizer("delayed-nesterov", 0.7, 0.9, warmup=0))
    for _ in range(12):
        delta = torch.randn(9, generator=generator)
        param.grad = delta.clone()
        theirs.step()
        ours.merge(delta, 1.0, 1)
        torch.testing.assert_close(ours.theta, param.detach(), rtol=1e-5, atol=1e-6)


def test_n_arrivals_of_delayed_nesterov_are_one_nesterov_step_on_their_mean() -> None:
    generator = torch.Generator().manual_seed(2)
    param = torch.nn.Parameter(torch.zeros(6))
    theirs = torch.optim.SGD([param], lr=0.7, momentum=0.9, nesterov=True)
    ours = MergedFragment(torch.zeros(6), 6, HubOptimizer("delayed-nesterov", 0.7, 0.9, warmup=0))
    for _ in range(8):
        deltas = torch.randn(4, 6, generator=generator)
        param.grad = deltas.mean(0)
        theirs.step()
        for delta in deltas:
            ours.merge(delta, 1 / 4, 4)
        torch.testing.assert_close(ours.theta, param.detach(), rtol=1e-4, atol=1e-5)


def test_a_merge_of_waiting_updates_is_one_nesterov_step_on_their_mean_by_samples() -> None:
    """However many of the N workers take part, once the warm-up is over."""
    generator = torch.Generator().manual_seed(2)
    param = torch.nn.Parameter(torch.zeros(6))
    theirs = torch.optim.SGD([param], lr=0.7, momentum=0.9, nesterov=True)
    ours = MergedFragment(torch.zeros(6), 6, HubOptimizer("delayed-nesterov", 0.7, 0.9, warmup=0))
    for number in (3, 1, 4, 2):
        deltas = torch.randn(number, 6, generator=generator)
        samples = torch.arange(1.0, number + 1)
        param.grad = (samples / samples.sum()) @ deltas
        theirs.step()
        before = ours.theta.clone()
        for worker, (delta, counted) in enumerate(zip(deltas, samples.tolist(), strict=True)):
            ours.wait(delta, worker, counted, 1.0, late=worker == 1)
        assert torch.equal(ours.theta, before)
        assert ours.pending is not None
        assert ours.pending.workers == list(range(number))
        assert ours.pending.late == ([1] if number > 1 else [])
        ours.merge_pending(1.0, 4)
        torch.testing.assert_close(ours.theta, param.detach(), rtol=1e-4, atol=1e-5)
    assert (ours.revision, ours.pending) == (10, None)


def test_a_stale_update_moves_its_merge_less() -> None:
    one = fragment_of(HubOptimizer("averaging"), [0.0, 8.0], trained=1)
    one.wait(torch.tensor([1.0, 1.0]), 1, 10.0, 1.0, late=False)
    one.wait(torch.tensor([1.0, 1.0]), 2, 10.0, 0.5, late=True)
    one.merge_pending(1.0, 2)
    assert one.theta.tolist() == [-0.75, 7.25]
    one.wait(torch.tensor([1.0, 1.0]), 1, 10.0, 1.0, late=False)
    one.merge_pending(0.5, 4)
    assert one.theta.tolist() == [-1.25, 6.75]


def test_the_warmup_counts_rounds_of_merges_too() -> None:
    one = MergedFragment(torch.zeros(1), 1, HubOptimizer("delayed-nesterov", 0.5, 0.9, warmup=2))
    for merge in range(3):
        for worker in range(4):
            one.wait(torch.ones(1), worker, 1.0, 1.0, late=False)
        one.merge_pending(1.0, 4)
        assert one.theta.item() == pytest.approx([-1.0, -2.0, -2.0 - 0.5 * 1.9][merge])


def test_the_momentum_of_delayed_nesterov_has_the_one_by_n_once() -> None:
    """Forgetting it makes the step N times too long: with N = 4 equal updates of 1 it is 1.9 · ε, not 7.6 · ε."""
    one = MergedFragment(torch.zeros(1), 1, HubOptimizer("delayed-nesterov", 0.7, 0.9, warmup=0))
    for _ in range(4):
        one.merge(torch.ones(1), 1 / 4, 4)
    assert one.theta.item() == pytest.approx(-0.7 * 1.9)


def test_rounds_of_warmup_only_average() -> None:
    one = MergedFragment(torch.zeros(1), 1, HubOptimizer("delayed-nesterov", 0.7, 0.9, warmup=2))
    for _ in range(8):
        one.merge(torch.ones(1), 1 / 4, 4)
    assert one.theta.item() == pytest.approx(-2.0)
    assert one.momentum is not None
    assert one.momentum.item() == 0.0


def test_buffers_are_averaged_with_any_outer_optimizer() -> None:
    one = fragment_of(HubOptimizer("delayed-nesterov", 0.7, 0.9, warmup=0), [0.0, 10.0], trained=1)
    one.merge(torch.tensor([0.0, 4.0]), 0.5, 2)
    one.merge(torch.tensor([0.0, 4.0]), 0.5, 2)
    assert one.theta.tolist() == [0.0, 6.0]


def test_nesterov_at_every_arrival_is_refused_unless_it_is_meant() -> None:
    with pytest.raises(UsageError, match="diverges"):
        HubOptimizer("nesterov", 0.7, 0.9)
    assert HubOptimizer("nesterov", 0.7, 0.9, unstable=True).has_momentum
    assert HubOptimizer("nesterov", 0.07, 0.9).has_momentum


def test_nesterov_at_every_arrival_diverges_on_stale_updates_where_the_delayed_one_does_not() -> None:
    """Least squares with updates that are eight arrivals old, as those of eight workers are."""

    def distance(outer: HubOptimizer) -> float:
        one = MergedFragment(torch.ones(4), 4, outer)
        seen = [one.theta.clone()] * 8
        for _ in range(400):
            one.merge(0.9 * seen[0], 0.35, 8)
            seen = [*seen[1:], one.theta.clone()]
        return float(one.theta.norm())

    assert distance(HubOptimizer("nesterov", 0.7, 0.9, unstable=True)) > 1e3
    assert distance(HubOptimizer("averaging", 0.35)) < 1e-3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "adam"}, "unknown outer optimizer"),
        ({"lr": 0}, "lr=0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"warmup": -1}, "warmup=-1"),
    ],
)
def test_invalid_outer_optimizers_are_refused(given: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        HubOptimizer(**given)
