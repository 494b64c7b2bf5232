"""Rows give the same numbers in numpy and torch; bfloat16 rounding equals torch's bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.async_dp.row_arithmetic import (
    NUMPY_MAX_NUMEL,
    add_scaled,
    as_array,
    as_row,
    as_tensor,
    copy_into,
    from_bf16,
    l2_norm,
    subtract,
    to_bf16,
)

SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), 1.0, -1.5, 3.4e38, -3.4e38, 1e-45, 1.17549435e-38]


def _torch_bits(numbers: np.ndarray) -> np.ndarray:
    return torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_bfloat16_is_torchs_for_any_bits(bits: list[int]) -> None:
    numbers = np.array(bits, np.uint32).view(np.float32)
    packed = np.empty(len(bits), np.uint16)
    to_bf16(numbers, packed)
    number = ~np.isnan(numbers)
    assert np.array_equal(packed[number], _torch_bits(numbers)[number])
    back = np.empty(len(bits), np.float32)
    from_bf16(packed, back)
    assert np.array_equal(np.isnan(back), ~number)


def test_bfloat16_rounds_special_numbers_and_ties_as_torch_does() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x7F7F8000, 0xBF808000, 0x00008000], np.uint32).view(np.float32)
    numbers = np.concatenate([np.array(SPECIAL, np.float32), ties])
    packed = np.empty(len(numbers), np.uint16)
    to_bf16(numbers, packed)
    assert np.array_equal(packed, _torch_bits(numbers))
    back = np.empty(len(numbers), np.float32)
    from_bf16(packed, back)
    assert np.array_equal(back, torch.from_numpy(numbers).bfloat16().float().numpy())


@pytest.mark.parametrize("numel", [1, NUMPY_MAX_NUMEL, NUMPY_MAX_NUMEL + 1])
def test_short_and_long_rows_are_computed_equally(numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    left, right = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    as_few, as_many = as_row(left.clone()), left.clone()
    assert (type(as_few) is np.ndarray) == (numel <= NUMPY_MAX_NUMEL)

    add_scaled(as_few, 0.3, as_row(right))
    add_scaled(as_many, 0.3, right)
    torch.testing.assert_close(as_tensor(as_few), as_many)

    difference = torch.empty(numel)
    subtract(as_few, as_row(right), as_row(difference))
    assert torch.equal(difference, as_tensor(as_few) - right)
    assert l2_norm(as_few) == pytest.approx(float(as_tensor(as_few).norm()), rel=1e-5)


def test_a_short_row_shares_the_memory_of_its_tensor() -> None:
    tensor = torch.zeros(3)
    copy_into(torch.tensor([1.0, 2.0, 3.0]), as_row(tensor))
    assert tensor.tolist() == [1.0, 2.0, 3.0]
    assert as_array(tensor).tolist() == [1.0, 2.0, 3.0]


def test_rows_of_other_dtypes_stay_tensors() -> None:
    assert isinstance(as_row(torch.zeros(3, dtype=torch.bfloat16)), torch.Tensor)
    assert isinstance(as_row(torch.zeros(3, dtype=torch.float64)), torch.Tensor)
