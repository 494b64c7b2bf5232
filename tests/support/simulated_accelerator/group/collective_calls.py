"""Collectives of the simulated group: what each reads, writes and computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simulated_accelerator.group.collective_work import CollectiveWork, flat_twin
from simulated_accelerator.group.reductions import check_reduction, reduce

__all__ = ["CollectiveCalls"]

Tensors = Sequence[Tensor]
_COUNT_BYTES = 8


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _reduction(options: Any) -> Any:
    op = dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)
    return check_reduction(op)


def _root(options: Any) -> int:
    return options if isinstance(options, int) else options.rootRank


def _parts(function: str, whole: Tensor, part: Tensor, size: int) -> list[Tensor]:
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise ValueError(
            f"{function} over {size} ranks: {whole.numel()} elements of {whole.dtype} on one side, {size} × "
            f"{part.numel()} of {part.dtype} on the other"
        )
    return [flat_twin(whole)[rank * part.numel() : (rank + 1) * part.numel()] for rank in range(size)]


class CollectiveCalls(dist.ProcessGroup):
    """The calls of torch's process groups. `run` and `host_group` are the simulated group's."""

    run: Callable[..., CollectiveWork]
    host_group: Callable[[Sequence[Tensor]], Any]

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce tensors over all ranks, in place."""
        tensors = _as_list(tensors)
        host = self.host_group(tensors)
        if host is not None:
            return host.allreduce(tensors, *([] if opts is None else [opts]))
        op = _reduction(opts)
        return self._together([self._all_reduce(tensor, op) for tensor in tensors])

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce tensors over all ranks, in place."""
        host = self.host_group(tensors)
        return self.allreduce(tensors, opts) if host is None else host.allreduce_coalesced(tensors, opts)

    def _all_reduce(self, tensor: Tensor, op: Any) -> CollectiveWork:
        twin = flat_twin(tensor)

        def combine(parts: Tensors) -> None:
            twin.copy_(reduce([part.view(twin.dtype) for part in parts], op))

        return self.run("all_reduce", twin, [twin], [twin], [tensor], combine, op=op)

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        """Reduce a tensor over all ranks into that of the root."""
        tensors = _as_list(tensors)
        host = self.host_group(tensors)
        if host is not None:
            return host.reduce(tensors, opts)
        (tensor,), root, op = tensors, _root(opts), _reduction(opts)
        twin = flat_twin(tensor)
        outputs = [twin] if self.rank() == root else []

        def combine(parts: Tensors) -> None:
            if outputs:
                twin.copy_(reduce([part.view(twin.dtype) for part in parts], op))

        return self.run("reduce", twin, [twin], outputs, [tensor], combine, op=op, root=root)

    def broadcast(self, tensors: Any, opts: Any = 0) -> dist.Work:
        """Copy a tensor of the root to all ranks."""
        tensors = _as_list(tensors)
        host = self.host_group(tensors)
        if host is not None:
            return host.broadcast(tensors, opts)
        (tensor,), root = tensors, _root(opts)
        twin, here = flat_twin(tensor), self.rank() == root

        def combine(parts: Tensors) -> None:
            if not here:
                twin.copy_(parts[root].view(twin.dtype))

        inputs, outputs = ([twin], []) if here else ([], [twin])
        return self.run("broadcast", twin, inputs, outputs, [tensor], combine, root=root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather a tensor of each rank into a list of tensors."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        host = self.host_group(inputs)
        if host is not None:
            return host.allgather(outputs, inputs, *([] if opts is None else [opts]))
        works = []
        for targets, tensor in zip(outputs, inputs, strict=True):
            if len(targets) != self.size() or any(target.numel() != tensor.numel() for target in targets):
                raise ValueError(f"all_gather needs {self.size()} outputs of {tensor.numel()} elements each")
            twins = [flat_twin(target) for target in targets]
            works.append(self._gather(twins, tensor, [tensor, *targets]))
        return self._together(works)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather several tensors of each rank; the lists of outputs are by rank."""
        return self.allgather([list(targets) for targets in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Gather a tensor of each rank into one, the parts in the order of ranks."""
        host = self.host_group([tensor])
        if host is not None:
            return host._allgather_base(output, tensor)
        return self._gather(_parts("all_gather", output, tensor, self.size()), tensor, [tensor, output])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        """Gather several tensors of each rank, each into one."""
        return self._together([self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)])

    def _gather(self, twins: Tensors, tensor: Tensor, tensors: list[Tensor]) -> CollectiveWork:
        mine = flat_twin(tensor)

        def combine(parts: Tensors) -> None:
            for twin, part in zip(twins, parts, strict=True):
                twin.copy_(part.view(twin.dtype))

        return self.run("all_gather", mine, [mine], twins, tensors, combine)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Reduce a list of tensors over all ranks, the r-th into the output of rank r."""
        host = self.host_group(outputs)
        if host is not None:
            return host.reduce_scatter(outputs, inputs, *([] if opts is None else [opts]))
        op, works = _reduction(opts), []
        for output, parts in zip(outputs, inputs, strict=True):
            if len(parts) != self.size() or any(part.numel() != output.numel() for part in parts):
                raise ValueError(
                    f"reduce_scatter needs {self.size()} inputs of {output.numel()} elements each"
                )
            works.append(self._scatter(output, [flat_twin(part) for part in parts], op, [output, *parts]))
        return self._together(works)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Reduce a tensor over all ranks, its r-th part into the output of rank r."""
        host = self.host_group([output])
        if host is not None:
            return host._reduce_scatter_base(output, tensor, *([] if opts is None else [opts]))
        parts = _parts("reduce_scatter", tensor, output, self.size())
        return self._scatter(output, parts, _reduction(opts), [output, tensor])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors over all ranks, the r-th part of each into the outputs of rank r."""
        pairs = zip(outputs, inputs, strict=True)
        return self._together([self.reduce_scatter_single(*pair, opts) for pair in pairs])

    def _scatter(self, output: Tensor, inputs: Tensors, op: Any, tensors: list[Tensor]) -> CollectiveWork:
        twin, rank = flat_twin(output), self.rank()

        def combine(parts: Tensors) -> None:
            n = twin.numel()
            twin.copy_(reduce([part.view(twin.dtype)[rank * n : (rank + 1) * n] for part in parts], op))

        return self.run("reduce_scatter", twin, inputs, [twin], tensors, combine, op=op)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        """Send the r-th part of a tensor to rank r."""
        host = self.host_group([output, tensor])
        if host is not None:
            return host.alltoall_base(
                output, tensor, output_splits, input_splits, *([] if opts is None else [opts])
            )
        size, rank, row = self.size(), self.rank(), tensor[:1].nbytes or output[:1].nbytes
        received = list(output_splits) or [len(output) // size] * size
        sent = torch.tensor(list(input_splits) or [len(tensor) // size] * size, dtype=torch.int64)
        twin = flat_twin(output)

        def combine(parts: Tensors) -> None:
            found = []
            for source, part in enumerate(parts):
                counts = part[: _COUNT_BYTES * size].view(torch.int64).tolist()
                if counts[rank] != received[source]:
                    raise RuntimeError(
                        f"all_to_all_single: rank {source} sends {counts[rank]} rows to rank {rank}, which expects "
                        f"{received[source]}"
                    )
                first = _COUNT_BYTES * size + row * sum(counts[:rank])
                found.append(part[first : first + row * counts[rank]])
            twin.copy_(torch.cat(found).view(twin.dtype))

        # the sizes differ between ranks, so they are no part of what must be equal
        return self.run(
            "all_to_all_single", twin[:0], [sent, flat_twin(tensor)], [twin], [output, tensor], combine
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather a tensor of each rank into a list of the root."""
        host = self.host_group(inputs)
        if host is not None:
            return host.gather(outputs, inputs, opts)
        (tensor,), root = inputs, _root(opts)
        targets = [flat_twin(target) for target in outputs[0]] if self.rank() == root else []
        mine = flat_twin(tensor)

        def combine(parts: Tensors) -> None:
            for target, part in zip(targets, parts, strict=False):
                target.copy_(part.view(target.dtype))

        kept = [tensor, *(outputs[0] if targets else [])]
        return self.run("gather", mine, [mine], targets, kept, combine, root=root)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Send the r-th tensor of the root's list to rank r."""
        host = self.host_group(outputs)
        if host is not None:
            return host.scatter(outputs, inputs, opts)
        (output,), root, rank = outputs, _root(opts), self.rank()
        twin = flat_twin(output)
        sources = [flat_twin(source) for source in inputs[0]] if rank == root else []

        def combine(parts: Tensors) -> None:
            whole = parts[root].view(twin.dtype)
            twin.copy_(whole[rank * twin.numel() : (rank + 1) * twin.numel()])

        kept = [output, *(inputs[0] if sources else [])]
        return self.run("scatter", twin, sources, [twin], kept, combine, root=root)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Refuse lists of tensors: `all_to_all_single` does the same with one."""
        raise NotImplementedError("the simulated group has no all_to_all of lists; use all_to_all_single")

    # Their names before torch 2.13.
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @staticmethod
    def _together(works: Sequence[Any]) -> Any:
        """Return one work for all."""
        if len(works) == 1 or not all(isinstance(work, CollectiveWork) for work in works):
            return works[-1]
        markers = [marker for work in works for marker in work.markers]
        return CollectiveWork(markers, [tensor for work in works for tensor in work.result()])
