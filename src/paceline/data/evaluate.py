"""`evaluate`: the mean of a measure over a dataset, each sample counted once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.loader import Loader
from paceline.data.portions import EXACT
from paceline.errors import MismatchError, UsageError
from paceline.world.agree import gather_rows, verify_same

__all__ = ["evaluate"]


def evaluate(model: nn.Module, loader: Loader, measure: Callable[[Any, Any], Any]) -> Any:
    """Return the mean of `measure` over all samples of an epoch of `loader`, the same on every rank.

    The model is in eval mode meanwhile, and computes no gradients. All ranks call this, and all call `measure`
    equally often: the forward pass of a sharded model has collectives. What a rank measures on a batch that
    only fills a place (``batch.samples == 0``) is not counted. Sums are made in float64.

    Args:
        model: handed to `measure`; wrapped or not.
        loader: of the data to evaluate on, usually with ``shuffle=False``.
        measure: called as ``measure(model, batch)``; returns the batch's mean (a number, or a tensor of one),
            or (value, weight), where the weight is not the batch's number of samples (its tokens, say), or a
            dict of such by name.

    Returns:
        A float, or a dict of them by name.

    Raises:
        UsageError: the loader's policy drops or repeats samples, or `measure` returned something else.
        MismatchError: it returned other names than on another rank, or in another batch.

    Example:
        >>> loader = Loader(torch.arange(10.0), batch_size=4, shuffle=False)
        >>> evaluate(torch.nn.Identity(), loader, lambda model, batch: model(batch).mean())
        4.5
    """
    if loader.uneven not in EXACT:
        raise UsageError(
            f"evaluating with uneven={loader.uneven!r}, which does not use every sample once",
            remedy="use uneven='join' (the default) or 'rebalance'",
        )
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            sums, is_dict = _sums(model, loader, measure)
    finally:
        for module in training:
            module.training = True
    verify_same(list(sums), "what measure returned", loader.group)
    mine = torch.tensor(list(sums.values()), dtype=torch.float64)
    totals = torch.stack(gather_rows(mine, loader.group)).sum(0).tolist()
    means = {name: _mean(name, *total) for name, total in zip(sums, totals, strict=True)}
    return means if is_dict else means[""]


def _sums(
    model: nn.Module, loader: Loader, measure: Callable[[Any, Any], Any]
) -> tuple[dict[str, list[float]], bool]:
    """Return Σ value·weight and Σ weight of this rank by name, and whether there are names."""
    sums: dict[str, list[float]] = {}
    is_dict = False
    for number, batch in enumerate(loader):
        found = measure(model, batch)
        is_dict = isinstance(found, Mapping)
        named = dict(found) if is_dict else {"": found}
        if number and named.keys() != sums.keys():
            raise MismatchError(
                f"measure returned {sorted(map(str, named))} for batch {number}, {sorted(sums)} before",
                remedy="return the same names for every batch",
            )
        for name, value in named.items():
            held = sums.setdefault(name, [0.0, 0.0])
            mean, weight = _read(name, value, batch.samples)
            if batch.samples and weight:
                held[0] += mean * weight
                held[1] += weight
    return sums, is_dict


def _read(name: str, value: Any, samples: float) -> tuple[float, float]:
    """Return (mean, weight) of what `measure` returned."""
    mean, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, samples)
    try:
        return _number(mean), _number(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"measure returned {_shown(value)}{f' for {name!r}' if name else ''}",
            remedy="return the batch's mean as one number, (mean, weight), or a dict of such",
        ) from error


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{type(value).__qualname__} {value!r}"[:80]


def _mean(name: str, total: float, weight: float) -> float:
    if not weight:
        raise UsageError(f"nothing was measured{f' for {name!r}' if name else ''}: all weights are 0")
    return total / weight
