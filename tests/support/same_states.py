"""Compares nested states to the bit: where two of them differ first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["difference"]


def difference(one: Any, two: Any, path: str = "") -> str:
    """Return where two states differ first, and how; empty: they are the same, with all bits of their tensors."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return _of_tensors(one, two, path)
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        if list(one) != list(two) and set(one) != set(two):
            return f"{path}: keys {list(one)} and {list(two)}"
        return next(filter(None, (difference(one[key], two[key], f"{path}.{key}") for key in one)), "")
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        if type(one) is not type(two) or len(one) != len(two):
            return f"{path}: {type(one).__name__} of {len(one)} and {type(two).__name__} of {len(two)}"
        pairs = enumerate(zip(one, two, strict=True))
        return next(filter(None, (difference(*pair, f"{path}[{at}]") for at, pair in pairs)), "")
    if isinstance(one, float) and isinstance(two, float) and math.isnan(one) and math.isnan(two):
        return ""
    return "" if type(one) is type(two) and one == two else f"{path}: {one!r:.80} and {two!r:.80}"


def _of_tensors(one: Tensor, two: Tensor, path: str) -> str:
    if isinstance(one, DTensor) != isinstance(two, DTensor):
        return f"{path}: {type(one).__name__} and {type(two).__name__}"
    if isinstance(one, DTensor) and isinstance(two, DTensor):
        if (one.placements, one.shape) != (two.placements, two.shape):
            return f"{path}: {one.placements} {one.shape} and {two.placements} {two.shape}"
        one, two = one.to_local(), two.to_local()
    here, there = ((each.dtype, tuple(each.shape)) for each in (one, two))
    if here != there:
        return f"{path}: {here} and {there}"
    same = torch.equal(*(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, two)))
    return "" if same else f"{path}: other elements"
