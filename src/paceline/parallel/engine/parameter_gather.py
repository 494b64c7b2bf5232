"""Updated parameters on their way from the ranks that updated them, awaited where they are used.

After the step of a sharded optimizer every rank sends its part of each bucket to the others. The next forward can begin
meanwhile: it needs the last layers only later. So the gathers stay in flight after ``step()``, and each is waited for
right before the first operation that reads or writes one of its parameters, whatever that operation is: a layer of the
forward, an average of the weights, ``state_dict()``. The next backward waits for what is left.

[Note: who sees a parameter] `_Watch` is a ``TorchFunctionMode``: Python calls it for each of torch's functions in this
thread, with the arguments. An argument counts by its memory, so views and aliases are seen. Anything whose memory can't
be seen (tensor subclasses, the wrappers of ``torch.func``) waits for all gathers.

[Note: who does not] Where torch's functions may be bypassed nothing is left in flight: with scripted modules in the
model, and in a process in which ``torch.compile`` was called. Other threads are not seen: a program that reads
parameters in one calls ``model.wait_for_parameters()`` before it starts it.

[Note: modes] Modes are left in reverse order, and this one ends at any time. So it goes to the bottom of the stack of
modes, where no other one's end can meet it. While it is being called it is not on the stack: then it stays, without
effect, until a forward or a step ends.

[Note: streams] On an accelerator waiting orders one stream behind the gather. So the streams that were ordered are
noted, others are ordered where they meet a function, and the watch goes on until the gathers have ended.
"""

from __future__ import annotations

import bisect
import sys
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from paceline._core.step_state import step_state
from paceline.parallel.engine.engine_protocols import InFlight
from paceline.parallel.gradient_collectives import Comm
from paceline.world.accelerator import current_stream, current_stream_key, has_streams, on_stream

__all__ = ["ParameterGather"]

_PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors whose memory can be seen."""

_ATTRIBUTES = ("grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "grad_fn", "layout", "ndim")
_METHODS = ("size", "dim", "numel", "stride", "is_floating_point", "is_complex", "is_contiguous", "__hash__")

_READ_NOTHING = frozenset(
    [
        *(getattr(getattr(Tensor, name), "__get__") for name in _ATTRIBUTES),  # noqa: B009 - torch's own constant names
        *(getattr(vars(torch._C.TensorBase)[name], "__set__") for name in ("grad", "requires_grad")),  # noqa: B009
        *(getattr(Tensor, name) for name in _METHODS),
    ]
)
"""Functions that concern a parameter but not its values, as loops over parameters call them."""


@dataclass(eq=False)
class _Flight:
    """A gather in flight.

    Attributes:
        flat: what it fills.
        pending: the collective.
        number: among the gathers of its step.
        low: address of the first byte, 0 if `flat` has no memory.
        high: one past the last byte.
    """

    flat: Tensor
    pending: InFlight
    number: int
    low: int = 0
    high: int = 0


class ParameterGather:
    """The gathers of one model that are in flight.

    Args:
        comm: the model's ranks.
        module: the model; None: nothing is known about it, so nothing is left in flight.
        note_waiting: counts seconds spent waiting.
    """

    def __init__(
        self, comm: Comm, module: torch.nn.Module | None, note_waiting: Callable[[float], None]
    ) -> None:
        self._comm, self._module, self._note_waiting = comm, module, note_waiting
        self._flights: list[_Flight] = []  # once they are left in flight, by address
        self._lows: list[int] = []
        self._highs: list[int] = []
        self._launched = 0  # since the last time that none was in flight
        self._watch = _Watch(weakref.ref(self))
        _drop_from_stack(None)  # watches of models that are gone
        self._home: Any = None  # the stream of the step, on an accelerator
        self._key: Callable[[], Hashable] = lambda: None
        self._ordered: set[Hashable] = set()  # streams that wait for every gather
        self._end: Any = None  # an event behind all gathers

    def add(self, flat: Tensor, pending: InFlight) -> None:
        """Take over a gather that fills `flat`; call `leave_in_flight` once all are launched."""
        flight = _Flight(flat, pending, self._launched)
        if type(flat) is Tensor:
            with torch._C.DisableTorchFunction():
                flight.low = flat.data_ptr()
                flight.high = flight.low + flat.nbytes
        self._flights.append(flight)
        self._launched += 1

    @property
    def launched(self) -> int:
        """Number of gathers launched since the last time that none was in flight."""
        return self._launched

    def wait_for(self, flats: Sequence[Tensor]) -> None:
        """Wait for the gathers that fill one of `flats`."""
        if self._flights:
            wanted = {id(flat) for flat in flats}
            self._wait_for([flight for flight in self._flights if id(flight.flat) in wanted])

    def leave_in_flight(self) -> None:
        """Wait where parameters are used, from now on; at once where that can't be seen."""
        if not self._flights:
            return
        if not self._can_watch():
            self.wait_all()
            return
        self._flights.sort(key=lambda flight: flight.low)
        self._note_ranges()
        device = self._flights[0].flat.device
        if has_streams(device):
            self._home, self._key = current_stream(device), current_stream_key(device)
            self._ordered, self._end = {self._key()}, None
        self._watch.begin()

    def _can_watch(self) -> bool:
        """Return whether every use of the parameters will be seen; see [Note: who does not]."""
        return (
            self._module is not None
            and all(flight.low for flight in self._flights)
            and not _compiles()
            and not any(isinstance(part, torch.jit.ScriptModule) for part in self._module.modules())
        )

    def wait_all(self) -> None:
        """Wait for all gathers, in the order in which they were launched."""
        self._wait_for(sorted(self._flights, key=lambda flight: flight.number))
        self.end_if_over()

    def end_if_over(self) -> None:
        """Watch no longer if no gather is in flight."""
        if not self._flights and (self._end is None or self._end.query()):
            self._home, self._end = None, None
            self._watch.end()

    def before_forward(self) -> None:
        """Wait for all gathers if the forward may be compiled."""
        if self._flights and _compiles():
            self.wait_all()

    def before(self, function: object, args: Iterable[Any], kwargs: dict[str, Any] | None) -> None:
        """Wait for the gathers whose parameters are among the arguments of a function."""
        if self._home is not None and self._key() not in self._ordered:
            self._order_stream()
        if self._flights and function not in _READ_NOTHING:
            self._await_used(args)
            if kwargs:
                self._await_used(kwargs.values())

    def _order_stream(self) -> None:
        """Order the current stream behind all gathers; see [Note: streams]."""
        now = current_stream(self._home.device)
        with on_stream(self._home):
            self._wait_for(list(self._flights))
        now.wait_stream(self._home)
        self._ordered.add(self._key())

    def _await_used(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._await_tensor(value)
            elif isinstance(value, list | tuple):
                self._await_used(value)

    def _await_tensor(self, tensor: Tensor) -> None:
        try:
            address = tensor.data_ptr() if type(tensor) in _PLAIN else -1
        except RuntimeError:  # no memory of its own
            address = -1
        if address < 0:
            self._wait_for(list(self._flights))
            return
        at = bisect.bisect_right(self._lows, address) - 1
        if at >= 0 and address < self._highs[at]:
            self._wait_for([self._flights[at]])

    def _wait_for(self, flights: list[_Flight]) -> None:
        if not flights:
            return
        started = time.perf_counter()
        recorder = step_state.recorder_of(self._comm)
        step_state.begin_wait()
        for flight in flights:
            self._flights.remove(flight)
            self._note_ranges()
            self._launched = self._launched if self._flights else 0
            with torch._C.DisableTorchFunction():
                flight.pending.wait()
            if recorder is not None:
                recorder.completed("gather", flight.number, flight.pending.ended, time.perf_counter())
        step_state.end_wait()
        if self._home is not None and not self._flights:
            self._end = self._home.record_event()
        self._note_waiting(time.perf_counter() - started)

    def _note_ranges(self) -> None:
        self._lows = [flight.low for flight in self._flights]
        self._highs = [flight.high for flight in self._flights]


def _compiles() -> bool:
    """Return whether ``torch.compile`` was called in this process, as far as torch says."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    backends = getattr(dynamo, "cached_backends", None)
    return backends is None or any(backend is not None for backend in backends.values())


class _Watch(TorchFunctionMode):
    """Calls a `ParameterGather` before each of torch's functions; see the notes on who sees a parameter and modes."""

    def __init__(self, gather: weakref.ref[ParameterGather]) -> None:
        super().__init__()
        self._gather = gather
        self._on_stack = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the parameters among the arguments, and call the function."""
        gather = self._gather()
        if gather is not None:
            gather.before(func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def begin(self) -> None:
        """Watch from now on."""
        if not self._on_stack:
            above = _pop_all()
            device = above.pop() if above and isinstance(above[-1], DeviceContext) else None
            for mode in (device, self, *reversed(above)):
                if mode is not None:
                    _push_mode(mode)
            self._on_stack = True

    def end(self) -> None:
        """Watch no longer, unless this runs inside a function that is being watched."""
        if self._on_stack:
            self._on_stack = not _drop_from_stack(self)

    @property
    def orphaned(self) -> bool:
        """Whether its model is gone."""
        return self._gather() is None


def _drop_from_stack(watch: _Watch | None) -> bool:
    """Remove `watch`, and those of models that are gone, from the stack of modes; return whether it was there."""
    modes = _pop_all()
    kept = [mode for mode in modes if mode is not watch and not (isinstance(mode, _Watch) and mode.orphaned)]
    for mode in reversed(kept):
        _push_mode(mode)
    return any(mode is watch for mode in modes)


def _pop_all() -> list[TorchFunctionMode]:
    """Empty the stack of modes; return them, the innermost first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())]
