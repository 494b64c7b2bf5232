"""Which stream a backward pass queues its operations on: each node's that of its forward operation.

torch's engine orders streams in C++, where the simulated ones are not known. As on CUDA, the first node's stream waits
for that of the caller, a node's stream for those of nodes before, and at the end the caller's stream for all. Between
nodes this waits for more than CUDA does: for everything the pass queued before, in whatever branch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from simulated_accelerator import simulator as simulation
from simulated_accelerator.memory import allocation_of

__all__ = ["backward_stream", "in_backward", "note_forward", "ordered_backward_passes", "record_gradients"]

_ACCUMULATE_GRAD = 2**64 - 1  # sequence number of nodes that accumulate into leaves
_current_node = torch._C._current_autograd_node  # type: ignore[attr-defined]
_next_number = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]


class BackwardPass:
    """A pass under way: the stream of its caller, and the one it used last."""

    def __init__(self, caller: int) -> None:
        self.caller = self.last = caller


_passes: list[BackwardPass] = []  # the innermost last
_forward: dict[int, int] = {}  # streams other than the default one, by the sequence number of nodes


def note_forward(number: int) -> None:
    """Note that the operation called now, whose node exists already, is queued on stream `number`."""
    if torch.is_grad_enabled():
        _forward[_next_number() - 1] = number


def backward_stream() -> int:
    """Return the current stream of a thread that has set none: a node's in a backward pass."""
    if not _passes:
        return 0
    now, node = _passes[-1], _current_node()
    if node is None:
        number = now.caller  # callbacks at the end
    else:
        sequence = node._sequence_nr()
        number = now.last if sequence == _ACCUMULATE_GRAD else _forward.get(sequence, 0)
    _switch(now, number)
    return number


def _switch(now: BackwardPass, number: int) -> None:
    if number != now.last:
        queues = simulation.active().queues
        queues.wait_for(number, queues.mark(now.last))
        now.last = number


def in_backward() -> bool:
    """Return whether a backward pass is under way that uses several streams."""
    return bool(_passes and _forward)


def record_gradients(number: int, values: Iterable[Any]) -> None:
    """Note that stream `number` reads memory allocated in a backward pass, as torch's engine does for gradients."""
    for value in values:
        if isinstance(value, Tensor) and not value.is_cpu:
            allocation = allocation_of(value)
            if allocation.of_backward and allocation.stream != number:
                allocation.used_on.add(number)
        elif isinstance(value, (list, tuple)):
            record_gradients(number, value)


@contextlib.contextmanager
def ordered_backward_passes(current_number: Callable[[], int]) -> Iterator[None]:
    """Order the streams of backward passes that begin in the context."""
    original = torch.autograd._engine_run_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        now = BackwardPass(current_number())
        _passes.append(now)
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            message = (
                "this process computed gradients before device sim was registered: call register() first"
            )
            raise RuntimeError(message) from error
        finally:
            _switch(now, now.caller)
            _passes.remove(now)

    torch.autograd._engine_run_backward = run  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = original
        _forward.clear()
