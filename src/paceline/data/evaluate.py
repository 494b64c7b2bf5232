"""`evaluate`: mean of a measure over a dataset, with each sample counted once on any number of ranks."""

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
from paceline.world.control_collectives import gather_rows, verify_same

__all__ = ["evaluate"]


def evaluate(model: nn.Module, loader: Loader, measure: Callable[[Any, Any], Any]) -> Any:
    """Return the mean of `measure` over all samples of an epoch of `loader`, the same on every rank.

    The model is in eval mode meanwhile, and computes no gradients. All ranks call this, and all call `measure` the
    same number of times: the forward pass of a sharded model has collectives. Results for placeholder batches
    (``batch.samples == 0``) are ignored. Sums are computed in float64.

    Args:
        model: passed to `measure`; wrapped or not.
        loader: of the data to evaluate on, usually with ``shuffle=False``.
        measure: called as ``measure(model, batch)``; returns the batch's mean (a number, or a tensor of one),
            or (value, weight) if the weight is not the number of samples (the number of tokens, say), or a dict of
            these by name.

    Returns:
        A float, or a dict of floats by name.

    Raises:
        UsageError: `loader` is not a `Loader`, its policy drops or repeats samples, or `measure` returned something
            else.
        MismatchError: it returned other names on another rank, or for another batch.

    Example:
        >>> loader = Loader(torch.arange(10.0), batch_size=4, shuffle=False)
        >>> evaluate(torch.nn.Identity(), loader, lambda model, batch: model(batch).mean())
        4.5
    """
    if not isinstance(loader, Loader):
        raise UsageError(
            f"evaluate(model, {type(loader).__name__}, ...)",
            remedy="pass a paceline.Loader, which assigns each sample to one rank",
        )
    if loader.uneven not in EXACT:
        raise UsageError(
            f"evaluating with uneven={loader.uneven!r}, which does not use every sample once",
            remedy="use uneven='join' (the default) or 'rebalance'",
        )
    training, samples = [module for module in model.modules() if module.training], wait_counters.samples
    model.eval()
    sums = WeightedSums()
    try:
        with torch.no_grad(), step_state.running_task("eval"):
            for number, batch in enumerate(loader):
                sums.add(number, measure(model, batch), batch.samples)
    finally:
        for module in training:
            module.training = True
        wait_counters.samples = samples  # of the training step in which this is called
    sums.verify(loader.group)
    own = torch.tensor([sums.by_name[name] for name in sums.names], dtype=torch.float64)
    totals = torch.stack(gather_rows(own, loader.group)).sum(0).tolist()
    means = {name: _mean(name, *total) for name, total in zip(sums.names, totals, strict=True)}
    return means if sums.named else means[""]


class WeightedSums:
    """Σ value·weight and Σ weight of one rank, by name.

    Invalid results raise only after the last batch: until then other ranks wait for this one in every batch.

    Attributes:
        by_name: (Σ value·weight, Σ weight); without names, of "".
        named: whether `measure` returned names.
        error: of the first invalid result.
    """

    def __init__(self) -> None:
        self.by_name: dict[Any, list[float]] = {}
        self.named = False
        self.error: UsageError | None = None

    @property
    def names(self) -> list[Any]:
        """The names, in the same order on all ranks."""
        return sorted(self.by_name, key=str)

    def add(self, number: int, found: Any, samples: float) -> None:
        """Add the result of `measure` for batch `number` with this number of samples."""
        try:
            self._add(number, found, samples)
        except UsageError as error:
            self.error = self.error or error

    def verify(self, group: ProcessGroup | None) -> None:
        """Check that all ranks have sums of the same names.

        Raises:
            UsageError: a result on this rank was invalid, or there was no batch.
            MismatchError: a result on another rank was invalid, or its names differ.
        """
        status = str(self.error).partition("\n")[0] if self.error else "valid results"
        try:
            verify_same([*map(repr, self.names), status], "what measure returned", group)
        except MismatchError:
            if self.error is None:
                raise
        if self.error is not None:
            raise self.error
        if not self.by_name and not self.named:
            raise UsageError("nothing was measured: there was no batch")

    def _add(self, number: int, found: Any, samples: float) -> None:
        self.named = isinstance(found, Mapping)
        results = dict(found) if isinstance(found, Mapping) else {"": found}
        if number and results.keys() != self.by_name.keys():
            raise MismatchError(
                f"measure returned {_list_names(results)} for batch {number}, {_list_names(self.by_name)} before",
                remedy="return the same names for every batch",
            )
        for name, value in results.items():
            sums = self.by_name.setdefault(name, [0.0, 0.0])
            mean, weight = _parse_result(name, value, samples)
            if samples and weight:
                sums[0] += mean * weight
                sums[1] += weight


def _parse_result(name: str, value: Any, samples: float) -> tuple[float, float]:
    """Return (mean, weight)."""
    mean, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, samples)
    try:
        return _number(mean), _number(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(value, Tensor):
            shown = f"a tensor of shape {list(value.shape)}"
        else:
            shown = f"{type(value).__qualname__} {value!r}"[:80]
        raise UsageError(
            f"measure returned {shown}{f' for {name!r}' if name else ''}",
            remedy="return the batch's mean as one number, (mean, weight), or a dict of these",
        ) from error


def _number(value: Any) -> float:
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def _list_names(names: Iterable[Any]) -> str:
    return ", ".join(map(repr, sorted(names, key=str))) if list(names) != [""] else "no name"


def _mean(name: str, total: float, weight: float) -> float:
    if not weight:
        raise UsageError(f"nothing was measured{f' for {name!r}' if name else ''}: all weights are 0")
    return total / weight
