"""Batches that carry ``.samples``: what the user's collate function made, of the type that it made.

A tuple, list or dict becomes an instance of a subclass of its type, so that unpacking, indexing and
``isinstance`` work as before, and torch's pytrees know what is in it; on a tensor or another object it is an
attribute.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import lru_cache
from numbers import Real
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paceline.errors import UsageError

__all__ = ["with_samples"]


class ServedBatch(int):
    """A number of samples that was put on a batch here, and is not the batch's own."""

    __slots__ = ()


_NONE = ServedBatch(0)
_PLAIN = (tuple, list, dict)


def with_samples(batch: Any, samples: int) -> Any:
    """Return `batch` with the attribute ``samples``.

    A batch that has such an attribute already (its tokens, say) keeps it, unless `samples` is 0. A batch that
    only fills a place is another object than `batch`, which somebody may hold, or hand out again.

    Args:
        batch: what a collate function returned.
        samples: of this rank; 0: the batch only fills the place of one.

    Raises:
        UsageError: `batch` can't have an attribute, or what it has under that name is no number.
    """
    kind: Any = type(batch)
    carrying = _CARRYING.get(kind)
    if carrying is not None:  # these have no attributes of their own
        batch = carrying(batch)
        batch.samples = ServedBatch(samples)
        return batch
    number = getattr(batch, "samples", _NONE)
    own = not isinstance(number, ServedBatch)
    if own and not _is_number(number):
        raise UsageError(
            f"a batch of type {kind.__qualname__} has .samples of its own, which is no number but "
            f"{type(number).__qualname__}",
            remedy="give it another name: .samples is how many samples the batch counts for",
        )
    if own and samples:
        return batch
    if own and "samples" in getattr(batch, "_fields", ()):
        return batch._replace(samples=0)
    try:
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            batch = tuple.__new__(_carrying(kind), batch)
        elif not samples:
            batch = copy.copy(batch)
        batch.samples = ServedBatch(samples)
    except (AttributeError, TypeError) as error:
        raise UsageError(
            f"a batch of type {kind.__qualname__} can't carry .samples",
            remedy="let collate_fn return a tensor, tuple, list, dict, or an object that takes attributes",
        ) from error
    return batch


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


@lru_cache(maxsize=256)
def _carrying(kind: type) -> type:
    """Return a subclass of `kind` whose instances take attributes, under the same name."""

    def reduce(self: Any) -> Any:
        plain = tuple(self) if issubclass(kind, tuple) else (dict if issubclass(kind, dict) else list)(self)
        return _restored, (kind, plain, self.samples)

    def leaves(self: Any) -> tuple[list[Any], Any]:
        names = tuple(self) if issubclass(kind, dict) else None
        return list(self.values() if names is not None else self), (names, self.samples)

    def whole(leaves: Iterable[Any], told: Any) -> Any:
        names, samples = told
        return _restored(kind, leaves if names is None else zip(names, leaves, strict=True), samples)

    carried = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__reduce__": reduce})
    if kind in _PLAIN:  # named tuples torch knows by themselves
        pytree.register_pytree_node(carried, leaves, whole)
    return carried


def _restored(kind: type, plain: Iterable[Any], samples: int) -> Any:
    return with_samples(kind._make(plain) if hasattr(kind, "_make") else kind(plain), samples)


_CARRYING: dict[type, Any] = {kind: _carrying(kind) for kind in _PLAIN}
