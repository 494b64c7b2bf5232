"""Slices of all ranks, reduced into every one of them: numpy compared with torch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from paceline.backends import block_reduction
from paceline.backends.block_reduction import Scratch, get_reduction, reduce_into_all

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)


def slices_of(size, numel, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        scale = 10.0 ** torch.randint(-30, 30, (size, numel), generator=generator)
        return list((torch.randn(size, numel, generator=generator) * scale).to(dtype))
    return list(torch.randint(-(2**31), 2**31 - 1, (size, numel), generator=generator).to(dtype))


def nothing():
    pass


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("op", "dtype"), [(op, dtype) for op in ("SUM", "AVG") for dtype in DTYPES[: 4 if op == "SUM" else 2]]
)
def test_numpy_and_torch_give_the_same_bits(monkeypatch, size, dtype, op):
    monkeypatch.setattr(block_reduction, "BLOCK_NBYTES", 512)
    reduction = get_reduction(getattr(dist.ReduceOp, op), dtype, size + 1)
    for own in range(size):
        for numel in (1, 63, 64, 1000):
            given = slices_of(size, numel, dtype, numel)
            quick, plain = [[each.clone() for each in given] for _ in range(2)]
            reduce_into_all(quick, own, reduction, Scratch(), nothing)
            with monkeypatch.context() as torchs:
                torchs.setattr(block_reduction, "_BY_NUMPY", ())
                reduce_into_all(plain, own, reduction, Scratch(), nothing)
            for left, right in zip(quick, plain, strict=True):
                assert torch.equal(left, right)
                assert torch.equal(left, quick[own])


def test_a_mean_divides_by_the_number_of_ranks():
    slices = [torch.full((100,), 3.0), torch.full((100,), 5.0)]
    reduce_into_all(slices, 1, get_reduction(dist.ReduceOp.AVG, torch.float32, 4), Scratch(), nothing)
    assert all(each.eq(2.0).all() for each in slices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_other_tensor_is_written_after_the_check_raises(dtype):
    given = [torch.ones(1 << 18, dtype=dtype), torch.ones(1 << 18, dtype=dtype)]
    reduction, checks = get_reduction(dist.ReduceOp.SUM, dtype, 2), []

    def check():
        checks.append(1)
        if len(checks) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        reduce_into_all(given, 0, reduction, Scratch(), check)
    written = given[1].eq(2).nonzero().numel()
    assert 0 < written < given[1].numel(), "the first block"
    assert given[1][written:].eq(1).all()


def test_reductions_without_a_numpy_path():
    slices = [torch.tensor([True, False]), torch.tensor([False, False])]
    reduce_into_all(slices, 0, get_reduction(dist.ReduceOp.MAX, torch.bool, 2), Scratch(), nothing)
    assert [each.tolist() for each in slices] == [[True, False]] * 2
