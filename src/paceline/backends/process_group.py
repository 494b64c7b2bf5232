"""The process group that torch sees: its calls, in whatever form, put into the few that we make.

Tensors on the CPU take our way. Everything else (CUDA tensors, sparse ones, calls that a group over several
hosts does not have) falls through to the gloo or NCCL group inside.
"""

# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
# (torch's stubs list the overloads of each call; one method here takes them all)
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from paceline.backends.async_work import untraced
from paceline.backends.block_reduction import reduction_of
from paceline.backends.group_base import GroupBase
from paceline.backends.op_arguments import (
    Dense,
    DenseList,
    are_plain,
    check_list,
    check_parts,
    dense_of,
    listed,
    nbytes_of,
    one_by_one,
    options_of,
    seconds_of,
    split,
)
from paceline.backends.op_signature import CollectiveOps, OpSignature, PointToPointOps

__all__ = ["PacelineProcessGroup"]

Tensors = Sequence[torch.Tensor]

_KEPT_NBYTES, _KEPT_WORKS = 64, 64
"""All-reduces of so few bytes are kept for a while: torch's DDP asks in its backward for the result of one that
it made before its forward (uneven inputs: how many ranks still have any), and in C++ a Python object that
nobody in Python holds has no methods any more."""


@untraced
class PacelineProcessGroup(GroupBase):
    """A ``torch.distributed`` process group over whatever makes its calls.

    That is shared memory and, between hosts, the network, or else MPI.

    Args:
        rank, size, route, mailbox, name: as for a membership.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        route: CollectiveOps | None,
        mailbox: PointToPointOps | None,
        name: str = "paceline",
    ) -> None:
        super().__init__(rank, size, route, mailbox, name)
        self._kept: deque[dist.Work] = deque(maxlen=_KEPT_WORKS)

    # Reductions.

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce one tensor over all ranks, in place."""
        tensors, opts = listed(tensors), options_of(opts, c10d.AllreduceOptions)
        if len(tensors) != 1 or not self._ours("all_reduce", tensors):
            return self._inner(tensors).allreduce(tensors, opts)
        return self._all_reduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors over all ranks, in place."""
        opts = options_of(opts, c10d.AllreduceCoalescedOptions)
        if not self._ours("all_reduce", tensors):
            return self._inner(tensors).allreduce_coalesced(list(tensors), opts)
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        hows = [reduction_of(opts.reduceOp, tensor.dtype) for tensor in tensors]
        route, ranks = self._engaged(), self.size()

        def job() -> None:
            for tensor, how in zip(tensors, hows, strict=True):
                call = self._call("all_reduce", tensor, opts, how)
                with Dense(tensor) as dense:
                    route.all_reduce(call, dense, how, ranks)

        work = self._make("all_reduce", job, tensors, opts, nbytes_of(tensors))
        if nbytes_of(tensors) <= _KEPT_NBYTES and all(map(_is_small, tensors)):
            self._kept.append(work)
        return work

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce one tensor over all ranks into that of the root."""
        tensors, opts = listed(tensors), options_of(opts, c10d.ReduceOptions)
        if not self._ours("reduce", tensors):
            return self._inner(tensors).reduce(tensors, opts)
        tensor, root = tensors[0], opts.rootRank
        how, route, ranks = reduction_of(opts.reduceOp, tensor.dtype), self._full(), self.size()

        def job() -> None:
            with Dense(tensor) as dense:
                route.reduce(self._call("reduce", tensor, opts, how, root), dense, root, how, ranks)

        return self._make("reduce", job, tensors, opts, nbytes_of(tensors))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Reduce a list of tensors over all ranks, the r-th into the output of rank r."""
        opts = options_of(opts, c10d.ReduceScatterOptions)
        if not self._ours("reduce_scatter", [*outputs, *inputs[0]]):
            return self._inner(outputs).reduce_scatter(outputs, inputs, opts)
        return self._reduce_scatter([(outputs[0], inputs[0])], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """Reduce a tensor over all ranks, its r-th part into the output of rank r."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Reduce several tensors over all ranks, the r-th part of each into the outputs of rank r."""
        opts = options_of(opts, c10d.ReduceScatterOptions)
        if not self._ours("reduce_scatter", [*outputs, *inputs]):
            one = self._inner(outputs)._reduce_scatter_base
            return one_by_one(one, zip(outputs, inputs, strict=True), opts)
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_parts("reduce_scatter", tensor, output, self.size())
            pairs.append((output, list(dense_of([tensor])[0].view(-1).chunk(self.size()))))
        return self._reduce_scatter(pairs, opts)

    # What they were called before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, pairs: list[tuple[torch.Tensor, Tensors]], opts: Any) -> dist.Work:
        hows = [reduction_of(opts.reduceOp, output.dtype) for output, _ in pairs]
        for output, inputs in pairs:
            check_list("reduce_scatter", inputs, output, self.size())
        route, ranks = self._engaged(), self.size()

        def job() -> None:
            for (output, inputs), how in zip(pairs, hows, strict=True):
                call = self._call("reduce_scatter", output, opts, how)
                with Dense(output, read=False) as dense:
                    route.reduce_scatter(call, dense, dense_of(inputs), how, ranks)

        payload = sum(nbytes_of(inputs) for _, inputs in pairs)
        return self._make("reduce_scatter", job, [output for output, _ in pairs], opts, payload)

    # Copies.

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Copy one tensor from the root to all ranks."""
        tensors, opts = listed(tensors), options_of(opts, c10d.BroadcastOptions)
        if not self._ours("broadcast", tensors):
            return self._inner(tensors).broadcast(tensors, opts)
        tensor, root, route = tensors[0], opts.rootRank, self._engaged()

        def job() -> None:
            with Dense(tensor, write=root != self.rank()) as dense:
                route.broadcast(self._call("broadcast", tensor, opts, root=root), dense, root)

        return self._make("broadcast", job, tensors, opts, nbytes_of(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the tensor of every rank r into the r-th output of all ranks."""
        opts = options_of(opts, c10d.AllgatherOptions)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(inputs) != 1 or not self._ours("all_gather", [*outputs[0], *inputs]):
            return self._inner(inputs).allgather(outputs, inputs, opts)
        return self._all_gather([(outputs[0], inputs[0])], outputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy several tensors of every rank into lists of outputs on all ranks."""
        opts = options_of(opts, c10d.AllgatherOptions)
        by_tensor = list(zip(*outputs, strict=True)) if len(outputs) == self.size() else []
        if len(by_tensor) != len(inputs) or not self._ours(
            "all_gather", [*chain.from_iterable(outputs), *inputs]
        ):
            return self._inner(inputs).allgather_coalesced(outputs, inputs, opts)
        return self._all_gather(list(zip(by_tensor, inputs, strict=True)), outputs, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> dist.Work:
        """Copy the tensor of every rank into one tensor on all ranks, one behind the other."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy several tensors of every rank into one tensor each on all ranks."""
        opts = options_of(opts, c10d.AllgatherOptions)
        dense = all(output.is_contiguous() for output in outputs)
        if not dense or not self._ours("all_gather", [*outputs, *inputs]):
            one = self._inner(inputs)._allgather_base
            return one_by_one(one, zip(outputs, inputs, strict=True), opts)
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_parts("all_gather", output, tensor, self.size())
            pairs.append((list(output.view(-1).chunk(self.size())), tensor))
        return self._all_gather(pairs, list(outputs), opts)

    # What they were called before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, pairs: list[tuple[Tensors, torch.Tensor]], result: Any, opts: Any) -> dist.Work:
        for outputs, tensor in pairs:
            check_list("all_gather", outputs, tensor, self.size())
        route = self._engaged()

        def job() -> None:
            for outputs, tensor in pairs:
                with DenseList(outputs) as places:
                    call = self._call("all_gather", tensor, opts)
                    route.all_gather(call, places, dense_of([tensor])[0])

        return self._make("all_gather", job, result, opts, sum(nbytes_of(outputs) for outputs, _ in pairs))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the tensor of every rank r into the r-th output of the root."""
        opts = options_of(opts, c10d.GatherOptions)
        places, tensor, root = list(outputs[0]) if outputs else [], inputs[0], opts.rootRank
        if not self._ours("gather", [*places, tensor]):
            return self._inner(inputs).gather(outputs, inputs, opts)
        if root == self.rank():
            check_list("gather", places, tensor, self.size())
        route = self._full()

        def job() -> None:
            with DenseList(places) as dense:
                call = self._call("gather", tensor, opts, root=root)
                route.gather(call, dense, dense_of([tensor])[0], root)

        return self._make("gather", job, outputs, opts, nbytes_of(places) or tensor.nbytes)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the r-th tensor of the root into the output of rank r."""
        opts = options_of(opts, c10d.ScatterOptions)
        output, given, root = outputs[0], list(inputs[0]) if inputs else [], opts.rootRank
        if not self._ours("scatter", [output, *given]):
            return self._inner(outputs).scatter(outputs, inputs, opts)
        if root == self.rank():
            check_list("scatter", given, output, self.size())
        route = self._full()

        def job() -> None:
            with Dense(output, read=False) as dense:
                route.scatter(self._call("scatter", output, opts, root=root), dense, dense_of(given), root)

        return self._make("scatter", job, outputs, opts, nbytes_of(given) or output.nbytes)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the r-th tensor of every rank q into the q-th output of rank r."""
        opts = options_of(opts, c10d.AllToAllOptions)
        if not self._ours("all_to_all", [*outputs, *inputs]):
            return self._inner(outputs).alltoall(outputs, inputs, opts)
        route = self._full()

        def job() -> None:
            with DenseList(outputs) as dense:
                route.all_to_all(OpSignature("all_to_all", timeout=seconds_of(opts)), dense, dense_of(inputs))

        return self._make("all_to_all", job, outputs, opts, max(nbytes_of(outputs), nbytes_of(inputs)))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Copy the r-th part of every rank's tensor into rank r's output, one behind the other.

        Splits count rows of the first dimension; without them all parts are equal.
        """
        opts = options_of(opts, c10d.AllToAllOptions)
        if not output.is_contiguous() or not self._ours("all_to_all", [output, tensor]):
            inner = self._inner([output])
            return inner.alltoall_base(output, tensor, list(output_splits), list(input_splits), opts)
        places = split("output", output, output_splits, self.size())
        return self.alltoall(places, split("input", dense_of([tensor])[0], input_splits, self.size()), opts)

    alltoall_base = all_to_all_single  # what it was called before torch 2.13

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return when all ranks have called."""
        opts = options_of(opts, c10d.BarrierOptions)
        if not self._ours("barrier", []):
            return self._inner().barrier(opts)
        call, route = OpSignature("barrier", timeout=seconds_of(opts)), self._engaged()
        return self._make("barrier", lambda: route.barrier(call), [], opts, 0)

    # Messages from one rank to another.

    def send(self, tensors: Any, target: int, tag: int = 0) -> dist.Work:
        """Send one tensor to rank `target`."""
        if self._mailbox is None or not are_plain(tensors):
            return self._inner(tensors).send(tensors, target, tag)
        return self._mailbox.send(dense_of(tensors)[0], target, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        """Receive one tensor from rank `source`."""
        if self._mailbox is None or not are_plain(tensors):
            return self._inner(tensors).recv(tensors, source, tag)
        return self._mailbox.receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive one tensor from whoever sends first."""
        if self._mailbox is None or not are_plain(tensors):
            return self._inner(tensors).recv_anysource(tensors, tag)
        return self._mailbox.receive(tensors[0], None, tag)


def _is_small(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no view of a large one."""
    return tensor.untyped_storage().nbytes() <= _KEPT_NBYTES
