"""Streams and events of the simulated device, and the device module that torch finds as ``torch.sim``."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from simulated_accelerator import simulator as simulation
from simulated_accelerator.backward_streams import BackwardPass, running_pass
from simulated_accelerator.queues import Marker

__all__ = ["Event", "Stream", "current_stream", "default_stream", "stream", "synchronize"]

_numbers = itertools.count(1)
_current = threading.local()
_DEVICE_TYPE = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[attr-defined]


def current_number() -> int:
    """Return the number of this thread's current stream."""
    number = getattr(_current, "number", None)
    if number is not None:
        return number
    now = running_pass()
    return 0 if now is None else now.stream()


def engine_pass() -> BackwardPass | None:
    """Return the backward pass that this thread works for, unless the program chose a stream here."""
    return running_pass() if getattr(_current, "number", None) is None else None


def start_on_default_stream() -> None:
    """Make the default stream this thread's; threads of the autograd engine have no stream of their own."""
    _current.number = 0


class Stream(torch.Stream):
    """A stream of the simulated device, like ``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        """Make a new stream, or the one with number `stream_id`."""
        number = kwargs.get("stream_id")
        number = next(_numbers) if number is None else number
        made = super().__new__(cls, stream_id=number, device_index=0, device_type=_DEVICE_TYPE)
        simulation.active().queues.queue(number)
        return made

    def wait_event(self, event: Event) -> None:
        """Let what is queued later on this stream wait for `event`."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Let what is queued later on this stream wait for what is queued on `stream` now."""
        queues = simulation.active().queues
        queues.wait_for(self.stream_id, queues.mark(stream.stream_id))

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, on this stream."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether this stream has nothing left to do."""
        queues = simulation.active().queues
        queues.look()
        return queues.idle(self.stream_id)

    def synchronize(self) -> None:
        """Let the host wait for this stream."""
        now = simulation.active()
        marker = now.queues.mark(self.stream_id)
        now.wait("stream", lambda: marker.done)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and (self.stream_id, self.device) == (
            other.stream_id,
            other.device,
        )

    def __hash__(self) -> int:
        return hash((self.stream_id, self.device))

    def __enter__(self) -> Stream:
        self._outer = [*getattr(self, "_outer", []), getattr(_current, "number", None)]
        _current.number = self.stream_id
        return self

    def __exit__(self, *exc: object) -> None:
        _current.number = self._outer.pop()

    def __repr__(self) -> str:
        return f"<simulated_accelerator.Stream {self.stream_id}>"


class Event:
    """An event of the simulated device, like ``torch.cuda.Event``."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._marker: Marker | None = None

    def record(self, stream: torch.Stream | None = None) -> None:
        """Record what is queued on `stream` (the current one) now."""
        number = current_number() if stream is None else stream.stream_id
        self._marker = simulation.active().queues.mark(number)

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Let what is queued later on `stream` (the current one) wait for this event."""
        if self._marker is not None:
            number = current_number() if stream is None else stream.stream_id
            simulation.active().queues.wait_for(number, self._marker)

    def query(self) -> bool:
        """Return whether what was recorded is done."""
        if self._marker is not None and not self._marker.done:
            simulation.active().queues.look()
        return self._marker is None or self._marker.done

    def synchronize(self) -> None:
        """Let the host wait for what was recorded."""
        marker = self._marker
        if marker is not None:
            simulation.active().wait("event", lambda: marker.done, marker)


def _stream_of(number: int) -> Stream:
    return Stream(stream_id=number)


def current_stream(device: Any = None) -> Stream:
    """Return this thread's current stream."""
    return _stream_of(current_number())


def default_stream(device: Any = None) -> Stream:
    """Return the stream that is current in a new thread."""
    return _stream_of(0)


def set_stream(stream: torch.Stream) -> None:
    """Make `stream` this thread's current stream."""
    _current.number = stream.stream_id


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Make `stream` this thread's current stream; None changes nothing."""
    outer = getattr(_current, "number", None)
    if stream is not None:
        _current.number = stream.stream_id
    try:
        yield
    finally:
        _current.number = outer


def synchronize(device: Any = None) -> None:
    """Let the host wait for all streams."""
    now = simulation.active()
    now.wait("device", now.queues.everything_ran)
