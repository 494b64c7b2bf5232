"""Signatures that ranks compare before they exchange data: small, exact, and readable when they differ."""

from __future__ import annotations

import itertools

import pytest
import torch

from paceline.backends import op_signature as module
from paceline.backends.block_reduction import REDUCTION_NAMES
from paceline.backends.op_signature import OpSignature
from paceline.backends.shm.control_block import OpNotice

FULL = OpSignature("reduce", 1024, torch.float32, "SUM", root=1, timeout=30.0)


def test_every_call_round_trips_through_16_bytes():
    seen = set()
    for op, reduction, dtype in itertools.product(module._OPS, ["", *REDUCTION_NAMES], module._DTYPES):
        call = OpSignature(op, 2**40 + 7, dtype, reduction, root=-1)
        packed = call.pack()
        assert len(packed) == 16 == len(OpNotice(packed).call)
        assert OpSignature.unpack(packed) == call
        seen.add(packed)
    assert len(seen) == len(module._OPS) * (len(REDUCTION_NAMES) + 1) * len(module._DTYPES)


@pytest.mark.parametrize("numel", [0, 1, 2**31, 2**32, 2**62])
@pytest.mark.parametrize("root", [-1, 0, 1, 1023])
def test_sizes_and_roots_of_any_magnitude_are_distinguished(numel, root):
    call = OpSignature("broadcast", numel, torch.int8, root=root)
    assert OpSignature.unpack(call.pack()) == call
    assert OpSignature("broadcast", numel + 1, torch.int8, root=root).pack() != call.pack()
    assert OpSignature("broadcast", numel, torch.int8, root=root + 1).pack() != call.pack()


def test_a_time_out_is_not_compared():
    assert (
        OpSignature("barrier", timeout=1.0).pack()
        == OpSignature("barrier", timeout=2.0).pack()
        == OpSignature("barrier").pack()
    )


def test_all_dtypes_of_torch_have_a_code():
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    assert dtypes == set(module._DTYPES) - {None}
    assert len(module._DTYPES) < 256


def test_a_mean_matches_a_sum_and_nothing_else():
    total, mean = (
        OpSignature("all_reduce", 8, torch.float32, "SUM"),
        OpSignature("all_reduce", 8, torch.float32, "AVG"),
    )
    assert total.matches(mean.pack())
    assert mean.matches(total.pack())
    assert total.matches(total.pack())
    for other in (
        OpSignature("all_reduce", 8, torch.float32, "MAX"),
        OpSignature("all_reduce", 9, torch.float32, "AVG"),
        OpSignature("all_reduce", 8, torch.float64, "AVG"),
        OpSignature("reduce", 8, torch.float32, "AVG", root=0),
        OpSignature("broadcast", 8, torch.float32),
    ):
        assert not total.matches(other.pack())
        assert not other.matches(total.pack())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (OpSignature("barrier"), "barrier()"),
        (OpSignature("all_reduce", 1024, torch.float32, "SUM"), "all_reduce(float32[1024], SUM)"),
        (OpSignature("broadcast", 3, torch.bfloat16, root=0), "broadcast(bfloat16[3], root 0)"),
        (FULL, "reduce(float32[1024], SUM, root 1)"),
    ],
)
def test_a_call_as_text(call, text):
    assert str(call) == text


def test_derived_signatures():
    sizes = torch.zeros(8, dtype=torch.int64)
    assert FULL.with_tensor("sizes", sizes) == OpSignature(
        "sizes", 8, torch.int64, "SUM", root=1, timeout=30.0
    )
    assert FULL.as_copy("broadcast", root=0) == OpSignature(
        "broadcast", 1024, torch.float32, "", root=0, timeout=30.0
    )
