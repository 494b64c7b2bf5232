"""Sizes, strides and dtypes of an operation's results, found without its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Layout", "output_layouts"]

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None  # None for a result that isn't computed
_known: dict[Any, tuple[list[Layout], bool]] = {}


def output_layouts(
    call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Layout], bool]:
    """Return the layouts of the results of `call` on CPU tensors, and whether they come as a list."""
    key = (call, _key(args), _key(tuple(kwargs.items())) if kwargs else None)
    try:
        found = _known.get(key)
    except TypeError:  # an argument that can't be hashed
        return _find(call, args, kwargs)
    if found is None:
        found = _known[key] = _find(call, args, kwargs)
    return found


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple([_key(item) for item in value])
    return (type(value), value)


def _find(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Layout], bool]:
    try:
        results = call(
            *_on(args, "meta"), **dict(zip(kwargs, _on(list(kwargs.values()), "meta"), strict=True))
        )
    except NotImplementedError:  # without a rule for shapes: try it on ones
        results = call(*_on(args, "cpu"), **dict(zip(kwargs, _on(list(kwargs.values()), "cpu"), strict=True)))
    is_list = isinstance(results, list)
    if isinstance(results, Tensor):
        results = (results,)
    return [
        None if each is None else (tuple(each.shape), each.stride(), each.dtype) for each in results
    ], is_list


def _on(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return made if device == "meta" else made.fill_(1)
    if isinstance(value, (list, tuple)):
        return [_on(item, device) for item in value]
    if isinstance(value, torch.device):
        return torch.device(device)
    return value
