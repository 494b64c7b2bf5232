"""Adds ``.samples`` and ``.ends_step`` to batches, of whatever type the user's collate function returns.

A tuple, list or dict becomes an instance of a subclass of its type, so that unpacking, indexing and ``isinstance``
work as before, and torch's pytrees can flatten it; on a tensor or another object it is an attribute.
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


class SampleCount(int):
    """A number of samples that `with_samples` has set, not the collate function."""

    __slots__ = ()


_UNSET = SampleCount(0)
_BUILTINS = (tuple, list, dict)


def with_samples(batch: Any, samples: int, ends_step: bool | None = None) -> Any:
    """Return `batch` with the attributes ``samples`` and ``ends_step``.

    If a batch already has an attribute ``samples`` (its tokens, say), that is kept unless `samples` is 0. A placeholder
    batch is another object than `batch`, which may be referenced elsewhere or served again.

    Args:
        batch: result of a collate function.
        samples: of this rank; 0: the batch is only a placeholder.
        ends_step: whether this is the rank's last batch of a step; None: it always is. Then a batch with its own
            ``samples`` need not be able to have further attributes.

    Raises:
        UsageError: `batch` can't have attributes, or its own ``samples`` is not a number.
    """
    batch = _with_number(batch, samples)
    if ends_step is None and isinstance(batch, _Counted):
        return batch  # where it is the default
    return _with_end(batch, ends_step)


def _with_number(batch: Any, samples: int) -> Any:
    kind: Any = type(batch)
    counted = _COUNTED_BUILTINS.get(kind)
    if counted is not None:
        batch = counted(batch)
        batch.samples = SampleCount(samples)
        return batch
    number = getattr(batch, "samples", _UNSET)
    own = not isinstance(number, SampleCount)
    if own and not _is_number(number):
        raise UsageError(
            f"a batch of type {kind.__qualname__} has its own .samples, which is not a number but "
            f"{type(number).__qualname__}",
            remedy="rename it: .samples is the number of samples that the batch counts for",
        )
    if own and samples:
        return batch
    if own and "samples" in getattr(batch, "_fields", ()):
        return batch._replace(samples=0)
    try:
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            batch = tuple.__new__(_counted_type(kind), batch)
        elif not samples:
            batch = copy.copy(batch)
        batch.samples = SampleCount(samples)
    except (AttributeError, TypeError) as error:
        raise UsageError(
            f"a batch of type {kind.__qualname__} can't carry .samples",
            remedy="let collate_fn return a tensor, tuple, list, dict, or an object that takes attributes",
        ) from error
    return batch


def _with_end(batch: Any, ends_step: bool | None) -> Any:
    kind: Any = type(batch)
    try:
        if issubclass(kind, tuple) and hasattr(kind, "_fields") and not issubclass(kind, _Counted):
            batch = tuple.__new__(_counted_type(kind), batch)
        batch.ends_step = ends_step is not False
    except (AttributeError, TypeError) as error:
        if ends_step is not None:
            raise UsageError(
                f"a batch of type {kind.__qualname__} can't carry .ends_step",
                remedy="with virtual ranks, let collate_fn return a tensor, tuple, list, dict, or an object that "
                "takes attributes",
            ) from error
    return batch


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)


class _Counted:
    """Base of the types with attributes that stand for types without."""

    ends_step = True


@lru_cache(maxsize=256)
def _counted_type(kind: type) -> type:
    """Return a subclass of `kind` with the same name whose instances take attributes."""

    def reduce(self: Any) -> Any:
        plain = tuple(self) if issubclass(kind, tuple) else (dict if issubclass(kind, dict) else list)(self)
        return _rebuild, (kind, plain, self.samples, self.ends_step)

    def flatten(self: Any) -> tuple[list[Any], Any]:
        names = tuple(self) if issubclass(kind, dict) else None
        return list(self.values() if names is not None else self), (names, self.samples, self.ends_step)

    def unflatten(leaves: Iterable[Any], context: Any) -> Any:
        names, samples, ends_step = context
        plain = leaves if names is None else zip(names, leaves, strict=True)
        return _rebuild(kind, plain, samples, ends_step)

    counted = type(kind.__name__, (kind, _Counted), {"__module__": kind.__module__, "__reduce__": reduce})
    if kind in _BUILTINS:  # named tuples are known to torch
        pytree.register_pytree_node(counted, flatten, unflatten)
    return counted


def _rebuild(kind: type, plain: Iterable[Any], samples: int, ends_step: bool) -> Any:
    batch = with_samples(kind._make(plain) if hasattr(kind, "_make") else kind(plain), samples)
    batch.ends_step = ends_step
    return batch


_COUNTED_BUILTINS: dict[type, Any] = {kind: _counted_type(kind) for kind in _BUILTINS}
