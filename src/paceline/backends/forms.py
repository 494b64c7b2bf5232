"""The forms in which torch makes a call, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["listed", "one_by_one", "options_of", "seconds_of"]


def one_by_one(call: Callable[..., dist.Work], pairs: Iterable[tuple[Any, Any]], opts: Any) -> dist.Work:
    """Make several calls; all but the last are done on return."""
    *before, last = [call(output, tensor, opts) for output, tensor in pairs]
    for work in before:
        work.wait()
    return last


def listed(tensors: Any) -> list[torch.Tensor]:
    """Return a list of tensors from such a list or from one tensor."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def options_of(given: Any, kind: type) -> Any:
    """Return options from options, a reduction, a root rank or nothing."""
    if isinstance(given, kind):
        return given
    options = kind()
    if isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        options.reduceOp = given
    elif isinstance(given, int):
        options.rootRank = given
    return options


def seconds_of(options: Any) -> float | None:
    """Return the time-out of a call, None if it is the group's."""
    timeout = getattr(options, "timeout", None)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else -1.0
    return seconds if seconds > 0 else None
