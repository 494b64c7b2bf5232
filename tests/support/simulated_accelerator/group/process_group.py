"""Process group "simccl": NCCL's manners for tensors of the simulated device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

from simulated_accelerator import simulator as simulation
from simulated_accelerator.call_sites import call_site
from simulated_accelerator.group.collective_calls import CollectiveCalls
from simulated_accelerator.group.collective_work import Collective, CollectiveWork, flat_twin
from simulated_accelerator.group.rank_exchange import RankExchange, bytes_of
from simulated_accelerator.queues import Launch, Marker, Waiting
from simulated_accelerator.streams import Stream, current_number

__all__ = ["BACKEND", "SimulatedProcessGroup", "register"]

BACKEND = "simccl"


class SimulatedProcessGroup(CollectiveCalls):
    """Collectives of the simulated device.

    They run on a stream of the group, which first waits for the stream that is current at the call. ``work.wait()``
    lets the current stream wait for them, not the host. Tensors of the host go to a gloo group, or are refused.

    Args:
        options: torch's options of the group.
        host: whether there is a gloo group for tensors of the host.
    """

    def __init__(self, options: Any, host: bool) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._exchange = RankExchange(options.store, rank, size, options.timeout)
        self._stream = Stream()
        self._peers: dict[int, Stream] = {}
        self._calls = 0
        self._coalesced: list[CollectiveWork] | None = None
        self._host: dist.ProcessGroupGloo | None = None
        kinds = dist.ProcessGroup.BackendType
        if host:
            store = dist.PrefixStore("host", options.store)
            self._host = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
            self._register_backend(torch.device("cpu"), kinds.GLOO, self._host)
        named = FakeProcessGroup._create_internal(
            rank, size
        )  # for torch, which looks up the devices of a group
        self._register_backend(torch.device("sim"), kinds.CUSTOM, named)
        simulation.active().queues.advance_in_background()

    def getBackendName(self) -> str:
        """Return the name under which it is registered."""
        return BACKEND

    def name(self) -> str:
        """Return the name under which it is registered."""
        return BACKEND

    def host_group(self, tensors: Sequence[Tensor]) -> dist.ProcessGroupGloo | None:
        """Return the group for `tensors` if they are the host's, None if they are the device's.

        Raises:
            RuntimeError: they are on a device that has no group, or on several.
        """
        (kind, *others) = {tensor.device.type for tensor in tensors}
        if others:
            raise RuntimeError(
                f"the tensors of a collective are on several devices: {kind}, {', '.join(others)}"
            )
        if kind == "cpu" and self._host is not None:
            return self._host
        if kind != "sim":
            raise RuntimeError(f"No backend type associated with device type {kind}")
        return None

    def run(
        self,
        function: str,
        shape_of: Tensor | None,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        tensors: list[Tensor],
        combine: Callable[[Sequence[Tensor]], None],
        *,
        op: Any = None,
        root: int | None = None,
    ) -> CollectiveWork:
        """Queue a collective on the group's stream, behind the current one.

        Args:
            function: its name.
            shape_of: the twin whose number of elements and dtype must be equal on all ranks.
            inputs: twins that it reads.
            outputs: twins that it writes.
            tensors: of the call, kept while the collective is under way.
            combine: writes the outputs, given the inputs of each rank as bytes.
            op: reduction.
            root: root rank.
        """
        if self._exchange.failure is not None:
            raise RuntimeError(f"the process group failed before: {self._exchange.failure}")
        self._calls += 1
        call = f"{function} (number {self._calls} of the group"
        if shape_of is not None:
            call += f", {shape_of.numel()} elements of {shape_of.dtype}"
        call += (
            "".join(f", {name} {value}" for name, value in (("op", op), ("root", root)) if value is not None)
            + ")"
        )
        collective = Collective(self._exchange, call, inputs, outputs, combine)
        marker = self._queue(self._stream, collective.begin, collective.arrived, collective.complete)
        work = CollectiveWork([marker], tensors, blocks=function == "barrier")
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _queue(
        self, stream: Stream, begin: Callable[[], None], over: Callable[[], bool], end: Callable[[], None]
    ) -> Marker:
        """Queue a transfer on `stream`, behind the current one, and return what marks its end."""
        queues, number, site = simulation.active().queues, stream.stream_id, call_site()
        queues.wait_for(number, queues.mark(current_number()))
        queues.put(number, Launch(begin, (), {}, site))
        queues.put(number, Waiting(over, external=True))
        marker = Marker(queues.step)
        queues.put(number, Launch(end, (), {}, site))
        queues.put(number, marker)
        return marker

    def barrier(self, opts: Any = None) -> dist.Work:
        """Let the host wait until every rank's device has reached it."""
        device = getattr(opts, "device", None)
        if self._host is not None and device is not None and device.type == "cpu":
            return self._host.barrier(opts)
        return self.run("barrier", None, [], [], [], lambda parts: None)

    # Messages between two ranks.

    def send(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        """Send a tensor to a rank."""
        (tensor,) = tensors
        if self.host_group([tensor]) is not None:
            return self._host.send([tensor], rank, tag)  # type: ignore[union-attr]
        put, _, _ = self._exchange.message(self.rank(), rank)
        twin = flat_twin(tensor)
        return self._message(rank, tensor, lambda: put(bytes_of(twin)), lambda: True, lambda: None)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> dist.Work:
        """Receive a tensor from a rank."""
        (tensor,) = tensors
        if self.host_group([tensor]) is not None:
            return self._host.recv([tensor], rank, tag)  # type: ignore[union-attr]
        _, there, read = self._exchange.message(rank, self.rank())
        twin = flat_twin(tensor)

        def complete() -> None:
            data = read()
            if len(data) != twin.nbytes:
                raise RuntimeError(f"rank {rank} sent {len(data)} bytes where {twin.nbytes} are received")
            twin.copy_(data.view(twin.dtype))

        return self._message(rank, tensor, lambda: None, there, complete)

    def _message(
        self,
        peer: int,
        tensor: Tensor,
        begin: Callable[[], None],
        over: Callable[[], bool],
        end: Callable[[], None],
    ) -> CollectiveWork:
        stream = self._peers.setdefault(peer, self._stream if self.size() == 1 else Stream())
        work = CollectiveWork([self._queue(stream, begin, over, end)], [tensor])
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> dist.Work | None:
        works, self._coalesced = self._coalesced or [], None
        return self._together(works) if works else None

    # Lifecycle.

    def shutdown(self) -> None:
        """Do nothing: connections end with the group."""

    def abort(self) -> None:
        """Do nothing: connections end with the group."""


def _create(options: Any, backend_options: Any = None) -> SimulatedProcessGroup:
    """Make the group for torch, which passes no word of the backends of other devices."""
    caller, config = sys._getframe(1), None
    while caller is not None and config is None:
        config, caller = caller.f_locals.get("backend_config"), caller.f_back
    backends = config.get_device_backend_map() if config is not None else {}
    return SimulatedProcessGroup(options, host=backends.get("cpu") == "gloo")


def register() -> None:
    """Register the backend with torch; a second call changes nothing."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["sim"])
        dist.Backend.default_device_backend_map.pop("sim")  # not part of groups without a named backend
