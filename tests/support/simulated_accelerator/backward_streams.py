"""Which stream a backward pass queues its operations on: each node's that of its forward operation.

torch's engine orders streams in C++, where the simulated ones are not known. So the same is done here, as on CUDA: the
streams of nodes wait for that of the caller; a node's stream waits for the streams of the gradients that it reads; at
the end, the caller's stream waits for all. A leaf's hooks run on the stream of its gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from simulated_accelerator import simulator as simulation
from simulated_accelerator.memory import Allocation, allocation_of
from simulated_accelerator.queues import Marker

__all__ = ["BackwardPass", "note_forward", "ordered_backward_passes", "running_pass"]

_ACCUMULATE_GRAD = 2**64 - 1  # sequence number of nodes that accumulate into leaves
_current_node = torch._C._current_autograd_node  # type: ignore[attr-defined]
_next_number = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
_forward: dict[int, int] = {}  # streams other than the default one, by the sequence number of nodes


def note_forward(number: int) -> None:
    """Note that the operation called now, whose node exists already, is queued on stream `number`."""
    if torch.is_grad_enabled():
        _forward[_next_number() - 1] = number


class BackwardPass:
    """A pass under way, that began on stream `caller`."""

    def __init__(self, caller: int) -> None:
        self._caller = self._last = caller
        self._queues = simulation.active().queues
        self._start = self._queues.mark(caller)
        self._used = {caller}
        self._for_itself = False  # Python code now keeps and waits for gradients of other streams itself
        self._node: Any = None
        self._ends: list[Marker] = []  # of the nodes before

    def stream(self) -> int:
        """Return the current stream of the node that runs."""
        node = _current_node()
        if _forward and node is not self._node:
            self._node = node
            self._ends.append(self._queues.mark(self._last))
        if node is None:  # callbacks at the end
            self._for_itself = True
            self.finish()
            number = self._caller
        else:
            sequence = node._sequence_nr()
            self._for_itself = sequence == _ACCUMULATE_GRAD
            number = self._stream_of_leaf(node) if self._for_itself else _forward.get(sequence, 0)
        if number not in self._used:
            self._used.add(number)
            self._queues.wait_for(number, self._start)
        self._last = number
        return number

    def _stream_of_leaf(self, node: Any) -> int:
        grad = node.variable.grad
        if grad is None or grad.is_cpu:
            return self._last
        allocation = allocation_of(grad)
        return allocation.stream if allocation.of_pass is self else self._last

    def own(self, allocation: Allocation) -> None:
        """Note that memory was allocated by a node of this pass."""
        allocation.of_pass, allocation.node = self, len(self._ends)

    def read(self, number: int, values: Iterable[Any], hook: bool) -> None:
        """Let stream `number` wait for the gradients among `values` that are of other streams, and keep them.

        Args:
            number: the stream.
            values: arguments of an operation.
            hook: whether Python code calls it: hooks of leaves, and callbacks at the end, have to wait for gradients
                and keep their memory themselves.
        """
        if len(self._used) == 1 or (hook and self._for_itself):
            return
        for value in values:
            if isinstance(value, Tensor):
                if value.is_cpu:
                    continue
                allocation = allocation_of(value)
                of_other = allocation.stream != number and number not in allocation.used_on
                if allocation.of_pass is self and of_other:
                    ended = allocation.node < len(self._ends)
                    marker = self._ends[allocation.node] if ended else self._queues.mark(allocation.stream)
                    self._queues.wait_for(number, marker)
                    allocation.used_on.add(number)
            elif isinstance(value, (list, tuple)):
                self.read(number, value, hook)

    def finish(self) -> None:
        """Let the caller's stream wait for all others."""
        for number in self._used - {self._caller}:
            self._queues.wait_for(self._caller, self._queues.mark(number))


_passes: list[BackwardPass] = []  # the innermost last


def running_pass() -> BackwardPass | None:
    """Return the pass under way, if there is one."""
    return _passes[-1] if _passes else None


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
            now.finish()
            _passes.remove(now)

    torch.autograd._engine_run_backward = run  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = original
        _forward.clear()
