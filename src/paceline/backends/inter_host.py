"""Collectives between hosts: one rank of each host, point to point over gloo.

Every host sends each other host its part and receives its own: (H-1)/H of the buffer out and in for a
reduce-scatter or an all-gather, as a ring, but summed in the order of the hosts. Long buffers go in
parts: while one part is gathered, the next one is being scattered, so that the link never rests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.backends.block_reduction import Reduction, Scratch, blocks
from paceline.backends.shm.shm_collectives import span

__all__ = ["HostUnreachable", "InterHostCollectives"]

_TAG = 1 << 24
"""Our messages' tag: a program's own have small ones."""


class HostUnreachable(Exception):
    """A message to or from `rank` (in the group) failed; the text is gloo's."""

    def __init__(self, rank: int, text: str) -> None:
        self.rank = rank
        super().__init__(text)


class InterHostCollectives:
    """The counterparts of this rank on the other hosts.

    Args:
        gloo: torch's ``ProcessGroupGloo`` (its stubs lack send and recv); carries the messages.
        ranks: the counterparts' ranks in the group, by host, this one included.
        host: number of this host. timeout: seconds that a message may take.
    """

    def __init__(self, gloo: Any, ranks: Sequence[int], host: int, timeout: float) -> None:
        self._gloo, self._ranks, self.host = gloo, list(ranks), host
        self.hosts = len(ranks)
        self._others = [(host + distance) % self.hosts for distance in range(1, self.hosts)]
        self._scratch = Scratch()
        self.timeout = timeout

    def all_reduce(self, parts: Iterable[torch.Tensor], how: Reduction, ranks: int) -> Iterator[torch.Tensor]:
        """Reduce tensors over the hosts, in place, in their order; a mean divides by `ranks`.

        Part k + 1 is asked for, and sent, before part k has arrived, and each part is handed back when it is
        done: what the caller does with parts happens while others are under way.
        """
        coming = iter(parts)
        scattering = self._scatter(next(coming, None))
        gathering: _Gathering | None = None
        while scattering is not None:
            present, scattering = scattering, self._scatter(next(coming, None))
            self._finish(present.transfers)
            self._combine(present, how, ranks)
            gathering, before = self._gather(present.part), gathering
            if before is not None:
                yield self._gathered(before)
        if gathering is not None:
            yield self._gathered(gathering)

    def _scatter(self, part: torch.Tensor | None) -> _Scattering | None:
        """Start sending every host its slice of `part`; what arrives is the own slice of all hosts."""
        if part is None:
            return None
        low, high = span(part.numel(), self.hosts, self.host)
        inbox = part.new_empty(self.hosts, high - low)
        transfers = [self._receive(inbox[host], host) for host in self._others]
        transfers += [self._send(self._slice(part, host), host) for host in self._others]
        return _Scattering(part, transfers, inbox)

    def _slice(self, part: torch.Tensor, host: int) -> torch.Tensor:
        low, high = span(part.numel(), self.hosts, host)
        return part[low:high]

    def _combine(self, arrived: _Scattering, how: Reduction, ranks: int) -> None:
        own = self._slice(arrived.part, self.host)
        if own.numel():
            rows = [own if host == self.host else arrived.inbox[host] for host in range(self.hosts)]
            self.combine(rows, own, how, ranks)

    def combine(self, rows: Sequence[torch.Tensor], out: torch.Tensor, how: Reduction, ranks: int) -> None:
        """Reduce one row per host into `out`, which may be this host's row."""
        for *inputs, result in blocks([*rows, out]):
            how(inputs, result, self.host, self._scratch, ranks)

    def abandon(self) -> None:
        """Close all connections, so that the other hosts notice at once."""
        with contextlib.suppress(RuntimeError):
            self._gloo.abort()

    def _gather(self, part: torch.Tensor) -> _Gathering:
        """Start sending the own slice of `part` to every host, and receiving theirs."""
        own = self._slice(part, self.host)
        transfers = [self._receive(self._slice(part, host), host) for host in self._others]
        return _Gathering(part, transfers + [self._send(own, host) for host in self._others])

    def _gathered(self, gathering: _Gathering) -> torch.Tensor:
        self._finish(gathering.transfers)
        return gathering.part

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send ``outgoing[h]`` to host h and receive ``incoming[h]`` from it, for all other hosts."""
        transfers = [self._receive(incoming[host], host) for host in self._others]
        transfers += [self._send(outgoing[host], host) for host in self._others]
        self._finish(transfers)

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Copy `flat` from host `root` to all: a binomial tree."""
        place = (self.host - root) % self.hosts
        reach = 1
        while reach < self.hosts:
            if place < reach and place + reach < self.hosts:
                self._finish([self._send(flat, (place + reach + root) % self.hosts)])
            elif reach <= place < 2 * reach:
                self._finish([self._receive(flat, (place - reach + root) % self.hosts)])
            reach *= 2

    def _send(self, tensor: torch.Tensor, host: int) -> _Transfer:
        return _Transfer(self._gloo, tensor, self._ranks[host], out=True)

    def _receive(self, tensor: torch.Tensor, host: int) -> _Transfer:
        return _Transfer(self._gloo, tensor, self._ranks[host], out=False)

    def _finish(self, transfers: Sequence[_Transfer]) -> None:
        for transfer in transfers:
            transfer.wait(self.timeout)


@dataclass(frozen=True)
class _Scattering:
    """A part whose slices are under way to their hosts."""

    part: torch.Tensor
    transfers: list[_Transfer]
    inbox: torch.Tensor


@dataclass(frozen=True)
class _Gathering:
    """A part whose reduced slices are under way to all hosts."""

    part: torch.Tensor
    transfers: list[_Transfer]


class _Transfer:
    """A message under way."""

    def __init__(self, gloo: Any, tensor: torch.Tensor, rank: int, *, out: bool) -> None:
        self._rank = rank
        self._work: dist.Work | None = None
        if tensor.numel():
            try:
                self._work = (gloo.send if out else gloo.recv)([tensor], rank, _TAG)
            except RuntimeError as error:
                raise HostUnreachable(rank, _first_line(error)) from error

    def wait(self, timeout: float) -> None:
        if self._work is None:
            return
        try:
            self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise HostUnreachable(self._rank, _first_line(error)) from error


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0].rsplit("] ", 1)[-1]
