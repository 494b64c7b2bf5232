"""The process group that torch sees: maps torch's calls, in all their forms, to the operations of `CollectiveOps`.

Strided CPU tensors go to `CollectiveOps`. Everything else (CUDA or sparse tensors, calls that a group over several
hosts lacks) falls back to the gloo or NCCL group inside.
"""

# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
# (torch's stubs list the overloads of each call; one method here takes them all)
from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch import Tensor

from paceline.backends.block_reduction import get_reduction
from paceline.backends.call_steps import Steps
from paceline.backends.collective_work import untraced
from paceline.backends.op_arguments import (
    Contiguous,
    ContiguousList,
    Tensors,
    are_strided_cpu,
    as_list,
    call_each,
    check_list,
    check_parts,
    contiguous,
    parse_options,
    split_rows,
    timeout_of,
    total_nbytes,
)
from paceline.backends.op_signature import CollectiveOps, OpSignature
from paceline.backends.process_group_base import GroupBase

__all__ = ["PacelineProcessGroup"]

_KEPT_NBYTES = 64
"""All-reduces up to this size stay referenced for a while, see `_all_reduce`."""


@untraced
class PacelineProcessGroup(GroupBase):
    """A ``torch.distributed`` process group over shared memory and, between hosts, the network; or over MPI."""

    # Reductions.

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work | None:
        """Reduce one tensor over all ranks, in place; None: done."""
        if self._repeated is not None and self.spans is None:
            nbytes = self._repeated.all_reduce(tensors, opts)
            if nbytes is not None:
                self.calls += 1
                self.payload_nbytes += nbytes
                return None
        tensors, opts = as_list(tensors), parse_options(opts, c10d.AllreduceOptions)
        ops = self._select("all_reduce", tensors) if len(tensors) == 1 else None
        if ops is None:
            return self._fallback(tensors).allreduce(tensors, opts)
        return self._all_reduce(ops, tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors over all ranks, in place."""
        opts = parse_options(opts, c10d.AllreduceCoalescedOptions)
        ops = self._select("all_reduce", tensors)
        if ops is None:
            return self._fallback(tensors).allreduce_coalesced(list(tensors), opts)
        return self._all_reduce(ops, tensors, opts)

    def _all_reduce(self, ops: CollectiveOps, tensors: Tensors, opts: Any) -> dist.Work:
        reductions = [get_reduction(opts.reduceOp, tensor.dtype, self.size()) for tensor in tensors]

        def job() -> Steps:
            for tensor, reduction in zip(tensors, reductions, strict=True):
                call = self._signature("all_reduce", tensor, opts, reduction)
                with Contiguous(tensor) as memory:
                    yield from ops.all_reduce(call, memory, reduction) or ()

        nbytes = total_nbytes(tensors)
        work = self._submit(ops, "all_reduce", job, tensors, opts, nbytes=nbytes)
        # torch's DDP waits in its backward for a small all-reduce that it started before its forward (uneven inputs:
        # how many ranks still have any). In C++ a Python object that nothing in Python references loses its methods.
        if nbytes <= _KEPT_NBYTES and all(map(_has_small_storage, tensors)):
            self._kept.append(work)
        return work

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce one tensor over all ranks into that of the root."""
        tensors, opts = as_list(tensors), parse_options(opts, c10d.ReduceOptions)
        ops = self._select("reduce", tensors)
        if ops is None:
            return self._fallback(tensors).reduce(tensors, opts)
        tensor, root = tensors[0], opts.rootRank
        reduction = get_reduction(opts.reduceOp, tensor.dtype, self.size())

        def job() -> None:
            with Contiguous(tensor) as memory:
                call = self._signature("reduce", tensor, opts, reduction, root)
                ops.reduce(call, memory, root, reduction)

        return self._submit(ops, "reduce", job, tensors, opts, nbytes=total_nbytes(tensors))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Reduce a list of tensors over all ranks, the r-th into the output of rank r."""
        opts = parse_options(opts, c10d.ReduceScatterOptions)
        ops = self._select("reduce_scatter", [*outputs, *inputs[0]])
        if ops is None:
            return self._fallback(outputs).reduce_scatter(outputs, inputs, opts)
        return self._reduce_scatter(ops, [(outputs[0], inputs[0])], opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Reduce a tensor over all ranks, its r-th part into the output of rank r."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Reduce several tensors over all ranks, the r-th part of each into the outputs of rank r."""
        opts = parse_options(opts, c10d.ReduceScatterOptions)
        ops = self._select("reduce_scatter", [*outputs, *inputs])
        if ops is None:
            one = self._fallback(outputs)._reduce_scatter_base
            return call_each(one, zip(outputs, inputs, strict=True), opts)
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_parts("reduce_scatter", tensor, output, self.size())
            pairs.append((output, list(contiguous([tensor])[0].view(-1).chunk(self.size()))))
        return self._reduce_scatter(ops, pairs, opts)

    # Their names before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, ops: CollectiveOps, pairs: list[tuple[Tensor, Tensors]], opts: Any
    ) -> dist.Work:
        reductions = [get_reduction(opts.reduceOp, output.dtype, self.size()) for output, _ in pairs]
        for output, inputs in pairs:
            check_list("reduce_scatter", inputs, output, self.size())

        def job() -> Steps:
            for (output, inputs), reduction in zip(pairs, reductions, strict=True):
                call = self._signature("reduce_scatter", output, opts, reduction)
                with Contiguous(output, read=False) as memory:
                    yield from ops.reduce_scatter(call, memory, contiguous(inputs), reduction) or ()

        outputs, nbytes = [output for output, _ in pairs], sum(total_nbytes(inputs) for _, inputs in pairs)
        return self._submit(ops, "reduce_scatter", job, outputs, opts, nbytes=nbytes)

    # Copies.

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Copy one tensor from the root to all ranks."""
        tensors, opts = as_list(tensors), parse_options(opts, c10d.BroadcastOptions)
        ops = self._select("broadcast", tensors)
        if ops is None:
            return self._fallback(tensors).broadcast(tensors, opts)
        tensor, root = tensors[0], opts.rootRank

        def job() -> None:
            with Contiguous(tensor, write=root != self.rank()) as memory:
                ops.broadcast(self._signature("broadcast", tensor, opts, root=root), memory, root)

        return self._submit(ops, "broadcast", job, tensors, opts, nbytes=total_nbytes(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the tensor of every rank r into the r-th output of all ranks."""
        opts = parse_options(opts, c10d.AllgatherOptions)
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        ops = self._select("all_gather", [*outputs[0], *inputs]) if len(inputs) == 1 else None
        if ops is None:
            return self._fallback(inputs).allgather(outputs, inputs, opts)
        return self._all_gather(ops, [(outputs[0], inputs[0])], outputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy several tensors of every rank into lists of outputs on all ranks."""
        opts = parse_options(opts, c10d.AllgatherOptions)
        by_tensor = list(zip(*outputs, strict=True)) if len(outputs) == self.size() else []
        ops = None
        if len(by_tensor) == len(inputs):
            ops = self._select("all_gather", [*chain.from_iterable(outputs), *inputs])
        if ops is None:
            return self._fallback(inputs).allgather_coalesced(outputs, inputs, opts)
        return self._all_gather(ops, list(zip(by_tensor, inputs, strict=True)), outputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Copy the tensor of every rank into one tensor on all ranks, one behind the other."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy several tensors of every rank into one tensor each on all ranks."""
        opts = parse_options(opts, c10d.AllgatherOptions)
        ops = None
        if all(output.is_contiguous() for output in outputs):
            ops = self._select("all_gather", [*outputs, *inputs])
        if ops is None:
            one = self._fallback(inputs)._allgather_base
            return call_each(one, zip(outputs, inputs, strict=True), opts)
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            check_parts("all_gather", output, tensor, self.size())
            pairs.append((list(output.view(-1).chunk(self.size())), tensor))
        return self._all_gather(ops, pairs, list(outputs), opts)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(
        self, ops: CollectiveOps, pairs: list[tuple[Tensors, Tensor]], result: Any, opts: Any
    ) -> dist.Work:
        for outputs, tensor in pairs:
            check_list("all_gather", outputs, tensor, self.size())

        def job() -> Steps:
            for outputs, tensor in pairs:
                with ContiguousList(outputs) as memory:
                    call = self._signature("all_gather", tensor, opts)
                    yield from ops.all_gather(call, memory, contiguous([tensor])[0]) or ()

        nbytes = sum(total_nbytes(outputs) for outputs, _ in pairs)
        return self._submit(ops, "all_gather", job, result, opts, nbytes=nbytes)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the tensor of every rank r into the r-th output of the root."""
        opts = parse_options(opts, c10d.GatherOptions)
        targets, tensor, root = list(outputs[0]) if outputs else [], inputs[0], opts.rootRank
        ops = self._select("gather", [*targets, tensor])
        if ops is None:
            return self._fallback(inputs).gather(outputs, inputs, opts)
        if root == self.rank():
            check_list("gather", targets, tensor, self.size())

        def job() -> None:
            with ContiguousList(targets) as memory:
                call = self._signature("gather", tensor, opts, root=root)
                ops.gather(call, memory, contiguous([tensor])[0], root)

        return self._submit(ops, "gather", job, outputs, opts, nbytes=total_nbytes(targets) or tensor.nbytes)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the r-th tensor of the root into the output of rank r."""
        opts = parse_options(opts, c10d.ScatterOptions)
        output, sources, root = outputs[0], list(inputs[0]) if inputs else [], opts.rootRank
        ops = self._select("scatter", [output, *sources])
        if ops is None:
            return self._fallback(outputs).scatter(outputs, inputs, opts)
        if root == self.rank():
            check_list("scatter", sources, output, self.size())

        def job() -> None:
            with Contiguous(output, read=False) as memory:
                call = self._signature("scatter", output, opts, root=root)
                ops.scatter(call, memory, contiguous(sources), root)

        return self._submit(ops, "scatter", job, outputs, opts, nbytes=total_nbytes(sources) or output.nbytes)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the r-th tensor of every rank q into the q-th output of rank r."""
        opts = parse_options(opts, c10d.AllToAllOptions)
        ops = self._select("all_to_all", [*outputs, *inputs])
        if ops is None:
            return self._fallback(outputs).alltoall(outputs, inputs, opts)

        def job() -> None:
            with ContiguousList(outputs) as memory:
                call = OpSignature("all_to_all", timeout=timeout_of(opts))
                ops.all_to_all(call, memory, contiguous(inputs))

        nbytes = max(total_nbytes(outputs), total_nbytes(inputs))
        return self._submit(ops, "all_to_all", job, outputs, opts, nbytes=nbytes)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Copy the r-th part of every rank's tensor into rank r's output, one behind the other.

        Splits count rows of the first dimension; without them all parts are equal.
        """
        opts = parse_options(opts, c10d.AllToAllOptions)
        if not output.is_contiguous() or self._select("all_to_all", [output, tensor]) is None:
            inner = self._fallback([output])
            return inner.alltoall_base(output, tensor, list(output_splits), list(input_splits), opts)
        targets = split_rows("output", output, output_splits, self.size())
        sources = split_rows("input", contiguous([tensor])[0], input_splits, self.size())
        return self.alltoall(targets, sources, opts)

    alltoall_base = all_to_all_single  # its name before torch 2.13

    def barrier(self, opts: Any = None) -> dist.Work | None:
        """Return when all ranks have called; None: they have."""
        if self._repeated is not None and self.spans is None and self._repeated.barrier(opts):
            return None
        opts = parse_options(opts, c10d.BarrierOptions)
        ops = self._select("barrier", [])
        if ops is None:
            return self._fallback().barrier(opts)
        call = OpSignature("barrier", timeout=timeout_of(opts))
        return self._submit(ops, "barrier", lambda: ops.barrier(call), [], opts, nbytes=0)

    # Messages from one rank to another.

    def send(self, tensors: Any, target: int, tag: int = 0) -> dist.Work:
        """Send one tensor to rank `target`."""
        if self._p2p is None or not are_strided_cpu(tensors):
            return self._fallback(tensors).send(tensors, target, tag)
        return self._p2p.send(contiguous(tensors)[0], target, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        """Receive one tensor from rank `source`."""
        if self._p2p is None or not are_strided_cpu(tensors):
            return self._fallback(tensors).recv(tensors, source, tag)
        return self._p2p.receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive one tensor from any rank."""
        if self._p2p is None or not are_strided_cpu(tensors):
            return self._fallback(tensors).recv_anysource(tensors, tag)
        return self._p2p.receive(tensors[0], None, tag)


def _has_small_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= _KEPT_NBYTES
