"""The precise norm: in blocks that fit a CPU's cache, and in one piece on accelerators."""

from __future__ import annotations

import pytest
import torch

from paceline.parallel.engine.grad_norm import _BLOCK, _precise_norm


@pytest.mark.parametrize(("device", "pieces"), [("cpu", 4), ("meta", 2)])
def test_only_cpus_convert_gradients_in_blocks(monkeypatch, device, pieces):
    original, calls = torch.linalg.vector_norm, []

    def counting(tensor, *args, **options):
        calls.append(tensor.numel())
        return original(tensor, *args, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", counting)
    grads = [torch.ones(2 * _BLOCK + 7, device=device), torch.ones(3, 5, device=device)]
    norm = _precise_norm(grads, 2.0, torch.device(device))
    assert norm.dtype == torch.float64
    assert calls[-1] == pieces
    assert sum(calls[:-1]) == 2 * _BLOCK + 22


def test_the_norm_is_that_of_all_elements():
    grads = [
        torch.randn(_BLOCK + 3, generator=torch.Generator().manual_seed(1)),
        torch.ones(2, 3),
        torch.ones(0),
    ]
    whole = torch.cat([grad.reshape(-1) for grad in grads]).double()
    for norm_type in (1.0, 2.0, float("inf")):
        assert _precise_norm(grads, norm_type, torch.device("cpu")) == pytest.approx(
            torch.linalg.vector_norm(whole, norm_type).item(), rel=1e-12
        )
