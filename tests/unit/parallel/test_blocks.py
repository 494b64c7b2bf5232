"""Blocks of parameters: how `split` divides them, and what updating one costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.errors import UsageError
from paceline.parallel.sharding.blocks import blocks_of, resolve_split, update_cost


def param(*shape):
    return nn.Parameter(torch.arange(float(torch.Size(shape).numel())).reshape(shape))


NAMED = {
    "a.qkv.weight": param(6, 4),
    "b.qkv.weight": param(12, 4),
    "experts": param(3, 5, 2),
    "bias": param(6),
}


def test_a_number_divides_the_rows_and_a_list_gives_them():
    assert resolve_split({"*.qkv.weight": 3}, NAMED) == {"a.qkv.weight": [2] * 3, "b.qkv.weight": [4] * 3}
    assert resolve_split({"experts": 3, "bias": [1, 5]}, NAMED) == {"experts": [1] * 3, "bias": [1, 5]}


def test_the_first_pattern_that_fits_counts():
    found = resolve_split({"a.*": [4, 2], "*.qkv.weight": 2}, NAMED)
    assert found == {"a.qkv.weight": [4, 2], "b.qkv.weight": [6, 6]}


@pytest.mark.parametrize("given", [4, 0, -1, 7, [2, 2], [3, 4], [6, 0], [7, -1], "33", [2.0, 4.0], []])
def test_blocks_that_do_not_divide_a_parameter_are_refused(given):
    with pytest.raises(UsageError, match=r"split of parameter 'a.qkv.weight', shape \[6, 4\]"):
        resolve_split({"a.*": given}, NAMED)


def test_what_has_no_rows_is_refused():
    with pytest.raises(UsageError, match="shape"):
        resolve_split({"scale": 1}, {"scale": param()})
    with pytest.raises(UsageError, match="rows are not contiguous"):
        resolve_split({"weight": 2}, {"weight": nn.Parameter(torch.ones(4, 6).t())})


def test_a_pattern_that_fits_nothing_is_named_with_what_is_near():
    with pytest.raises(UsageError, match="qvk") as raised:
        resolve_split({"a.qvk.weight": 3}, NAMED)
    assert "a.qkv.weight" in str(raised.value)


@settings(deadline=None)
@given(rows=st.lists(st.integers(1, 5), min_size=1, max_size=6), width=st.integers(1, 4))
def test_blocks_cover_a_parameter_once_and_in_order(rows, width):
    whole = param(sum(rows), width)
    blocks = blocks_of("p", whole, rows)
    assert [block.stop - block.start for block in blocks] == [count * width for count in rows]
    assert [block.start for block in blocks[1:]] == [block.stop for block in blocks[:-1]]
    assert torch.equal(torch.cat([block.of(whole) for block in blocks]), whole)
    for block in blocks:
        assert torch.equal(block.of(whole).reshape(-1), whole.reshape(-1)[block.start : block.stop])
        assert block.like.shape == block.of(whole).shape
        assert block.like.device.type == "meta"


def test_one_expert_is_a_matrix_and_several_are_not():
    experts = NAMED["experts"]
    assert [tuple(block.like.shape) for block in blocks_of("e", experts, [1, 1, 1])] == [(5, 2)] * 3
    assert [tuple(block.like.shape) for block in blocks_of("e", experts, [1, 2])] == [(5, 2), (2, 5, 2)]
    (whole,) = blocks_of("e", experts, None)
    assert whole.of(experts) is experts


def test_the_cost_grows_with_the_smaller_side():
    def cost(*shape, rows=None):
        return update_cost(blocks_of("p", param(*shape), rows))

    assert cost(8, 2) == 16 * 2 == cost(2, 8)
    assert cost(7) == 7
    assert cost(3, 5, 2) == 30 * 3  # as [3, 10]
    assert cost(3, 5, 2, rows=[1, 1, 1]) == 3 * 10 * 2
    assert cost(6, 4, rows=[2, 2, 2]) < cost(6, 4)
