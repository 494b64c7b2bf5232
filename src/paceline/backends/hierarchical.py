"""Collectives over several hosts: shared memory inside a host, the network between hosts.

An all-reduce over H hosts with L ranks each:

    1. inside every host, reduce-scatter: rank l of a host holds the host's sum of slice l
    2. between hosts, all-reduce of slice l among the ranks l of all hosts
    3. inside every host, all-gather

Per host 2(H−1)/H of the buffer goes out and in, for any number of ranks per host; a ring over all N ranks sends
2(N−1)/N. Where hosts have different numbers of ranks, the first rank of each transfers everything.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.backends.block_reduction import Reduction, get_reduction
from paceline.backends.call_steps import Steps
from paceline.backends.inter_host import HostUnreachable, InterHostCollectives
from paceline.backends.op_arguments import Tensors, copy_unless_same, overlap, same_memory
from paceline.backends.op_signature import OpSignature
from paceline.backends.shm.control_block import EAGER_NBYTES, GroupFailure
from paceline.backends.shm.peer_sockets import PeerInfo
from paceline.backends.shm.shm_collectives import ShmCollectives
from paceline.errors import CollectiveError

__all__ = ["HierarchicalCollectives"]

_REPORT_SECONDS = 1.5
"""Wait for the report of a lost rank's own host before the rank at the other end is held responsible."""

_FAILURE_KEY = "failure"
_PART_NBYTES = 1 << 20
"""Bytes of a rank's slice that are sent over the network at a time, while the next ones are reduced on the host."""


class HierarchicalCollectives:
    """`CollectiveOps` over several hosts; if all have the same number of ranks, with reduce-scatter and all-gather.

    Args:
        intra: collectives of the ranks of this host.
        inter: collectives with the counterparts on the other hosts.
        hosts: the peers of each host, in the order of the hosts.
        store: of the group; carries reports of failures between hosts.
    """

    shares_memory = True

    def __init__(
        self,
        intra: ShmCollectives,
        inter: InterHostCollectives,
        hosts: Sequence[Sequence[PeerInfo]],
        store: dist.Store,
    ) -> None:
        self._intra, self._inter, self._store = intra, inter, store
        self._ranks = [[peer.rank for peer in host] for host in hosts]
        self._peers = {peer.rank: peer for host in hosts for peer in host}
        self._even = len({len(host) for host in hosts}) == 1
        self._is_leader = intra.index == 0
        consecutive = [rank for ranks in self._ranks for rank in ranks] == list(range(len(self._peers)))
        self.along_tree = self._even and consecutive and intra.size & (intra.size - 1) == 0
        even_only = {"reduce_scatter", "all_gather"} if self._even else set()
        self.ops = frozenset({"barrier", "all_reduce", "broadcast"} | even_only)
        self._alone = all(len(host) == 1 for host in hosts)
        self.overlapping = frozenset({"all_reduce", "reduce_scatter", "all_gather"} if self._alone else ())

    @property
    def timeout(self) -> float:
        """Seconds that a call waits for a rank."""
        return self._intra.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._intra.timeout = self._inter.timeout = seconds

    def barrier(self, call: OpSignature) -> None:
        with self._failures_shared():
            self._intra.barrier(call)
            if self._is_leader:
                token = torch.zeros(1, dtype=torch.uint8)
                self._reduce_between(token, get_reduction(dist.ReduceOp.MAX, token.dtype, 1))
            self._intra.barrier(call)

    def all_reduce(self, call: OpSignature, tensor: Tensor, reduction: Reduction) -> Steps | None:
        flat, ranks = tensor.view(-1), self._intra.size
        if self._alone:
            return self._all_reduce_alone(flat, reduction)
        body = flat.numel() // ranks * ranks if self._even and flat.nbytes > EAGER_NBYTES else 0
        with self._failures_shared():
            if body:
                self._all_reduce_slices(call, flat[:body], reduction)
            if body < flat.numel():
                rest = flat[body:]
                self._all_reduce_by_leaders(replace(call, numel=rest.numel()), rest, reduction)
        return None

    def _all_reduce_alone(self, flat: Tensor, reduction: Reduction) -> Steps:
        """All-reduce among hosts of one rank, in steps."""
        with self._failures_shared():
            self._intra.check()
            for progress in self._inter.all_reduce(self._parts(flat), reduction, prompt=False):
                yield progress.stage

    def _all_reduce_slices(self, call: OpSignature, flat: Tensor, reduction: Reduction) -> None:
        """All-reduce a tensor that divides into one slice per rank of a host, part by part."""
        ranks, index, host_sum = self._intra.size, self._intra.index, reduction.as_sum()
        parts = [part.chunk(ranks) for part in flat.split(_PART_NBYTES // flat.element_size() * ranks)]

        def reduced_on_host() -> Iterator[Tensor]:
            for slices in parts:
                own = slices[index]
                self._intra.reduce_scatter(replace(call, numel=own.numel()), own, slices, host_sum)
                yield own

        reduced = (
            progress.done
            for progress in self._inter.all_reduce(reduced_on_host(), reduction)
            if progress.done is not None
        )
        for slices, own in zip(parts, reduced, strict=True):
            self._intra.all_gather(replace(call, numel=own.numel()).as_copy("all_gather"), slices, own)

    def _all_reduce_by_leaders(self, call: OpSignature, flat: Tensor, reduction: Reduction) -> None:
        """All-reduce through the first rank of every host: for few bytes, or hosts of different size."""
        self._intra.reduce(call, flat, 0, reduction.as_sum())
        if self._is_leader:
            self._reduce_between(flat, reduction)
        self._intra.broadcast(call.as_copy("broadcast", root=0), flat, 0)

    def _reduce_between(self, flat: Tensor, reduction: Reduction) -> None:
        for _ in self._inter.all_reduce(self._parts(flat), reduction, prompt=False):
            pass

    def _parts(self, flat: Tensor) -> Tensors:
        return flat.split(_PART_NBYTES // flat.element_size())

    def reduce_scatter(
        self, call: OpSignature, output: Tensor, inputs: Tensors, reduction: Reduction
    ) -> Steps | None:
        if self._alone:
            return self._reduce_scatter_alone(output, [each.view(-1) for each in inputs], reduction)
        host, host_sum = self._inter.host, reduction.as_sum()
        sums = [torch.empty_like(output).view(-1) for _ in self._ranks]  # over this host, one per target host
        received = [torch.empty_like(each) for each in sums]
        with self._failures_shared():
            for own, targets in zip(sums, self._ranks, strict=True):
                self._intra.reduce_scatter(call, own, [inputs[rank].view(-1) for rank in targets], host_sum)
            for _ in self._inter.exchange(sums, received):
                pass
            received[host] = sums[host]
            self._inter.combine(received, output.view(-1), reduction)
        return None

    def _reduce_scatter_alone(self, output: Tensor, inputs: Tensors, reduction: Reduction) -> Steps:
        """Reduce-scatter among hosts of one rank, in steps."""
        own = inputs[self._inter.host]
        result = output.view(-1)
        if overlap([result], inputs) and not same_memory(result, own):  # which are still being sent
            result = torch.empty_like(own)
        with self._failures_shared():
            self._intra.check()
            yield from self._inter.reduce_scatter(result, inputs, reduction)
        copy_unless_same(output.view(-1), result)

    def all_gather(self, call: OpSignature, outputs: Tensors, tensor: Tensor) -> Steps | None:
        if self._alone:
            return self._all_gather_alone([each.view(-1) for each in outputs], tensor.view(-1))
        host, index = self._inter.host, self._intra.index
        column = [outputs[ranks[index]].view(-1) for ranks in self._ranks]  # of the counterparts
        if column[host].data_ptr() != tensor.data_ptr():
            column[host].copy_(tensor.view(-1))
        with self._failures_shared():
            for _ in self._inter.exchange([column[host]] * len(column), column):
                pass
            for ranks, piece in zip(self._ranks, column, strict=True):
                self._intra.all_gather(call, [outputs[rank] for rank in ranks], piece)
        return None

    def _all_gather_alone(self, outputs: Tensors, tensor: Tensor) -> Steps:
        """All-gather among hosts of one rank, in steps."""
        own = outputs[self._inter.host]
        copy_unless_same(own, tensor)
        with self._failures_shared():
            self._intra.check()
            yield from self._inter.exchange([own] * len(outputs), outputs)

    def broadcast(self, call: OpSignature, tensor: Tensor, root: int) -> None:
        source = next(host for host, ranks in enumerate(self._ranks) if root in ranks)
        at_source, index = self._inter.host == source, self._intra.index
        carriers = self._intra.size if self._even else 1
        flat = tensor.view(-1)
        length = -(-flat.numel() // carriers)
        slices = [flat[first * length : (first + 1) * length] for first in range(carriers)]
        with self._failures_shared():
            if at_source:
                local_root = self._ranks[source].index(root)
                self._intra.broadcast(replace(call, root=local_root), tensor, local_root)
            if index < carriers:
                self._inter.broadcast(slices[index], source)
            if not at_source:
                for carrier, piece in enumerate(slices):
                    self._intra.broadcast(replace(call, numel=piece.numel(), root=carrier), piece, carrier)

    def report_error(self, error: BaseException) -> None:
        self._intra.report_error(error)
        self._publish_failure()

    def set_background(self, background: bool) -> None:
        self._intra.set_background(background)

    def note_step(self, step: int) -> None:
        self._intra.note_step(step)

    def cancel(self) -> None:
        self._intra.cancel()
        self._inter.abort()

    def interrupt(self, reason: CollectiveError) -> None:
        """Make a pending call of another thread raise `reason` once it waits inside this host or gloo returns.

        gloo may not return from a send whose bytes are with a host that takes no more of them: it does not report
        that its connection has ended (``Pair::signalException``, April 2026).
        """
        self._intra.interrupt(reason)

    def close(self) -> None:
        self._intra.close()

    # Failures: detected inside this host, or reported by another one.

    @contextlib.contextmanager
    def _failures_shared(self) -> Iterator[None]:
        """Report a failure inside this host to the other hosts, and raise one between hosts with its cause."""
        try:
            yield
        except CollectiveError:
            self._publish_failure()
            self._inter.abort()
            raise
        except HostUnreachable as error:
            if self._intra.interrupted is not None:
                raise self._intra.interrupted from error
            block = self._intra.control
            failure = block.first_failure() or self._wait_for_report() or self._unreachable(error)
            block.post_failure(failure)
            self._inter.abort()
            raise self._intra.set_failed(failure) from error

    def _publish_failure(self) -> None:
        failure = self._intra.control.first_failure()
        if failure is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone with the host that failed
                self._store.set(_FAILURE_KEY, json.dumps(asdict(failure)))

    def _wait_for_report(self) -> GroupFailure | None:
        """Return the failure that another host reports, waiting for it a moment."""
        deadline = time.monotonic() + _REPORT_SECONDS
        while time.monotonic() < deadline and self._intra.interrupted is None:
            try:
                if self._store.check([_FAILURE_KEY]):
                    return GroupFailure(**json.loads(self._store.get(_FAILURE_KEY)))
            except RuntimeError:
                return None
            try:
                self._intra.check()
            except CollectiveError:
                return self._intra.control.first_failure()
            time.sleep(0.02)
        return None

    def _unreachable(self, error: HostUnreachable) -> GroupFailure:
        peer, text = self._peers[error.rank], str(error).lower()
        silent = "timed out" in text or "timeout" in text
        problem = f"did not answer within {self.timeout:g} s" if silent else f"can't be reached ({error})"
        return GroupFailure(peer.world_rank, peer.name, problem, dead=not silent)
