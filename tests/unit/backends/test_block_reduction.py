"""Reducing blocks: every reduction × dtype against a plain loop in numpy, bit by bit, wherever the result lies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from paceline._core.summation_tree import addition_order
from paceline.backends.block_reduction import BLOCK_NBYTES, Reduction, Scratch, get_reduction, split_blocks
from paceline.errors import UsageError

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
LOW = [torch.float16, torch.bfloat16]
VALID = {
    "SUM": [*FLOATS, *COMPLEX, *WHOLE, torch.bool],
    "PRODUCT": [*FLOATS, *COMPLEX, *WHOLE, torch.bool],
    "AVG": [*FLOATS, *COMPLEX],
    "MIN": [*FLOATS, *WHOLE, torch.bool],
    "MAX": [*FLOATS, *WHOLE, torch.bool],
    "BAND": [*WHOLE, torch.bool],
    "BOR": [*WHOLE, torch.bool],
    "BXOR": [*WHOLE, torch.bool],
}
PAIRS = [(name, dtype) for name, dtypes in VALID.items() for dtype in dtypes]
WRONG = [(name, d) for name in VALID for d in VALID["SUM"] if d not in VALID[name]]
IN_NUMPY = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def draw(dtype, numel, seed):
    """Return values of which sums and products differ when the order does."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if dtype in WHOLE:
        limits = torch.iinfo(dtype)
        high = min(limits.max, 2**62)
        return torch.randint(limits.min, high, (numel,), generator=generator, dtype=dtype)
    values = torch.randn(
        numel, dtype=torch.complex128 if dtype in COMPLEX else torch.float64, generator=generator
    )
    return (values * 3).to(dtype)


def plain(name, inputs, ranks):
    """Return (x₀ ∘ x₁) ∘ (x₂ ∘ x₃) ∘ …, pair by pair; 16-bit floats are widened first."""
    dtype = inputs[0].dtype
    wide = [each.float() if dtype in LOW else each for each in inputs]
    combine = multiplied if dtype in COMPLEX and name == "PRODUCT" else IN_NUMPY[name]
    partial = [each.numpy() for each in wide]
    for left, right in addition_order([range(rank, rank + 1) for rank in range(ranks)], ranks):
        partial[left] = combine(partial[left], partial[right])
    total = partial[0].copy()
    if dtype in LOW and len(inputs) == 2:  # as two ranks do it: rounded after the sum, and after the division
        total = torch.from_numpy(total).to(dtype).float().numpy()
    if name == "AVG":
        parts = total.view(total.real.dtype)  # a complex number's parts are divided each by itself
        total = (parts / parts.dtype.type(ranks)).view(total.dtype)
    return torch.from_numpy(np.ascontiguousarray(total)).to(dtype)


def multiplied(left, right):
    """Return the product of complex numbers by its definition; numpy may fuse a product and a sum."""
    real = left.real * right.real - left.imag * right.imag
    product = np.empty_like(left)
    product.real, product.imag = real, left.real * right.imag + left.imag * right.real
    return product


def same(left, right):
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def reduced(name, dtype, inputs, out, own):
    reduction = get_reduction(getattr(dist.ReduceOp, name), dtype, len(inputs))
    reduction(inputs, out, own, Scratch())
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=str)
def test_every_reduction_equals_a_plain_loop_along_the_tree(name, dtype, ranks):
    inputs = [draw(dtype, 1001, seed) for seed in range(ranks)]
    expected = plain(name, inputs, ranks)
    kept = [each.clone() for each in inputs]
    assert same(reduced(name, dtype, inputs, torch.empty_like(expected), 0), expected)
    assert all(map(same, inputs, kept)), "inputs are left alone where the result lies elsewhere"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=str)
def test_the_result_may_lie_in_any_input(name, dtype, ranks):
    for own in range(ranks):
        inputs = [draw(dtype, 333, seed) for seed in range(ranks)]
        expected = plain(name, inputs, ranks)
        kept = [each.clone() for each in inputs]
        assert same(reduced(name, dtype, inputs, inputs[own], own), expected)
        assert all(same(inputs[rank], kept[rank]) for rank in range(ranks) if rank != own)


@pytest.mark.parametrize(("name", "dtype"), PAIRS, ids=str)
def test_the_result_does_not_depend_on_the_cut(name, dtype):
    inputs = [draw(dtype, 5000, seed) for seed in range(3)]
    whole = reduced(name, dtype, inputs, torch.empty(5000, dtype=dtype), 0)
    parts = torch.empty(5000, dtype=dtype)
    for low, high in itertools.pairwise([0, 1, 4, 64, 127, 1000, 4999, 5000]):
        reduced(name, dtype, [each[low:high] for each in inputs], parts[low:high], 0)
    assert same(parts, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_the_order_of_ranks_changes_the_bits(dtype):
    inputs = [draw(dtype, 5000, seed) for seed in range(4)]
    whole = reduced("SUM", dtype, inputs, torch.empty(5000, dtype=dtype), 0)
    turned = reduced("SUM", dtype, inputs[1:] + inputs[:1], torch.empty(5000, dtype=dtype), 0)
    assert not same(turned, whole)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_sums_of_16_bit_floats_are_rounded_once(dtype):
    small = torch.tensor([torch.finfo(dtype).eps / 2], dtype=dtype)
    inputs = [torch.ones(1, dtype=dtype), *[small] * 7]  # 1 + ε/2 rounds to 1, were it rounded each time
    assert reduced("SUM", dtype, inputs, torch.empty(1, dtype=dtype), 0).item() > 1
    assert reduced("SUM", dtype, inputs[:2], torch.empty(1, dtype=dtype), 0).item() == 1


def test_nan_propagates():
    inputs = [torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])]
    for name in ("SUM", "MIN", "MAX"):
        assert reduced(name, torch.float32, inputs, torch.empty(2), 0).isnan().all()


@pytest.mark.parametrize(("name", "dtype"), WRONG, ids=str)
def test_a_reduction_undefined_for_a_dtype_is_refused(name, dtype):
    with pytest.raises(UsageError, match=f"{name} is not defined for {dtype}.*valid: ") as caught:
        get_reduction(getattr(dist.ReduceOp, name), dtype, 2)
    valid = caught.value.args[0].rpartition("valid: ")[2].split(", ")
    assert {f"torch.{each}" for each in valid} == {str(each) for each in VALID[name]}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.complex32], ids=str)
def test_rare_dtypes_are_refused_before_anything_is_sent(dtype):
    with pytest.raises(UsageError, match=f"SUM is not defined for {dtype}"):
        get_reduction(dist.ReduceOp.SUM, dtype, 2)


def test_a_premultiplied_sum_is_refused_with_a_remedy():
    with pytest.raises(
        UsageError, match=r"no reduction .*PREMUL(.|\n)*scale the tensor yourself and use SUM"
    ):
        get_reduction(dist.ReduceOp.PREMUL_SUM, torch.float32, 2)


def test_both_forms_of_a_reduction_are_accepted():
    wrapped, bare = dist.ReduceOp(dist.ReduceOp.SUM), dist.ReduceOp.SUM
    assert get_reduction(wrapped, torch.float32, 2) == get_reduction(bare, torch.float32, 2)


def test_the_sum_of_a_mean():
    mean = get_reduction(dist.ReduceOp.AVG, torch.bfloat16, 2)
    assert mean.as_sum() == get_reduction(dist.ReduceOp.SUM, torch.bfloat16, 2)
    most = get_reduction(dist.ReduceOp.MAX, torch.float32, 2)
    assert most.as_sum() is most
    assert isinstance(mean, Reduction)


@pytest.mark.parametrize("numel", [0, 1, 65535, 65536, 65537, 200_000])
def test_blocks_cover_all_elements_once_and_in_step(numel):
    left, right = torch.arange(numel, dtype=torch.float32), torch.arange(numel, dtype=torch.float32)
    cut = list(split_blocks([left, right]))
    assert all(a.nbytes <= BLOCK_NBYTES and a.numel() == b.numel() for a, b in cut)
    assert torch.equal(torch.cat([a for a, _ in cut]), left)
    assert torch.equal(torch.cat([b for _, b in cut]), right)


def test_scratch_is_reused_and_grows():
    scratch = Scratch()
    small = scratch.take(10, torch.float32)
    large = scratch.take(1000, torch.float32)
    assert (small.numel(), large.numel()) == (10, 1000)
    assert scratch.take(5, torch.float32).data_ptr() == large.data_ptr()
    assert scratch.take(5, torch.float64).dtype == torch.float64
