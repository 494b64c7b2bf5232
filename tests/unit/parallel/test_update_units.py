"""Copies of parameters that are updated in their place: rounding, changes from outside, options."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.parallel.sharding.update_units import StatePrecision, UpdateUnit, _rounded_up_or_down

BF16 = 16
STOCHASTIC = StatePrecision(torch.float32, stochastic_rounding=True)
NEAREST = StatePrecision(torch.float32)


def unit_of(data, precision, grads=None, name="weight", start=0):
    grads = grads if grads is not None else [torch.zeros_like(data)]
    return UpdateUnit(name, start, start + data.numel(), lambda: data, lambda: grads[-1], precision)


def updated(unit, by):
    unit.load()
    unit.inner.detach().add_(by)
    unit.store()


# ---------------------------------------------------------------- rounding


@settings(deadline=None)
@given(value=st.floats(-(2.0**126), 2.0**126, width=32), seed=st.integers(0, 2**31))
def test_a_number_becomes_one_of_its_two_neighbours(value, seed):
    exact = torch.full((64,), value)
    found = _rounded_up_or_down(exact, BF16, seed)
    assert torch.equal(found.bfloat16().float(), found)
    down = (exact.view(torch.int32) >> BF16 << BF16).view(torch.float32)
    up = ((down.view(torch.int32) >> BF16) + 1 << BF16).view(torch.float32)
    assert ((found == down) | (found == up)).all()
    if torch.equal(down, exact):
        assert torch.equal(found, exact), "what bfloat16 has stays"


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("base", [1.0, -1.0, 3.0e-5])
def test_the_mean_is_kept(fraction, base):
    low = torch.tensor(base).bfloat16().float()
    high = (low.view(torch.int32) + (1 << BF16)).view(torch.float32)  # the next one, away from zero
    value = low + fraction * (high - low)
    count = 40_000
    found = _rounded_up_or_down(value.expand(count).contiguous(), BF16, 3).double()
    deviation = found.std().item() / count**0.5
    assert abs(found.mean().item() - value.item()) < 5 * deviation + 1e-12
    assert found.unique().numel() == 2


def test_what_is_not_finite_stays():
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    found = _rounded_up_or_down(odd, BF16, 1)
    assert torch.equal(found.nan_to_num(7.0), odd.nan_to_num(7.0))


def test_rounding_depends_on_the_unit_and_on_how_often_it_was_rounded():
    values = torch.rand(1000) + 1

    def rounded(times=1, **where):
        data = values.bfloat16()
        unit = unit_of(data, STOCHASTIC, **where)
        for _ in range(times):
            unit.inner.detach().copy_(values)
            unit.inner.grad = torch.zeros_like(unit.inner)
            unit.store()
        return data

    assert torch.equal(rounded(), rounded())
    assert not torch.equal(rounded(), rounded(times=2))
    assert not torch.equal(rounded(), rounded(name="other"))
    assert not torch.equal(rounded(), rounded(start=8))


def test_the_count_of_draws_is_saved_with_the_copy():
    data = torch.ones(8, dtype=torch.bfloat16)
    unit = unit_of(data, STOCHASTIC)
    for _ in range(3):
        updated(unit, 1e-3)
    state = {"exp_avg": 1, **unit.extra_state()}
    other = unit_of(data.clone(), STOCHASTIC)
    other.take_extra_state(state)
    assert state == {"exp_avg": 1}
    assert torch.equal(other.inner, unit.inner)
    assert other.extra_state()["rounding_draws"] == 3


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("precision", [NEAREST, STOCHASTIC])
def test_a_copy_keeps_what_rounding_cuts_off(precision):
    data = torch.ones(4, dtype=torch.bfloat16)
    unit = unit_of(data, precision)
    for _ in range(50):
        updated(unit, 1e-4)
    assert torch.allclose(unit.inner.detach(), torch.full((4,), 1.005), atol=1e-5)


@pytest.mark.parametrize("precision", [NEAREST, STOCHASTIC])
def test_changed_elements_are_followed_and_others_are_not(precision):
    data = torch.linspace(1, 2, 8).bfloat16()
    unit = unit_of(data, precision)
    updated(unit, 1.1e-3)
    before = unit.inner.detach().clone()
    data[2:4] = 5.0
    unit.load()
    assert torch.equal(unit.inner.detach()[2:4], torch.full((2,), 5.0))
    kept = [0, 1, 4, 5, 6, 7]
    assert torch.equal(unit.inner.detach()[kept], before[kept])


def test_without_a_gradient_nothing_is_written():
    data = torch.ones(4, dtype=torch.bfloat16)
    unit = unit_of(data, NEAREST, grads=[None])
    updated(unit, 1.0)
    assert (data == 1).all()
    assert not unit.used


def test_only_dtypes_with_fewer_bits_are_copied():
    assert NEAREST.copies(torch.ones(1, dtype=torch.bfloat16))
    assert NEAREST.copies(torch.ones(1, dtype=torch.float16))
    for dtype in (torch.float32, torch.float64, torch.complex64):
        data = torch.ones(2, dtype=dtype)
        assert not NEAREST.copies(data)
        assert unit_of(data, NEAREST).inner.data_ptr() == data.data_ptr()
        assert unit_of(data, NEAREST).extra_state() == {}
    assert not StatePrecision(offload=True).copies(torch.ones(1))  # it is on the CPU


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"master_dtype": "float32"}, "floating-point dtype"),
        ({"master_dtype": torch.int64}, "floating-point dtype"),
        ({"stochastic_rounding": True}, "master_dtype=torch.float32"),
        ({"stochastic_rounding": True, "master_dtype": torch.float64}, "master_dtype=torch.float32"),
    ],
)
def test_wrong_options_are_refused(options, match):
    with pytest.raises(UsageError, match=match):
        StatePrecision(**options)
