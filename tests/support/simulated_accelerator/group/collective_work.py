"""A collective of the simulated group under way, and the work object and future that its call returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simulated_accelerator import memory
from simulated_accelerator import simulator as simulation
from simulated_accelerator.group.rank_exchange import Exchange, RankExchange, bytes_of
from simulated_accelerator.memory import twin_of
from simulated_accelerator.queues import Marker
from simulated_accelerator.streams import Stream, current_number

__all__ = ["Collective", "CollectiveWork", "flat_twin"]

Combine = Callable[[Sequence[Tensor]], None]


def flat_twin(tensor: Tensor) -> Tensor:
    """Return the twin of a dense tensor, in the order of its memory."""
    twin = twin_of(tensor)
    return twin.view(-1) if twin.is_contiguous() else twin.as_strided((twin.numel(),), (1,))


class Collective:
    """One collective: compares the calls of the ranks, gathers what they send, and writes the outputs.

    Between its start and its end the outputs are poisoned, and it is an error if something else writes to its memory.

    Args:
        call: the collective, its sizes and dtype, which must be equal on all ranks.
        inputs: twins that it reads.
        outputs: twins that it writes.
        combine: writes the outputs, given the inputs of each rank as bytes.
    """

    def __init__(
        self,
        ranks: RankExchange,
        call: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        combine: Combine,
    ) -> None:
        self.call, self._ranks, self._combine = call, ranks, combine
        self._inputs, self._outputs = inputs, outputs
        self._exchange = Exchange(ranks, call, sum(tensor.nbytes for tensor in inputs))
        self._error: Exception | None = None
        self._deadline = 0.0

    def begin(self) -> None:
        """Read the inputs and poison the outputs, as the device starts the collective."""
        self._error = self._ranks.failure
        self._deadline = time.monotonic() + self._ranks.timeout.total_seconds()
        empty = torch.empty(0, dtype=torch.uint8)
        self._exchange.send(torch.cat([empty, *(bytes_of(tensor) for tensor in self._inputs)]))
        queues = simulation.active().queues
        queues.check_written(self._outputs)
        for output in self._outputs:
            memory.poison(output)
        queues.under_way[self] = self.call, (*self._inputs, *self._outputs)

    def arrived(self) -> bool:
        """Return whether it can be completed, or has failed; advances it."""
        if self._error is not None:
            return True
        try:
            if self._exchange.done():
                return True
        except RuntimeError as error:
            self._error = error
            return True
        if time.monotonic() > self._deadline:
            seconds = self._ranks.timeout.total_seconds()
            self._error = RuntimeError(
                f"{self.call} timed out after {seconds:g} s: {self._exchange.missing()}"
            )
            return True
        return False

    def complete(self) -> None:
        """Write the outputs.

        Raises:
            RuntimeError: ranks called different collectives, or one did not take part.
        """
        simulation.active().queues.under_way.pop(self, None)
        try:
            if self._error is not None:
                raise self._error
            self._combine(self._exchange.read())
        except RuntimeError as error:
            self._ranks.failure = self._ranks.failure or error
            raise


_unawaited: dict[Marker, list[Tensor]] = {}


class CollectiveWork(dist.Work):
    """What a collective's call returns; nothing here blocks the host except the wait for a barrier.

    Args:
        markers: passed when it is over.
        tensors: its tensors, kept until somebody waits; also the value of its future.
    """

    def __init__(self, markers: Sequence[Marker], tensors: list[Tensor], blocks: bool = False) -> None:
        super().__init__()
        self.markers, self._tensors, self._blocks = list(markers), tensors, blocks
        self._kept: list[Tensor] | None = tensors

    def __del__(self) -> None:
        """Keep the tensors until it is over, as NCCL's watchdog does if nobody waited for it."""
        if self._kept and not self._over():
            _unawaited[self.markers[-1]] = self._kept
        for marker in [each for each in _unawaited if each.done]:
            del _unawaited[marker]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for it; a barrier lets the host wait too."""
        _wait_on_current(self.markers)
        self._kept = None
        if self._blocks:
            simulation.active().wait("barrier", self._over)
        return True

    synchronize = wait

    def block_current_stream(self) -> None:
        """Let the current stream wait for it."""
        _wait_on_current(self.markers)

    def is_completed(self) -> bool:
        """Return whether it is over."""
        if not self._over():
            simulation.active().queues.look()
        return self._over()

    def is_success(self) -> bool:
        """Return whether it is over."""
        return self._over()

    def exception(self) -> None:
        """Return None: what fails surfaces where the host waits next."""

    def result(self) -> list[Tensor]:
        """Return its tensors."""
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        """Return a future of its tensors, complete for the host at once."""
        return StreamFuture(self._tensors, self.markers)

    def _over(self) -> bool:
        return all(marker.done for marker in self.markers)


class StreamFuture(torch.futures.Future):
    """A future like those of NCCL's work: who waits for it, waits on the current stream.

    torch's own orders streams in C++, where the simulated ones are not known; C++ code that waits for it does not wait.
    """

    def __init__(self, value: Any, markers: Sequence[Marker]) -> None:
        super().__init__()
        self._markers = markers
        self.set_result(value)

    def wait(self) -> Any:
        """Let the current stream wait and return the value."""
        _wait_on_current(self._markers)
        value = super().wait()
        for tensor in _tensors_of(value):
            memory.allocation_of(tensor).used_on.add(current_number())
        return value

    def then(self, callback: Callable[[torch.futures.Future], Any]) -> torch.futures.Future:
        """Call `callback` now, with a stream current that waits for this future."""
        stream = Stream()
        with stream:
            self.wait()
            value = callback(self)
        return StreamFuture(value, [simulation.active().queues.mark(stream.stream_id)])


def _wait_on_current(markers: Sequence[Marker]) -> None:
    for marker in markers:
        simulation.active().queues.wait_for(current_number(), marker)


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if not value.is_cpu else []
    return (
        [tensor for item in value for tensor in _tensors_of(item)] if isinstance(value, (list, tuple)) else []
    )
