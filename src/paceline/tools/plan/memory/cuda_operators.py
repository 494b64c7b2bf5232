"""Functions that consist of other operators on CUDA than on the CPU, where predictions are traced.

`torch.nn.functional.rms_norm` and `scaled_dot_product_attention` select operators by the type of the device. What the
CPU's keep for backward differs: a normalised copy of every input; in float32 the result of attention twice. Only calls
through `torch.nn.functional` are seen, as those of torch's own modules are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["cuda_operators"]

_aten = torch.ops.aten


class _FusedRMSNorm(torch.autograd.Function):
    """Allocates what CUDA's kernel allocates (aten/src/ATen/native/cuda/layer_norm_kernel.cu); computes nothing.

    (``aten._fused_rms_norm`` itself consists of the CPU's operators wherever it is not called on CUDA.)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, axes: int) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        one_per_row = x.new_empty([*x.shape[: x.dim() - axes], *[1] * axes], dtype=dtype)
        ctx.save_for_backward(x, weight, one_per_row)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        grad = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        return grad, torch.empty_like(weight) if ctx.needs_input_grad[1] else None, None


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Let these functions allocate what they would on CUDA, for tensors without values."""
    on_cpu = functional.rms_norm, functional.scaled_dot_product_attention

    def rms_norm(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if weight is not None and weight.dtype != input.dtype:  # torch uses no fused kernel then
            return on_cpu[0](input, list(normalized_shape), weight, eps)
        return _FusedRMSNorm.apply(input, weight, len(normalized_shape))

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
        if dtype is not torch.float32 or attn_mask is not None or query.shape[1] != key.shape[1]:
            return on_cpu[1](query, key, value, attn_mask, *rest, **options)
        return _memory_efficient(query, key, value, *rest, **options)

    functional.rms_norm, functional.scaled_dot_product_attention = rms_norm, attention
    try:
        yield
    finally:
        functional.rms_norm, functional.scaled_dot_product_attention = on_cpu


def _memory_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of the kernel that torch selects on CUDA in float32 (transformers/cuda/sdp_utils.cpp)."""
    trained = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    options = (None, trained, dropout_p, is_causal)
    return _aten._scaled_dot_product_efficient_attention(query, key, value, *options, scale=scale)[0]
