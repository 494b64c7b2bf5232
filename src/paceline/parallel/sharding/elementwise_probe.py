"""Whether an optimizer may update parts of parameters, and what its state has of every element: seen by trying it."""

from __future__ import annotations

from typing import Any

import torch

from paceline.errors import UsageError

__all__ = ["elementwise_keys", "is_elementwise", "probe"]


def probe(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer on one small matrix, to see whether it takes the options."""
    try:
        return optimizer([torch.nn.Parameter(torch.zeros(2, 2))], **options)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{optimizer.__name__} rejects its options: {error}") from error


def is_elementwise(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> bool:
    """Tell whether updating two halves of a matrix, flattened, gives what updating the matrix gives."""
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(4, 4, generator=generator), torch.randn(3, 4, 4, generator=generator)
    whole = torch.nn.Parameter(start.clone())
    halves = [torch.nn.Parameter(half.clone()) for half in start.reshape(2, 8)]
    try:
        one, two = optimizer([whole], **options), optimizer(halves, **options)
        for grad in grads:
            whole.grad = grad.clone()
            for half, part in zip(halves, grad.reshape(2, 8), strict=True):
                half.grad = part.clone()
            one.step()
            two.step()
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # it wants matrices, a closure, sparse gradients …
    return torch.allclose(whole.detach().reshape(2, 8), torch.stack([half.detach() for half in halves]))


def elementwise_keys(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> frozenset[str]:
    """Return the names of what the state has of every element (``exp_avg``), not of a whole parameter (``step``)."""
    param = torch.nn.Parameter(torch.zeros(2, 2))
    tried = optimizer([param], **options)
    param.grad = torch.ones(2, 2)
    tried.step()
    state = tried.state[param]
    return frozenset(key for key, value in state.items() if getattr(value, "shape", None) == param.shape)
