"""Blocks of parameters: what an optimizer that needs whole matrices updates as one.

As a rule that is a parameter. Where the program says so, a fused one counts as several matrices: the rows of a query,
key and value projection, the heads of an attention, the experts of a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from paceline._core.format import plural
from paceline.errors import UsageError, unknown
from paceline.parallel.buckets.grad_slot import storage_numel

__all__ = ["Block", "Split", "blocks_of", "resolve_split", "update_cost"]

Split = Mapping[str, int | Sequence[int]]
"""Blocks along dimension 0 by pattern of parameter names: how many equal ones, or the rows of each."""


@dataclass(frozen=True, eq=False)
class Block:
    """Elements of a parameter that an optimizer updates as one.

    Attributes:
        name: of the parameter.
        param: the parameter.
        start: first element, in storage order.
        stop: one past the last element.
        rows: along dimension 0; None: all of them.
    """

    name: str
    param: torch.nn.Parameter
    start: int
    stop: int
    rows: tuple[int, int] | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Return the block as a view of a tensor with the parameter's shape; a single expert as a matrix."""
        if self.rows is None:
            return whole
        first, last = self.rows
        return whole[first] if last - first == 1 and whole.dim() > 2 else whole[first:last]

    @property
    def like(self) -> Tensor:
        """A tensor without memory, with the block's shape, strides and dtype."""
        param = self.param
        whole = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device="meta")
        return self.of(whole)


def blocks_of(name: str, param: torch.nn.Parameter, rows: Sequence[int] | None) -> list[Block]:
    """Return the blocks of a parameter, in order; `rows` of each, or None for a single block."""
    if rows is None:
        return [Block(name, param, 0, storage_numel(param))]
    width = storage_numel(param) // param.shape[0]
    ends = list(itertools.accumulate(rows))
    return [
        Block(name, param, (end - count) * width, end * width, (end - count, end))
        for count, end in zip(rows, ends, strict=True)
    ]


def resolve_split(split: Split, named: Mapping[str, torch.nn.Parameter]) -> dict[str, list[int]]:
    """Return the rows of each block by parameter name.

    Args:
        split: patterns as of ``fnmatch``; the first that fits a name counts.
        named: the optimizer's parameters.

    Raises:
        UsageError: a pattern fits no parameter, or the blocks don't divide one.
    """
    found: dict[str, list[int]] = {}
    for pattern, given in split.items():
        names = [name for name in named if fnmatchcase(name, pattern)]
        if not names:
            raise unknown("parameter pattern in split", pattern, list(named))
        for name in names:
            found.setdefault(name, _rows(name, named[name], given))
    return found


def _rows(name: str, param: torch.nn.Parameter, given: int | Sequence[int]) -> list[int]:
    count = param.shape[0] if param.dim() else 0
    rows: list[int] = []
    if isinstance(given, int):
        rows = [count // given] * given if given > 0 and count % given == 0 and count else []
    elif not isinstance(given, str):
        rows = list(given)
    if not rows or not all(isinstance(each, int) and each > 0 for each in rows) or sum(rows) != count:
        what = f"{given} equal blocks" if isinstance(given, int) else f"blocks of {given!r} rows"
        raise UsageError(
            f"split of parameter {name!r}, shape {list(param.shape)}, into {what}",
            remedy=f"give a number that divides {plural(count, 'row')}, or the rows of each block",
        )
    if not param.is_contiguous():
        raise UsageError(
            f"split of parameter {name!r}, whose rows are not contiguous (strides {list(param.stride())})",
            remedy="make it contiguous before wrapping the model",
        )
    return rows


def update_cost(blocks: Sequence[Block]) -> float:
    """Return what updating blocks costs, in products of two numbers, as far as it depends on their shapes.

    By formula: Newton–Schulz and matrix preconditioners multiply an m×n matrix by ones of the smaller size, a number of
    times that is the same for all.
    """
    cost = 0.0
    for block in blocks:
        shape = block.like.shape
        numel = float(block.stop - block.start)
        cost += numel * (min(shape[0], numel / shape[0]) if len(shape) > 1 else 1.0)
    return cost
