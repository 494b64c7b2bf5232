"""Collectives between hosts: one rank of each host, point to point over gloo.

For a reduce-scatter or an all-gather every host sends each other host its part and receives its own: (H−1)/H of the
buffer out and in, as a ring, but summed along the tree over the hosts. Long buffers are pipelined in parts: while some
parts are gathered the next ones are scattered, so the link is never idle.

[Note: order of messages] Calls may overlap: the next one begins to scatter while this one gathers. When it begins
differs between hosts, so each kind of message has its tag. Within a tag, messages follow the order of the calls, then
of the parts. For that a call reports that the next one may begin only once all its receives and scatters are posted.

Receives are posted as early as possible: gloo sends a message once its receiver is known, which saves a round trip.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.backends.block_reduction import Reduction, Scratch, split_blocks
from paceline.backends.call_steps import Stage, Steps
from paceline.backends.op_arguments import Tensors
from paceline.backends.shm.shm_all_reduce import slice_bounds

__all__ = ["HostUnreachable", "InterHostCollectives", "Progress"]

_TAG = 1 << 24
"""First tag of these messages; those of user programs are small."""

_SCATTER, _GATHER, _EXCHANGE = range(3)

_AHEAD_NBYTES = 4 << 20
"""Bytes of parts that are scattered before the first of them has to arrive: enough for hosts that lag a moment.

More of them would delay the reduced slices, which follow them on the same connections.
"""

_KEPT_NBYTES = 64 << 20
"""Most bytes of receive buffers that are kept for later calls: new memory costs as much time as adding in it."""

_Transfer = tuple[int, dist.Work]  # the other rank, and a send or receive


class Progress(NamedTuple):
    """A moment in a reduction over hosts.

    Attributes:
        done: a part that is reduced; None: no other one.
        stage: of the call.
    """

    done: Tensor | None
    stage: Stage


class _Part(NamedTuple):
    """A part under way.

    Attributes:
        tensor: the part, reduced in place.
        slices: of it, by host.
        inbox: this host's slice, from each other host.
        scattered: receives of `inbox`.
        gathered: receives of the reduced slices.
    """

    tensor: Tensor
    slices: list[Tensor]
    inbox: dict[int, Tensor]
    scattered: list[_Transfer]
    gathered: list[_Transfer]


class HostUnreachable(Exception):
    """A message to or from `rank` (in the group) failed; the text is gloo's."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(text)


class InterHostCollectives:
    """Collectives of this rank and its counterparts on the other hosts.

    Args:
        gloo: torch's ``ProcessGroupGloo`` (its stubs lack send and recv).
        ranks: ranks of the counterparts in the group, by host, this one included.
        host: index of this host.
        timeout: seconds that a message may take.
    """

    def __init__(self, gloo: Any, ranks: Sequence[int], host: int, timeout: float) -> None:
        self._gloo, self._ranks, self.host, self.timeout = gloo, list(ranks), host, timeout
        self._hosts = len(ranks)
        self._others = [(host + distance) % self._hosts for distance in range(1, self._hosts)]
        self._scratch, self._buffers = Scratch(), _Buffers()

    def all_reduce(
        self, parts: Iterable[Tensor], reduction: Reduction, *, prompt: bool = True
    ) -> Iterator[Progress]:
        """Reduce tensors over the hosts, in place, along the tree over them; yield before each wait, and reduced parts.

        Later parts are taken from `parts`, and sent, before the first ones have arrived, so the caller's work on parts
        overlaps the transfer of others.

        Args:
            parts: contiguous and 1-D.
            reduction: the reduction.
            prompt: yield each part soon after it is reduced; else none, which waits less.
        """
        upcoming = iter(parts)
        scattering, gathering, sends = deque[_Part](), deque[_Part](), list[_Transfer]()
        ahead, posted = 0, False
        while True:
            while not posted and ahead < _AHEAD_NBYTES:
                tensor = next(upcoming, None)
                posted = tensor is None
                if tensor is not None:
                    ahead += tensor.nbytes
                    scattering.append(self._post(tensor, sends))
            if not scattering:
                break
            yield Progress(None, Stage.POSTED if posted else Stage.BEGUN)
            part = scattering.popleft()
            self._wait(part.scattered)
            ahead -= part.tensor.nbytes
            own = part.slices[self.host]
            if own.numel():
                rows = [part.inbox.get(host, own) for host in range(self._hosts)]
                self.combine(rows, own, reduction)
            for each in part.inbox.values():
                self._buffers.give(each)
            sends += self._start_all(self._gloo.send, [own] * self._hosts, _GATHER)
            gathering.append(part)
            if prompt and len(gathering) > len(scattering) + 1:
                done = gathering.popleft()
                self._wait(done.gathered)
                yield Progress(done.tensor, Stage.POSTED if posted else Stage.BEGUN)
        for part in gathering:
            yield Progress(None, Stage.SENT)
            self._wait(part.gathered)
            if prompt:
                yield Progress(part.tensor, Stage.SENT)
        self._wait(sends)

    def _post(self, tensor: Tensor, sends: list[_Transfer]) -> _Part:
        """Start sending every host its slice of a part, and receiving this host's slice and the reduced ones.

        A reduced slice may replace one that is being sent: its host reduces it after that has arrived.
        """
        slices = self._slices(tensor)
        own = slices[self.host]
        inbox = {host: self._buffers.take(own.numel(), own.dtype) for host in self._others}
        scattered = self._start_all(self._gloo.recv, inbox, _SCATTER)
        gathered = self._start_all(self._gloo.recv, slices, _GATHER)
        sends += self._start_all(self._gloo.send, slices, _SCATTER)
        return _Part(tensor, slices, inbox, scattered, gathered)

    def _slices(self, part: Tensor) -> list[Tensor]:
        return [part[slice(*slice_bounds(part.numel(), self._hosts, host))] for host in range(self._hosts)]

    def combine(self, rows: Tensors, out: Tensor, reduction: Reduction) -> None:
        """Reduce one row per host into `out`, which may be this host's row."""
        for *inputs, result in split_blocks([*rows, out]):
            reduction(inputs, result, self.host, self._scratch)

    def exchange(self, outgoing: Tensors, incoming: Tensors) -> Steps:
        """Send ``outgoing[h]`` to every other host h and receive ``incoming[h]`` from it; yield before each wait."""
        transfers = self._start_all(self._gloo.recv, incoming, _EXCHANGE)
        transfers += self._start_all(self._gloo.send, outgoing, _EXCHANGE)
        for transfer in transfers:
            yield Stage.SENT
            self._wait([transfer])

    def reduce_scatter(self, output: Tensor, inputs: Tensors, reduction: Reduction) -> Steps:
        """Reduce ``inputs[h]`` over all hosts into the `output` of host h, which may be its input."""
        received = {host: self._buffers.take(output.numel(), output.dtype) for host in self._others}
        rows = [received.get(host, inputs[host]) for host in range(self._hosts)]
        yield from self.exchange(inputs, rows)
        self.combine(rows, output, reduction)
        for each in received.values():
            self._buffers.give(each)

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Copy `flat` from host `root` to all, along a binomial tree."""
        place = (self.host - root) % self._hosts
        reach = 1
        while reach < self._hosts:
            if place < reach and place + reach < self._hosts:
                self._wait(
                    self._start(self._gloo.send, flat, (place + reach + root) % self._hosts, _EXCHANGE)
                )
            elif reach <= place < 2 * reach:
                self._wait(
                    self._start(self._gloo.recv, flat, (place - reach + root) % self._hosts, _EXCHANGE)
                )
            reach *= 2

    def abort(self) -> None:
        """Close all connections, so that the other hosts notice at once."""
        with contextlib.suppress(RuntimeError):
            self._gloo.abort()

    def _start_all(
        self, call: Callable[..., dist.Work], tensors: Mapping[int, Tensor] | Sequence[Tensor], kind: int
    ) -> list[_Transfer]:
        """Start a send to, or a receive from, every other host."""
        return [each for host in self._others for each in self._start(call, tensors[host], host, kind)]

    def _start(self, call: Callable[..., dist.Work], tensor: Tensor, host: int, kind: int) -> list[_Transfer]:
        """Start a send or receive; nothing for an empty tensor."""
        rank = self._ranks[host]
        tag = _TAG + kind  # [Note: order of messages]
        with _unreachable(rank):
            return [(rank, call([tensor], rank, tag))] if tensor.numel() else []

    def _wait(self, transfers: list[_Transfer]) -> None:
        for rank, work in transfers:
            with _unreachable(rank):
                work.wait(timedelta(seconds=self.timeout))


class _Buffers:
    """Memory that is used again: more than one call may hold some of it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._nbytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return `numel` uninitialised elements."""
        nbytes = numel * dtype.itemsize
        free = self._free.get(nbytes)
        if not free:
            return torch.empty(numel, dtype=dtype)
        self._nbytes -= nbytes
        return free.pop().view(dtype)

    def give(self, buffer: Tensor) -> None:
        """Return memory that `take` has returned, and that nothing uses any more."""
        if self._nbytes + buffer.nbytes <= _KEPT_NBYTES:
            self._nbytes += buffer.nbytes
            self._free.setdefault(buffer.nbytes, []).append(buffer.view(torch.uint8))


@contextlib.contextmanager
def _unreachable(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = str(error).partition("\n")[0].rsplit("] ", 1)[-1]
        raise HostUnreachable(rank, text) from error
