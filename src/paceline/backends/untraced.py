"""Keeping torch.compile out of the backend.

Inside a compiled model, as DistributedDataParallel's may be, torch traces every Python function that is called
but its own and the standard library's. A collective has nothing to trace, and a process group is an object
that the tracer refuses to look into. So the methods that torch calls are marked to run as they are.
"""

from __future__ import annotations

from inspect import isfunction
from typing import TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["untraced"]

_Kind = TypeVar("_Kind", bound=type)


def untraced(kind: _Kind) -> _Kind:
    """Have torch.compile run the methods of a class, and all that they call, as they are."""
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for value in vars(kind).values():
        if isfunction(value):
            eval_frame.set_code_exec_strategy(value.__code__, skip)
    return kind
