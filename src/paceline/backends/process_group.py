"""The process group that torch sees: its calls, in whatever form, put into the few that we make.

Tensors on the CPU take our way. Everything else (CUDA tensors, sparse ones, calls that a group over several
hosts does not have) falls through to the gloo or NCCL group inside.
"""

# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
# (torch's stubs list the overloads of each call; one method here takes them all)
from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.autograd.profiler import record_function

from paceline.backends.arena import arena
from paceline.backends.call import Call
from paceline.backends.mailbox import Mailbox
from paceline.backends.reduction import Reduction, reduction_of
from paceline.backends.shm import HostGroup
from paceline.backends.untraced import untraced
from paceline.backends.work import Line
from paceline.errors import CollectiveError, UsageError

__all__ = ["PacelineGroup", "Route"]

Tensors = Sequence[torch.Tensor]

_KEPT_NBYTES, _KEPT_WORKS = 64, 64
"""All-reduces of so few bytes are kept for a while: torch's DDP asks in its backward for the result of one that
it made before its forward (uneven inputs: how many ranks still have any), and in C++ a Python object that
nobody in Python holds has no methods any more."""


class Route(Protocol):
    """What makes the calls: the ranks of one host, or of several. Calls block; ranks are the group's."""

    @property
    def ops(self) -> frozenset[str]: ...
    @property
    def timeout(self) -> float: ...
    @timeout.setter
    def timeout(self, seconds: float) -> None: ...

    def barrier(self, call: Call) -> None: ...
    def all_reduce(self, call: Call, tensor: torch.Tensor, how: Reduction, ranks: int) -> None: ...
    def reduce_scatter(
        self, call: Call, output: torch.Tensor, inputs: Tensors, how: Reduction, ranks: int
    ) -> None: ...
    def all_gather(self, call: Call, outputs: Tensors, tensor: torch.Tensor) -> None: ...
    def broadcast(self, call: Call, tensor: torch.Tensor, root: int) -> None: ...
    def give_up(self, error: BaseException) -> None: ...
    def note_step(self, step: int) -> None: ...
    def leave(self) -> None: ...
    def close(self) -> None: ...


_open_groups: weakref.WeakSet[PacelineGroup] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    """End the threads of groups that nobody destroyed: they must not run while Python goes down."""
    for group in list(_open_groups):
        group.abort()


@untraced
class PacelineGroup(dist.ProcessGroup):
    """A ``torch.distributed`` process group over shared memory and, between hosts, the network.

    Args:
        rank, size: place in the group.
        route: what makes the calls, over one host or several; None: everything falls through to the group inside.
        mailbox: carries point-to-point messages; None: they fall through.

    Attributes:
        calls: collectives made so far by this rank, but for barriers; a coalesced call counts once.
        payload_nbytes: bytes of their tensors: of the larger side where a call takes and gives.
        spans: set to a list, it gets launch and completion of each collective, in seconds of
            ``time.perf_counter()``.
    """

    def __init__(self, rank: int, size: int, route: Route | None, mailbox: Mailbox | None) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue] — the stubs have only the form with a store
        self._route, self._mailbox = route, mailbox
        self._line = Line(f"paceline group, rank {rank}")
        self.calls, self.payload_nbytes = 0, 0
        self.spans: list[tuple[float, float]] | None = None
        self._kept: deque[dist.Work] = deque(maxlen=_KEPT_WORKS)
        _open_groups.add(self)

    # What torch asks of a group.

    def getBackendName(self) -> str:
        """Return the name it is registered under."""
        return "paceline"

    @property
    def pg_name(self) -> str:
        """The name that torch gave the group."""
        return self.group_name

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether `allocate_tensor` gives memory that is reduced in place on `device`."""
        return self._route is not None and torch.device(device).type == "cpu"

    def allocate_tensor(
        self, numel: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return an uninitialised 1-D tensor of `numel` elements that collectives reduce where it lies.

        Where the group shares no memory, it is an ordinary tensor. The memory comes back when the tensor
        and all views of it are gone.

        Raises:
            UsageError: a negative size, or a device other than the CPU.
            OSError: the system has no memory left.
        """
        if numel < 0 or torch.device(device).type != "cpu":
            raise UsageError(
                f"allocate_tensor({numel}, device={str(device)!r}): valid are sizes ≥ 0 on the CPU",
                remedy="use torch.empty() for memory of other devices",
            )
        if self._route is None:
            return torch.empty(numel, dtype=dtype)
        return arena.allocate(numel, dtype)

    def note_step(self, step: int) -> None:
        """Tell the other ranks, for their messages, which optimizer step this rank is in."""
        if self._route is not None:
            self._route.note_step(step)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long collectives wait for a rank."""
        if self._route is not None:
            self._route.timeout = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group: what is in line is done first."""
        self._leave(None)

    def abort(self) -> None:
        """Leave the group at once: what is in line fails."""
        if self._route is not None:
            self._route.leave()
        self._leave(CollectiveError("the group was left with collectives under way"))

    def _leave(self, error: Exception | None) -> None:
        self._line.close(error)
        if self._mailbox is not None:
            self._mailbox.close()
        if self._route is not None:
            self._route.close()
        self._route, self._mailbox = None, None

    # Reductions.

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce one tensor over all ranks, in place."""
        tensors, opts = _listed(tensors), _options(opts, c10d.AllreduceOptions)
        if len(tensors) != 1 or not self._ours("all_reduce", tensors):
            return self._inner(tensors).allreduce(tensors, opts)
        return self._all_reduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Reduce several tensors over all ranks, in place."""
        opts = _options(opts, c10d.AllreduceCoalescedOptions)
        if not self._ours("all_reduce", tensors):
            return self._inner(tensors).allreduce_coalesced(list(tensors), opts)
        return self._all_reduce(tensors, opts)

    def _all_reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        hows = [reduction_of(opts.reduceOp, tensor.dtype) for tensor in tensors]
        route, ranks = self._engaged(), self.size()

        def job() -> None:
            for tensor, how in zip(tensors, hows, strict=True):
                call = self._call("all_reduce", tensor, opts, how)
                with _Dense(tensor) as dense:
                    route.all_reduce(call, dense, how, ranks)

        work = self._make("all_reduce", job, tensors, opts, _nbytes(tensors))
        if _nbytes(tensors) <= _KEPT_NBYTES:
            self._kept.append(work)
        return work

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce one tensor over all ranks into that of the root."""
        tensors, opts = _listed(tensors), _options(opts, c10d.ReduceOptions)
        if not self._ours("reduce", tensors):
            return self._inner(tensors).reduce(tensors, opts)
        tensor, root = tensors[0], opts.rootRank
        how, host, ranks = reduction_of(opts.reduceOp, tensor.dtype), self._host(), self.size()

        def job() -> None:
            with _Dense(tensor) as dense:
                host.reduce(self._call("reduce", tensor, opts, how, root), dense, root, how, ranks)

        return self._make("reduce", job, tensors, opts, _nbytes(tensors))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Reduce a list of tensors over all ranks, the r-th into the output of rank r."""
        opts = _options(opts, c10d.ReduceScatterOptions)
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
        opts = _options(opts, c10d.ReduceScatterOptions)
        if not self._ours("reduce_scatter", [*outputs, *inputs]):
            one = self._inner(outputs)._reduce_scatter_base
            return _one_by_one(one, zip(outputs, inputs, strict=True), opts)
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_parts("reduce_scatter", tensor, output)
            pairs.append((output, list(_dense([tensor])[0].view(-1).chunk(self.size()))))
        return self._reduce_scatter(pairs, opts)

    # What they were called before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, pairs: list[tuple[torch.Tensor, Tensors]], opts: Any) -> dist.Work:
        hows = [reduction_of(opts.reduceOp, output.dtype) for output, _ in pairs]
        for output, inputs in pairs:
            self._check_list("reduce_scatter", inputs, output)
        route, ranks = self._engaged(), self.size()

        def job() -> None:
            for (output, inputs), how in zip(pairs, hows, strict=True):
                call = self._call("reduce_scatter", output, opts, how)
                with _Dense(output, read=False) as dense:
                    route.reduce_scatter(call, dense, _dense(inputs), how, ranks)

        payload = sum(_nbytes(inputs) for _, inputs in pairs)
        return self._make("reduce_scatter", job, [output for output, _ in pairs], opts, payload)

    # Copies.

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Copy one tensor from the root to all ranks."""
        tensors, opts = _listed(tensors), _options(opts, c10d.BroadcastOptions)
        if not self._ours("broadcast", tensors):
            return self._inner(tensors).broadcast(tensors, opts)
        tensor, root, route = tensors[0], opts.rootRank, self._engaged()

        def job() -> None:
            with _Dense(tensor, write=root != self.rank()) as dense:
                route.broadcast(self._call("broadcast", tensor, opts, root=root), dense, root)

        return self._make("broadcast", job, tensors, opts, _nbytes(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the tensor of every rank r into the r-th output of all ranks."""
        opts = _options(opts, c10d.AllgatherOptions)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        if len(inputs) != 1 or not self._ours("all_gather", [*outputs[0], *inputs]):
            return self._inner(inputs).allgather(outputs, inputs, opts)
        return self._all_gather([(outputs[0], inputs[0])], outputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy several tensors of every rank into lists of outputs on all ranks."""
        opts = _options(opts, c10d.AllgatherOptions)
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
        opts = _options(opts, c10d.AllgatherOptions)
        dense = all(output.is_contiguous() for output in outputs)
        if not dense or not self._ours("all_gather", [*outputs, *inputs]):
            one = self._inner(inputs)._allgather_base
            return _one_by_one(one, zip(outputs, inputs, strict=True), opts)
        pairs = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_parts("all_gather", output, tensor)
            pairs.append((list(output.view(-1).chunk(self.size())), tensor))
        return self._all_gather(pairs, list(outputs), opts)

    # What they were called before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather(self, pairs: list[tuple[Tensors, torch.Tensor]], result: Any, opts: Any) -> dist.Work:
        for outputs, tensor in pairs:
            self._check_list("all_gather", outputs, tensor)
        route = self._engaged()

        def job() -> None:
            for outputs, tensor in pairs:
                with _DenseList(outputs) as places:
                    call = self._call("all_gather", tensor, opts)
                    route.all_gather(call, places, _dense([tensor])[0])

        return self._make("all_gather", job, result, opts, sum(_nbytes(outputs) for outputs, _ in pairs))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the tensor of every rank r into the r-th output of the root."""
        opts = _options(opts, c10d.GatherOptions)
        places, tensor, root = list(outputs[0]) if outputs else [], inputs[0], opts.rootRank
        if not self._ours("gather", [*places, tensor]):
            return self._inner(inputs).gather(outputs, inputs, opts)
        if root == self.rank():
            self._check_list("gather", places, tensor)
        host = self._host()

        def job() -> None:
            with _DenseList(places) as dense:
                call = self._call("gather", tensor, opts, root=root)
                host.gather(call, dense, _dense([tensor])[0], root)

        return self._make("gather", job, outputs, opts, _nbytes(places) or tensor.nbytes)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the r-th tensor of the root into the output of rank r."""
        opts = _options(opts, c10d.ScatterOptions)
        output, given, root = outputs[0], list(inputs[0]) if inputs else [], opts.rootRank
        if not self._ours("scatter", [output, *given]):
            return self._inner(outputs).scatter(outputs, inputs, opts)
        if root == self.rank():
            self._check_list("scatter", given, output)
        host = self._host()

        def job() -> None:
            with _Dense(output, read=False) as dense:
                host.scatter(self._call("scatter", output, opts, root=root), dense, _dense(given), root)

        return self._make("scatter", job, outputs, opts, _nbytes(given) or output.nbytes)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy the r-th tensor of every rank q into the q-th output of rank r."""
        opts = _options(opts, c10d.AllToAllOptions)
        if not self._ours("all_to_all", [*outputs, *inputs]):
            return self._inner(outputs).alltoall(outputs, inputs, opts)
        host = self._host()

        def job() -> None:
            with _DenseList(outputs) as dense:
                host.all_to_all(Call("all_to_all", timeout=_seconds(opts)), dense, _dense(inputs))

        return self._make("all_to_all", job, outputs, opts, max(_nbytes(outputs), _nbytes(inputs)))

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
        opts = _options(opts, c10d.AllToAllOptions)
        if not output.is_contiguous() or not self._ours("all_to_all", [output, tensor]):
            inner = self._inner([output])
            return inner.alltoall_base(output, tensor, list(output_splits), list(input_splits), opts)
        places = self._split("output", output, output_splits)
        return self.alltoall(places, self._split("input", _dense([tensor])[0], input_splits), opts)

    alltoall_base = all_to_all_single  # what it was called before torch 2.13

    def barrier(self, opts: Any = None) -> dist.Work:
        """Return when all ranks have called."""
        opts = _options(opts, c10d.BarrierOptions)
        if not self._ours("barrier", []):
            return self._inner().barrier(opts)
        call, route = Call("barrier", timeout=_seconds(opts)), self._engaged()
        return self._make("barrier", lambda: route.barrier(call), [], opts, 0)

    # Messages from one rank to another.

    def send(self, tensors: Any, target: int, tag: int = 0) -> dist.Work:
        """Send one tensor to rank `target`."""
        if self._mailbox is None or not _plain(tensors):
            return self._inner(tensors).send(tensors, target, tag)
        return self._mailbox.send(_dense(tensors)[0], target, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        """Receive one tensor from rank `source`."""
        if self._mailbox is None or not _plain(tensors):
            return self._inner(tensors).recv(tensors, source, tag)
        return self._mailbox.receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receive one tensor from whoever sends first."""
        if self._mailbox is None or not _plain(tensors):
            return self._inner(tensors).recv_anysource(tensors, tag)
        return self._mailbox.receive(tensors[0], None, tag)

    # How all of them go.

    def _inner(self, tensors: Tensors = ()) -> Any:
        """Return the gloo or NCCL group inside, which makes a call for `tensors` that is not for us.

        It is called itself, not by way of super(): from there C++ comes back to the overrides here, and holds
        the interpreter's lock all the while, for which a thread of gloo may be waiting.
        """
        return self._get_backend(tensors[0].device if tensors else torch.device("cpu"))

    def _ours(self, op: str, tensors: Sequence[torch.Tensor]) -> bool:
        return self._route is not None and op in self._route.ops and _plain(tensors)

    def _engaged(self) -> Route:
        assert self._route is not None, "only called where there is a route"
        return self._route

    def _host(self) -> HostGroup:
        assert isinstance(self._route, HostGroup), "only called where all ranks are on one host"
        return self._route

    def _call(
        self, op: str, tensor: torch.Tensor, opts: Any, how: Reduction | None = None, root: int = -1
    ) -> Call:
        return Call(op, tensor.numel(), tensor.dtype, how.name if how else "", root, _seconds(opts))

    def _make(
        self, name: str, job: Callable[[], None], result: Any, opts: Any, payload_nbytes: int
    ) -> dist.Work:
        route = self._engaged()
        if name != "barrier":
            self.calls += 1
            self.payload_nbytes += payload_nbytes

        launched, spans = time.perf_counter(), self.spans
        record = record_function(f"paceline:{name}") if torch.autograd._profiler_enabled() else None
        if record is not None:
            record.__enter__()  # left where the call ends, in whatever thread that is

        def guarded() -> None:
            try:
                job()
                if spans is not None:
                    spans.append((launched, time.perf_counter()))
            except UsageError:
                raise  # told before anything was written; the group stays in step
            except BaseException as error:
                route.give_up(error)
                raise
            finally:
                if record is not None:
                    record.__exit__(None, None, None)

        asynchronous = getattr(opts, "asyncOp", True)
        return self._line.make(guarded, list(result), name, asynchronous=asynchronous)

    def _check_list(self, op: str, tensors: Tensors, like: torch.Tensor) -> None:
        """Raise unless there is one tensor per rank, each as large as `like` and of its dtype."""
        if len(tensors) != self.size():
            raise UsageError(f"{op} got {len(tensors)} tensors for {self.size()} ranks")
        for rank, tensor in enumerate(tensors):
            if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
                raise UsageError(
                    f"{op}: the tensor for rank {rank} is {tensor.dtype} of {tensor.numel()} elements, "
                    f"the other one {like.dtype} of {like.numel()}",
                    remedy="give tensors of one size and dtype",
                )

    def _check_parts(self, op: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        if whole.numel() != part.numel() * self.size() or whole.dtype != part.dtype:
            raise UsageError(
                f"{op}: {whole.dtype} of {whole.numel()} elements is not {self.size()} times "
                f"{part.dtype} of {part.numel()}",
                remedy=f"make the large tensor {self.size()} times the size of the small one",
            )

    def _split(self, name: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
        if splits:
            if sum(splits) != tensor.size(0) or len(splits) != self.size():
                raise UsageError(
                    f"all_to_all_single: {name} splits {list(splits)} don't add up to {tensor.size(0)} rows "
                    f"for {self.size()} ranks"
                )
            return list(tensor.split(list(splits)))
        if tensor.size(0) % self.size():
            raise UsageError(
                f"all_to_all_single: {tensor.size(0)} rows of {name} can't be split over {self.size()} ranks"
            )
        return list(tensor.split(tensor.size(0) // self.size()))


class _Dense:
    """A contiguous stand-in for a tensor that is not, copied back at the end."""

    def __init__(self, tensor: torch.Tensor, *, read: bool = True, write: bool = True) -> None:
        self._tensor, self._write = tensor.detach(), write
        dense = self._tensor.is_contiguous() and not self._tensor.is_conj() and not self._tensor.is_neg()
        fill = torch.clone if read else torch.empty_like
        self.dense = self._tensor if dense else fill(self._tensor, memory_format=torch.contiguous_format)

    def __enter__(self) -> torch.Tensor:
        return self.dense

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and self._write and self.dense is not self._tensor:
            self._tensor.copy_(self.dense)


class _DenseList:
    """The same for several tensors that are written and not read."""

    def __init__(self, tensors: Tensors) -> None:
        self._each = [_Dense(tensor, read=False) for tensor in tensors]

    def __enter__(self) -> list[torch.Tensor]:
        return [each.dense for each in self._each]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for each in self._each:
            each.__exit__(kind, error, trace)


def _dense(tensors: Tensors) -> list[torch.Tensor]:
    """Return contiguous tensors whose memory holds their values: no lazily conjugated or negated ones."""
    return [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]


def _nbytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _one_by_one(call: Callable[..., dist.Work], pairs: Iterable[tuple[Any, Any]], opts: Any) -> dist.Work:
    """Make several calls; all but the last are done on return."""
    *before, last = [call(output, tensor, opts) for output, tensor in pairs]
    for work in before:
        work.wait()
    return last


def _plain(tensors: Tensors) -> bool:
    """Return whether all tensors are ordinary ones on the CPU."""
    return all(tensor.device.type == "cpu" and tensor.layout == torch.strided for tensor in tensors)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _options(given: Any, kind: type) -> Any:
    """Return options from options, a reduction, a root rank or nothing."""
    if isinstance(given, kind):
        return given
    options = kind()
    if isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        options.reduceOp = given
    elif isinstance(given, int):
        options.rootRank = given
    return options


def _seconds(options: Any) -> float | None:
    """Return the time-out of a call, None if it is the group's."""
    timeout = getattr(options, "timeout", None)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else -1.0
    return seconds if seconds > 0 else None
