"""`evaluate`: mean of a measure over a dataset, with each sample counted once on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from paceline._core.step_state import step_state, wait_counters
from paceline._core.summation_tree import addition_order
from paceline.data.batch_sample_count import with_samples
from paceline.data.leaf_random import preserved_generators
from paceline.data.loader import Loader
from paceline.data.rank_place import RankPlace
from paceline.data.sampling.uneven_policies import EXACT
from paceline.errors import MismatchError, UsageError
from paceline.world.control_collectives import gather_rows, rank_and_size, verify_same

__all__ = ["evaluate"]


def evaluate(model: nn.Module, loader: Loader, measure: Callable[[Any, Any], Any]) -> Any:
    """Return the mean of `measure` over all samples of an epoch of `loader`, the same on every rank.

    The model is in eval mode meanwhile, and computes no gradients. All ranks call this, and all call `measure` the
    same number of times: the forward pass of a sharded model has collectives. Results for placeholder batches
    (``batch.samples == 0``) are ignored. Sums are computed in float64.

    If the loader has virtual ranks, sums are kept for each of these and added in a fixed order: the result is the same
    to the bit on any number of ranks. The process's random number generators continue afterwards as if nothing had
    been evaluated.

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
    training = [module for module in model.modules() if module.training]
    present = wait_counters.samples, wait_counters.leaf
    place = RankPlace(*rank_and_size(loader.group), loader.virtual_ranks)
    model.eval()
    sums = WeightedSums(place.own)
    try:
        with torch.no_grad(), step_state.running_task("eval"), _generators_of(loader):
            for number, batch in enumerate(loader):
                _measure(model, batch, measure, number, sums, place)
    finally:
        for module in training:
            module.training = True
        wait_counters.samples, wait_counters.leaf = present  # of the training step in which this is called
    sums.verify(loader.group)
    totals = _add_up(sums, place, loader.group)
    means = {name: _mean(name, *total) for name, total in zip(sums.names, totals, strict=True)}
    return means if sums.named else means[""]


def _generators_of(loader: Loader) -> AbstractContextManager[None]:
    """Return a context that preserves the generators which a loader with virtual ranks seeds."""
    return nullcontext() if loader.virtual_ranks is None else preserved_generators()


def _measure(
    model: nn.Module,
    batch: Any,
    measure: Callable[[Any, Any], Any],
    number: int,
    sums: WeightedSums,
    place: RankPlace,
) -> None:
    """Add the measure of batch `number`.

    After the last leaf of a step, a rank with fewer leaves than others measures a placeholder: as often as they do.
    """
    leaf = place.rank if wait_counters.leaf is None else wait_counters.leaf[1]
    sums.add(number, measure(model, batch), batch.samples, leaf)
    if place.virtual_ranks is not None and leaf == place.own[-1] and len(place.own) < place.most_own:
        measure(model, with_samples(batch, 0))


def _add_up(sums: WeightedSums, place: RankPlace, group: ProcessGroup | None) -> list[list[float]]:
    """Return the sums over all ranks by name; with virtual ranks, added along the tree over these."""
    own = sums.rows()
    if place.virtual_ranks is None:
        return torch.stack(gather_rows(own[0], group)).sum(0).tolist()
    padded = own.new_zeros(place.most_own, *own.shape[1:])  # ranks have different numbers of them
    padded[: len(own)] = own
    rows = [
        row
        for rank, found in enumerate(gather_rows(padded, group))
        for row in found[: len(place.own_of(rank))].cpu().unbind()
    ]
    leaves = [range(leaf, leaf + 1) for leaf in range(place.virtual_ranks)]
    for into, other in addition_order(leaves, place.virtual_ranks):
        rows[into] = rows[into] + rows[other]
    return rows[0].tolist()


class WeightedSums:
    """Σ value·weight and Σ weight by name, of each rank, real or virtual, that this process serves.

    Invalid results raise only after the last batch: until then other ranks wait for this one in every batch.

    Args:
        own: the ranks.

    Attributes:
        by_name: (Σ value·weight, Σ weight) of each rank; without names, of "".
        named: whether `measure` returned names.
        error: of the first invalid result.
    """

    def __init__(self, own: range) -> None:
        self._own = own
        self.by_name: dict[Any, list[list[float]]] = {}
        self.named = False
        self.error: UsageError | None = None

    @property
    def names(self) -> list[Any]:
        """The names, in the same order on all ranks."""
        return sorted(self.by_name, key=str)

    def rows(self) -> Tensor:
        """Return the sums, by rank and name."""
        by_rank = [[self.by_name[name][index] for name in self.names] for index in range(len(self._own))]
        return torch.tensor(by_rank, dtype=torch.float64)

    def add(self, number: int, found: Any, samples: float, rank: int) -> None:
        """Add the result of `measure` for batch `number` of a rank, with this number of samples."""
        try:
            self._add(number, found, samples, self._own.index(rank))
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

    def _add(self, number: int, found: Any, samples: float, index: int) -> None:
        self.named = isinstance(found, Mapping)
        results = dict(found) if isinstance(found, Mapping) else {"": found}
        if number and results.keys() != self.by_name.keys():
            raise MismatchError(
                f"measure returned {_list_names(results)} for batch {number}, {_list_names(self.by_name)} before",
                remedy="return the same names for every batch",
            )
        for name, value in results.items():
            sums = self.by_name.setdefault(name, [[0.0, 0.0] for _ in self._own])[index]
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
