"""Number of devices that a training needs, and the split of a global batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.tools.plan.batch_plan import BatchRequest, plan_batch
from paceline.tools.plan.communication_roofline import catalog_link_rate, catalog_matmul_rate
from paceline.tools.plan.devices_needed import ModelStates, device_nbytes, devices_needed, max_micro_batch
from paceline.tools.plan.micro_batch_split import split_batch

SIZES = st.integers(0, 10_000)


@given(
    shared=SIZES,
    whole=SIZES,
    activations=SIZES,
    memory=st.integers(1, 10_000),
    part=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
)
def test_devices_are_the_least_that_fit(shared, whole, activations, memory, part):
    states = ModelStates(shared, whole)
    count = devices_needed(states, activations, memory, part)
    if count is None:
        assert device_nbytes(states, activations, 10**9, part) > memory
        return
    assert device_nbytes(states, activations, count, part) <= memory * (1 + 1e-12)
    if count > 1:
        assert device_nbytes(states, activations, count - 1, part) > memory


@pytest.mark.parametrize(
    ("strategy", "nbytes"),
    [("naive", 16.0), ("ddp", 16.0), ("zero1", 8 + 8 / 4), ("zero2", 4 + 12 / 4), ("fsdp", 16 / 4)],
)
def test_states_of_strategies_on_four_devices(strategy, nbytes):
    assert device_nbytes(ModelStates.of(1000, strategy), 0.0, 4) == 1000 * nbytes


def test_ddp_does_not_fit_better_on_more_devices():
    assert devices_needed(ModelStates.of(10**9, "ddp"), 0.0, 16e9) == 1
    assert devices_needed(ModelStates.of(10**9, "ddp"), 0.0, 15.9e9) is None


@pytest.mark.parametrize(
    ("memory", "activations", "shared", "message"),
    [
        (0, 0, 0, "memory"),
        (-1, 0, 0, "memory"),
        (math.nan, 0, 0, "memory"),
        (1e9, -1, 0, "activations"),
        (1e9, 0, 1.5, "shared"),
    ],
)
def test_numbers_out_of_range_are_refused(memory, activations, shared, message):
    with pytest.raises(UsageError, match=message):
        devices_needed(ModelStates(1.0), activations, memory, shared)


def test_an_unknown_strategy_is_reported_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'zero2'"):
        ModelStates.of(1, "zero-2")


@given(memory=st.integers(1, 5000), each=st.integers(1, 50), devices=st.integers(1, 20))
def test_the_largest_micro_batch_fits_and_one_more_does_not(memory, each, devices):
    states, part = ModelStates(1600.0, 10.0), 0.5
    most = max_micro_batch(states, each, memory, devices, part)
    fits = [device_nbytes(states, each * n, devices, part) <= memory * (1 + 1e-12) for n in (most, most + 1)]
    assert fits[1] is False
    assert fits[0] or most == 0


@given(samples=st.integers(1, 3000), devices=st.integers(1, 200), most=st.integers(1, 40))
def test_a_split_holds_the_batch_and_is_as_flat_as_can_be(samples, devices, most):
    split = split_batch(samples, devices, most)
    assert split.ranks == min(samples, devices)
    assert split.ranks + split.idle == devices
    assert split.micro <= most
    whole = split.micro * split.accumulation * split.ranks
    assert whole - split.missing == samples
    assert 0 <= split.missing < split.accumulation * split.ranks
    assert (split.accumulation - 1) * split.ranks * most < samples  # one micro-batch less would not hold it
    unit = split.accumulation * split.ranks
    assert split.below % unit == split.above % unit == 0
    assert split.below <= samples <= split.above
    assert split.above - split.below in (0, unit)
    least, more = split.rank_samples
    assert least * split.ranks <= samples <= more * split.ranks
    assert more - least <= 1


@given(samples=st.integers(1, 3000), devices=st.integers(1, 200), most=st.integers(1, 40))
def test_the_exact_split_has_no_rest_and_the_most_ranks(samples, devices, most):
    split = split_batch(samples, devices, most)
    exact = split.exact
    assert (exact is None) == (split.missing == 0)
    if exact is None:
        return
    assert exact.micro * exact.accumulation * exact.ranks == samples
    assert exact.missing == 0
    assert exact.micro <= most
    assert exact.ranks == max(count for count in range(1, devices + 1) if samples % count == 0)
    assert exact.ranks + exact.idle == devices


def test_ranks_come_before_accumulation():
    assert split_batch(64, 8, 100).label == "8 × 1 × 8"
    assert split_batch(64, 8, 4).label == "4 × 2 × 8"
    assert split_batch(3, 8, 4).idle == 5


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1.5, 1, 1), (True, 1, 1)])
def test_a_split_of_nothing_is_refused(numbers):
    with pytest.raises(UsageError, match="whole number"):
        split_batch(*numbers)


@pytest.mark.parametrize(("wire", "between"), [("pcie4", "ndr"), ("nvlink4", "ndr")])
def test_a_threshold_names_the_links_that_it_is_about(wire, between):
    options = BatchRequest(
        parameters=7_000_000_000,
        strategy="full-shard",
        devices=64,
        flops=catalog_matmul_rate("h100"),
        wire=catalog_link_rate(wire),
        between=catalog_link_rate(between),
        group=8,
    )
    why = {figure.key: figure.why for figure in plan_batch(options).figures}
    inside, outside = (f"({catalog_link_rate(name).source})" for name in (wire, between))
    assert inside in why["tokens_hsdp_inside_a_group"]
    assert outside in why["tokens_hsdp_between_groups"]
    assert (inside if wire == "pcie4" else outside) in why["tokens_full_shard"], "the slower of both"
