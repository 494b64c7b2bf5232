"""Updated parameters on their way from the ranks that updated them, awaited where they are used.

After the step of a sharded optimizer every rank sends its part of each bucket to the others. The next forward can begin
meanwhile: it needs the last layers only later. So the gathers stay in flight after ``step()``, and each is waited for
right before the first operation that reads or writes one of its parameters, whatever that operation is: a layer of the
forward, an average of the weights, ``state_dict()``. The next backward waits for what is left.

[Note: who sees a parameter] `_Watch` is a ``TorchFunctionMode``: Python calls it for each of torch's functions in this
thread, with the arguments. An argument counts by its memory, so views and aliases are seen. Anything whose memory can't
be seen (tensor subclasses, the wrappers of ``torch.func``) waits for all gathers.

[Note: who does not] Where torch's functions may be bypassed nothing is left in flight: with scripted modules in the
model, and in a process with scripted functions or in which ``torch.compile`` was called. A compilation that begins
later waits for everything first. Other threads are not seen, but for the wrapped model's forward, which waits for
everything there. Neither are functions of extension modules, methods of process groups, or NumPy arrays and storages
that were taken before: a program that passes parameters there calls ``model.wait_for_parameters()`` first.

[Note: modes] Modes are left in reverse order, and this one ends at any time. So it goes to the bottom of the stack of
modes, where no other one's end can meet it. While it is being called it is not on the stack: then it stays, without
effect, until a forward or a step ends.

[Note: deleted models] A program may drop the wrapper and go on with the bare module, or with its parameters. So a watch
keeps its gathers until all were waited for, or until the module is gone and another model is wrapped.

[Note: streams] On an accelerator waiting orders one stream behind the gather. So the streams that were ordered are
noted, others are ordered where they meet a function, and the watch goes on until the gathers have ended.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from paceline._core.step_state import step_state
from paceline.parallel.engine.engine_protocols import InFlight
from paceline.parallel.gradient_collectives import Comm
from paceline.world.accelerator import current_stream, current_stream_key, has_streams, on_stream

__all__ = ["ParameterGather"]

_ATTRIBUTES = (
    "grad",
    "requires_grad",
    "shape",
    "dtype",
    "device",
    "is_leaf",
    "grad_fn",
    "layout",
    "ndim",
    "nbytes",
)
_METHODS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "is_floating_point",
    "is_contiguous",
    "__hash__",
)

_READ_NOTHING = frozenset(
    [
        *(getattr(getattr(Tensor, name), "__get__") for name in _ATTRIBUTES),  # noqa: B009 - torch's own constant names
        *(getattr(vars(torch._C.TensorBase)[name], "__set__") for name in ("grad", "requires_grad")),  # noqa: B009
        *(getattr(Tensor, name) for name in _METHODS),
    ]
)
"""Functions that concern a parameter but not its values, as loops over parameters call them.

``is_complex`` is not one of them: before torch 2.13 it is all that the functions of torch.distributed call.
"""

_address_of = Tensor.data_ptr


@dataclass(eq=False)
class _Flight:
    """A gather in flight.

    Attributes:
        flat: what it fills.
        pending: the collective.
        number: among the gathers of its step.
        low: address of the first byte, 0 if `flat` has no memory.
        error: why waiting failed; `flat` is not usable then.
    """

    flat: Tensor
    pending: InFlight
    number: int
    low: int = 0
    error: Exception | None = None


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
        self._comm, self._note_waiting = comm, note_waiting
        self._module = None if module is None else weakref.ref(module)
        self._flights: list[_Flight] = []  # by address
        self._bounds: list[int] = []  # of each flight: the first byte, one past the last
        self._launched = 0  # since the last time that none was in flight
        self._watch, self._thread = _Watch(None), 0
        _drop_idle(orphaned=True)
        self._home: Any = None  # the stream of the step, on an accelerator
        self._key: Callable[[], Hashable] = lambda: None
        self._ordered: set[Hashable] = set()  # streams that wait for every gather
        self._end: Any = None  # an event behind all gathers

    def add(self, flat: Tensor, pending: InFlight) -> None:
        """Take over a gather that fills `flat`; call `leave_in_flight` once all are launched."""
        flight, high = _Flight(flat, pending, self._launched), 0
        if type(flat) is Tensor:
            with torch._C.DisableTorchFunction():
                flight.low = flat.data_ptr()
                high = flight.low + flat.nbytes
        at = bisect_right(self._bounds, flight.low)
        self._bounds[at:at] = (flight.low, high)
        self._flights.insert(at >> 1, flight)
        self._launched += 1

    @property
    def launched(self) -> int:
        """Number of gathers launched since the last time that none was in flight."""
        return self._launched

    @property
    def orphaned(self) -> bool:
        """Whether the model is gone."""
        return self._module is not None and self._module() is None

    def wait_for(self, flats: Sequence[Tensor]) -> None:
        """Wait for the gathers that fill one of `flats`."""
        if self._flights:
            wanted = {id(flat) for flat in flats}
            self._wait_for([flight for flight in self._flights if id(flight.flat) in wanted])

    def leave_in_flight(self) -> None:
        """Wait where parameters are used, from now on; at once where that can't be seen."""
        if not self.watch():
            self.wait_all()

    def watch(self) -> bool:
        """Wait where parameters are used, from now on; return False if that can't be seen."""
        if not self._flights:
            return True
        if not self._can_watch():
            return False
        device = self._flights[0].flat.device
        if has_streams(device):
            self._home, self._key = current_stream(device), current_stream_key(device)
            self._ordered, self._end = {self._key()}, None
        self._watch.gather = None  # it may be in another thread, or one that is being called
        self._watch, self._thread = _Watch(self), threading.get_ident()
        self._watch.begin()
        return True

    def _can_watch(self) -> bool:
        """Return whether every use of the parameters will be seen; see [Note: who does not]."""
        module = None if self._module is None else self._module()
        return (
            module is not None
            and all(flight.low for flight in self._flights)
            and not _compiled.may_run()
            and not _compiled.scripts_may_run(module)
        )

    def abandon(self) -> None:
        """Forget the gathers in flight, whose ranks may be gone."""
        self._flights, self._bounds, self._launched = [], [], 0
        self._home, self._end, self._watch.gather = None, None, None
        _drop_idle()

    def wait_all(self) -> None:
        """Wait for all gathers, in the order in which they were launched."""
        self._wait_for(sorted(self._flights, key=lambda flight: flight.number))
        self.end_if_over()

    def end_if_over(self) -> None:
        """Watch no longer if no gather is in flight."""
        if not self._flights and (self._end is None or self._end.query()):
            self._home, self._end = None, None
            self._watch.gather = None
            _drop_idle()

    def finish(self) -> None:
        """Wait until all gathers have ended, on an accelerator too, and watch no longer."""
        self.wait_all()
        if self._end is not None:
            self._end.synchronize()
            self.end_if_over()

    def before_forward(self) -> None:
        """Wait for all gathers if the step was in another thread, whose functions alone are watched."""
        if self._flights and threading.get_ident() != self._thread:
            self.wait_all()

    def before(self, values: Iterable[Any]) -> None:
        """Wait for the gathers whose parameters are among the arguments of a function."""
        if self._home is not None:
            self._order_stream()
        bounds = self._bounds
        for value in values:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                try:
                    address = _address_of(value)
                except RuntimeError:  # no memory of its own
                    address = 0
                at = bisect_right(bounds, address)
                if at & 1:
                    self._wait_for([self._flights[at >> 1]])
                elif not address and value.numel():
                    self._wait_for(list(self._flights))
            elif isinstance(value, list | tuple):
                self.before(value)
            elif isinstance(value, dict):
                self.before(value.values())
            elif isinstance(value, Tensor):
                self._wait_for(list(self._flights))

    def _order_stream(self) -> None:
        """Order the current stream behind all gathers; see [Note: streams]."""
        if self._key() not in self._ordered:
            now = current_stream(self._home.device)
            with on_stream(self._home):
                self._wait_for(list(self._flights))
            now.wait_stream(self._home)
            self._ordered.add(self._key())
        if self.orphaned:  # this alone frees the memory
            self._wait_for([flight for flight in self._flights if _has_ended(flight.pending)])
            self.end_if_over()

    def _wait_for(self, flights: list[_Flight]) -> None:
        if not flights:
            return
        started = time.perf_counter()
        step_state.begin_wait()
        try:
            for flight in flights:
                self._wait(flight)
        finally:
            step_state.end_wait()
            self._note_waiting(time.perf_counter() - started)
        if not self._flights:
            self._launched = 0
            if self._home is None:
                self._watch.gather = None
            else:
                self._end = self._home.record_event()

    def _wait(self, flight: _Flight) -> None:
        if flight.error is not None:
            raise flight.error.with_traceback(None)
        try:
            with torch._C.DisableTorchFunction():
                flight.pending.wait()
        except Exception as error:
            flight.error = error
            raise
        at = self._flights.index(flight)
        del self._flights[at], self._bounds[2 * at : 2 * at + 2]
        if (recorder := step_state.recorder_of(self._comm)) is not None:
            recorder.completed("gather", flight.number, flight.pending.ended, time.perf_counter())


def _has_ended(pending: InFlight) -> bool:
    pending.poll()
    return pending.ended is not None


class _CompiledCode:
    """What this process has compiled, as far as torch says; it bypasses torch's functions."""

    def __init__(self) -> None:
        self._seen = False
        self._known_scripts = 0  # all of them torch's own

    def may_run(self) -> bool:
        """Return whether ``torch.compile`` was called; otherwise the first compilation will be noticed."""
        dynamo = sys.modules.get("torch._dynamo")
        backends = getattr(getattr(dynamo, "eval_frame", None), "cached_backends", None)
        callbacks = getattr(getattr(dynamo, "callback_handler", None), "start_callbacks", None)
        if backends is None or callbacks is None or any(backend is not None for backend in backends.values()):
            self._seen = True
        elif self._begins not in callbacks:  # torch._dynamo.reset() forgets them
            callbacks.append(self._begins)
        return self._seen

    def _begins(self, *_: object) -> None:
        """Wait for all that this thread watches: no mode may be on the stack that the compiler sees."""
        self._seen = True
        for mode in torch.overrides._get_current_function_mode_stack():
            if isinstance(mode, _Watch) and mode.gather is not None:
                mode.gather.finish()

    def scripts_may_run(self, module: torch.nn.Module) -> bool:
        """Return whether the model has modules of TorchScript, or the program functions."""
        unit = getattr(sys.modules.get("torch.jit._state"), "_python_cu", None)
        if unit is None:
            return True
        functions = unit.get_functions()
        if len(functions) > self._known_scripts:
            if not all(each.qualified_name.startswith("__torch__.torch.") for each in functions):
                return True
            self._known_scripts = len(functions)
        return any(isinstance(part, torch.jit.ScriptModule) for part in module.modules())


_compiled = _CompiledCode()


class _Watch(TorchFunctionMode):
    """Calls a `ParameterGather` before each of torch's functions; see the notes on who sees a parameter and modes.

    Args:
        gather: what it calls; None: it is idle.
    """

    def __init__(self, gather: ParameterGather | None) -> None:
        super().__init__()
        self.gather = gather

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the parameters among the arguments, and call the function."""
        gather = self.gather
        if gather is not None and func not in _READ_NOTHING:
            gather.before(args)
            if kwargs:
                gather.before(kwargs.values())
        return func(*args, **kwargs) if kwargs else func(*args)

    def begin(self) -> None:
        """Watch this thread's functions from now on."""
        _drop_idle()
        above = _pop_all()
        bottom: list[TorchFunctionMode] = []
        # that of set_default_device; the one of `with torch.device(…)` is like any other mode
        if above and isinstance(above[-1], DeviceContext) and hasattr(above[-1], "old_device"):
            bottom.append(above.pop())
        for mode in (*bottom, self, *reversed(above)):
            _push_mode(mode)


def _drop_idle(*, orphaned: bool = False) -> None:
    """Remove idle watches from this thread's stack of modes, and with `orphaned` those of models that are gone."""
    modes = _pop_all()
    for mode in reversed(modes):
        gather = mode.gather if isinstance(mode, _Watch) else None
        if not isinstance(mode, _Watch) or (gather is not None and not (orphaned and gather.orphaned)):
            _push_mode(mode)


def _pop_all() -> list[TorchFunctionMode]:
    """Empty the stack of modes; return them, the innermost first."""
    return [_pop_mode() for _ in range(_len_torch_function_stack())]
