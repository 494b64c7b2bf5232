"""Workspaces of kernels: memory that they allocate and free in addition to their results, per operator.

The rules are for torch's CPU kernels. They were derived from the allocator's reports, and tests compare them with
these. On CUDA such memory is cuDNN's, whose heuristics choose among algorithms; it is not known in advance.

[Note: oneDNN's layouts] A convolution on the CPU uses layouts with blocks of 8 or 16 channels. So its inputs are
reordered first, and its result is reordered back; few channels (an image's three) are used as they are
(aten/src/ATen/native/mkldnn/Conv.cpp, ideep). Backward computes the gradient of the input first, then reorders input
and gradient for that of the weight. Where a kernel can't reorder back directly (16-bit types, strides), it needs
another copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["cpu_workspace"]

_UNBLOCKED_CHANNELS = 4  # up to this many are not reordered


def cpu_workspace(func: Any, args: Sequence[Any], _kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that the CPU kernel of an operator allocates and frees beyond its results.

    Args:
        func: the operator, such as ``aten.convolution.default``.
        args: its arguments.
        result: its result.
    """
    rule = _RULES.get(str(func))
    return rule(args, result) if rule is not None else 0


def _convolution(args: Sequence[Any], output: Any) -> int:
    """Reordered input and weight, or the copies of the result; see [Note: oneDNN's layouts]."""
    inputs, weight = args[0], args[1]
    copies = 2 if output.element_size() == 2 else 1
    return max(_blocked(inputs) + weight.nbytes, copies * output.nbytes)


def _convolution_backward(args: Sequence[Any], results: Any) -> int:
    """Reordered input and gradient, or the copies of the input's gradient. See [Note: oneDNN's layouts]."""
    grad, inputs, weight, strides = args[0], args[1], args[2], args[4]
    short = inputs.element_size() == 2
    copied = 0 if grad.is_contiguous() else grad.nbytes
    for_weight = _blocked(inputs) + grad.nbytes + (2 * weight.nbytes if short else 0)
    if results[0] is None:
        return copied + for_weight
    indirect = short or any(stride > 1 for stride in strides)
    return copied + max(for_weight, 2 * inputs.nbytes - weight.nbytes if indirect else 0)


def _blocked(inputs: Any) -> int:
    return inputs.nbytes if inputs.shape[1] > _UNBLOCKED_CHANNELS else 0


def _like_second(args: Sequence[Any], _result: Any) -> int:
    """One tensor as large as the input."""
    return args[1].nbytes


def _like_first(args: Sequence[Any], _result: Any) -> int:
    """One tensor as large as the input."""
    return args[0].nbytes


def _gloo_all_gather(args: Sequence[Any], _result: Any) -> int:
    """The whole result once more, before it is copied out."""
    return args[0].nbytes


def _gloo_reduce_scatter(args: Sequence[Any], _result: Any) -> int:
    """A copy of the input, on which a whole all-reduce runs."""
    return args[1].nbytes


_RULES: dict[str, Callable[[Sequence[Any], Any], int]] = {
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    # aten/src/ATen/native/Normalization.cpp, batch_norm_backward_cpu_template
    "aten.native_batch_norm_backward.default": _like_second,
    # aten/src/ATen/native/Dropout.cpp, native_dropout_cpu: the mask as numbers
    "aten.native_dropout.default": _like_first,
    # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
    "c10d._allgather_base_.default": _gloo_all_gather,
    "c10d._reduce_scatter_base_.default": _gloo_reduce_scatter,
}
