"""Factors of gradients: the same bits from a number, a scalar tensor, for one tensor and for several."""

from __future__ import annotations

import pytest
import torch

from paceline.parallel.engine.loss_weights import multiply_by


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_factor_is_not_rounded_to_a_dtype_of_16_bits(dtype):
    factor = 0.9  # no number of 16 bits
    shapes = [(64,), (3, 5), ()]
    made = torch.Generator().manual_seed(1)
    gradients = [torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes]
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    expected = [(each.to(wide) * torch.tensor(factor, dtype=wide)).to(dtype) for each in gradients]
    for given in (factor, torch.tensor(factor, dtype=torch.float64)):
        together = [each.clone() for each in gradients]
        multiply_by(together, given)
        alone = [each.clone() for each in gradients]
        for each in alone:
            multiply_by([each], given)
        assert all(map(torch.equal, together, expected))
        assert all(map(torch.equal, alone, expected))
