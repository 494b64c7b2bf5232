"""`evaluate`: the mean of a measure over a dataset, each sample counted once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from paceline._core.step_state import step_state, wait_counters
from paceline.data.loader import Loader
from paceline.data.sampling.uneven_policies import EXACT
from paceline.errors import MismatchError, UsageError
from paceline.world.object_collectives import gather_rows, verify_same

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
        UsageError: `loader` is no `Loader`, its policy drops or repeats samples, or `measure` returned something else.
        MismatchError: it returned other names than on another rank, or in another batch.

    Example:
        >>> loader = Loader(torch.arange(10.0), batch_size=4, shuffle=False)
        >>> evaluate(torch.nn.Identity(), loader, lambda model, batch: model(batch).mean())
        4.5
    """
    if not isinstance(loader, Loader):
        raise UsageError(
            f"evaluate(model, {type(loader).__name__}, ...)",
            remedy="pass a paceline.Loader, which deals each sample to one rank",
        )
    if loader.uneven not in EXACT:
        raise UsageError(
            f"evaluating with uneven={loader.uneven!r}, which does not use every sample once",
            remedy="use uneven='join' (the default) or 'rebalance'",
        )
    training, under_way = [module for module in model.modules() if module.training], wait_counters.samples
    model.eval()
    sums = Sums()
    try:
        with torch.no_grad(), step_state.running_task("eval"):
            for number, batch in enumerate(loader):
                sums.take(number, measure(model, batch), batch.samples)
    finally:
        for module in training:
            module.training = True
        wait_counters.samples = under_way  # of the training step that this is in the middle of
    sums.verify(loader.group)
    mine = torch.tensor([sums.of[name] for name in sums.names], dtype=torch.float64)
    totals = torch.stack(gather_rows(mine, loader.group)).sum(0).tolist()
    means = {name: _mean(name, *total) for name, total in zip(sums.names, totals, strict=True)}
    return means if sums.named else means[""]


class Sums:
    """Σ value·weight and Σ weight of one rank, by name.

    What can't be summed is told after the last batch: until then other ranks wait for this one in every batch.

    Attributes:
        of: (Σ value·weight, Σ weight) of each name; without names, of "".
        named: whether `measure` returned names.
        refused: what can't be summed, first.
    """

    def __init__(self) -> None:
        self.of: dict[Any, list[float]] = {}
        self.named = False
        self.refused: UsageError | None = None

    @property
    def names(self) -> list[Any]:
        """The names, in the same order on all ranks that have the same ones."""
        return sorted(self.of, key=str)

    def take(self, number: int, found: Any, samples: float) -> None:
        """Take note of what `measure` returned for batch `number`, which has so many samples."""
        try:
            self._add(number, found, samples)
        except UsageError as error:
            self.refused = self.refused or error

    def verify(self, group: ProcessGroup | None) -> None:
        """Check that there are sums, of the same names on all ranks.

        Raises:
            UsageError: what `measure` returned on this rank can't be summed, or there was no batch.
            MismatchError: that is so on another rank, or its names are others.
        """
        told = str(self.refused).partition("\n")[0] if self.refused else "what can be summed"
        try:
            verify_same([*map(repr, self.names), told], "what measure returned", group)
        except MismatchError:
            if self.refused is None:
                raise
        if self.refused is not None:
            raise self.refused
        if not self.of and not self.named:
            raise UsageError("nothing was measured: there was no batch")

    def _add(self, number: int, found: Any, samples: float) -> None:
        self.named = isinstance(found, Mapping)
        by_name = dict(found) if isinstance(found, Mapping) else {"": found}
        if number and by_name.keys() != self.of.keys():
            raise MismatchError(
                f"measure returned {_listed(by_name)} for batch {number}, {_listed(self.of)} before",
                remedy="return the same names for every batch",
            )
        for name, value in by_name.items():
            held = self.of.setdefault(name, [0.0, 0.0])
            mean, weight = _read(name, value, samples)
            if samples and weight:
                held[0] += mean * weight
                held[1] += weight


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


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, sorted(names, key=str))) if list(names) != [""] else "no name"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{type(value).__qualname__} {value!r}"[:80]


def _mean(name: str, total: float, weight: float) -> float:
    if not weight:
        raise UsageError(f"nothing was measured{f' for {name!r}' if name else ''}: all weights are 0")
    return total / weight
