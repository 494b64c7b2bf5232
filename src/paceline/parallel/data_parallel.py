"""`DataParallel`: wraps a module so that its gradients are the mean over all ranks."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import distributed as torch_ddp
from torch.utils import _pytree as pytree

from paceline._core.step_state import step_state, wait_counters
from paceline._core.summation_tree import check_virtual_ranks
from paceline.errors import SyncError, UsageError
from paceline.parallel.comm_hook import GradBucket
from paceline.parallel.compression.compressed_bucket import CompressionStats
from paceline.parallel.ddp import DistributedDataParallel
from paceline.parallel.engine import unsynchronised_step_guard
from paceline.parallel.engine.grad_norm import clip_global_norm_
from paceline.parallel.engine.launch_queue import SyncTimings
from paceline.parallel.engine.loss_weights import check_loss
from paceline.parallel.engine.model_checks import (
    check_dtypes,
    check_no_cuda_graphs,
    check_no_dtensors,
    check_not_sharded,
    check_parameters,
    model_signature,
)
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.engine.round_status import Status, missing_samples_error
from paceline.parallel.gradient_collectives import Comm, broadcast_tensors
from paceline.parallel.sharding.fsdp import FSDPEngine
from paceline.parallel.sharding.fsdp_options import FSDPOptions, check_gathers
from paceline.parallel.strategy import Sync
from paceline.parallel.tuning.tuner import DEFAULT, Tuner
from paceline.parallel.two_axis_collectives import comm_of
from paceline.parallel.virtual_ranks.virtual_reducer import VirtualRankReducer, check_virtual_plan
from paceline.testing import fault_injection
from paceline.world.control_collectives import verify_same

__all__ = ["DataParallel", "check_optimizer_owned"]

_SAME_MODEL = "build the same model, in the same order and with the same options, on every rank"


class DataParallel(torch.nn.Module):
    """Wraps a module so that after backward every rank holds the same gradient: the mean over all samples.

    Parameters and buffers are verified to match on all ranks and copied from rank 0. After that, ``loss.backward()``
    synchronises as torch's DistributedDataParallel does (every rank counts the same), and ``model.backward(loss,
    samples=n)`` weights each rank by its samples, which is exact for unequal batches.

    Args:
        module: the model, on its device; the same on every rank.
        sync: a strategy's name or alias (see `Sync.of`), a `Sync`, which may also compress gradients, or ``"auto"``,
            which finds the fastest exact strategy during training, see `paceline.parallel.tuning.tuner`.
        group: the ranks to synchronise with: a process group, the data axis of a device mesh or a `Comm`; None: all.
            Without a process group, a world of one. A mesh of two axes replicates along the first and shards along the
            second; where nothing is sharded, and with ``"auto"``, all its ranks together count as one axis.
        reduce_dtype: dtype in which gradients of bf16 and fp16 parameters are accumulated and reduced, for example
            ``torch.float32``; None: the parameters' own.
        gather_dtype: for ``"full-shard"``, the dtype in which units are gathered and computed, and their gradients
            reduced unless `reduce_dtype` is given; shards keep their dtype. None: the parameters' own. Autocast
            alone would keep every unit's lower-precision copy from forward to backward, which is the whole model again.
        units: for ``"full-shard"``, the submodules that are gathered one at a time; None: the members of every
            ``ModuleList`` with at least 100,000 parameters.
        fsdp_options: for ``"full-shard"``, options of FSDP2 by name: ``reshard_after_forward``, ``offload_policy``,
            ``forward_prefetch`` …, see `paceline.parallel.sharding.fsdp_options`. None: torch's defaults.
        find_unused_parameters: on GPUs, which parameters get a gradient (on any rank) may differ from step to step, so
            every step waits for the device to report it. False: if they were the same in the first steps, they have to
            stay the same; else an error, one step later. On CPUs they may always differ.
        virtual_ranks: backwards per step, over all ranks, for a result that is the same to the bit for any number of
            ranks up to that; with a `Loader` of the same `virtual_ranks`, whose batches say when a step ends. None:
            one backward per rank and step.

    Raises:
        UsageError: an unknown strategy, no bare module, parameters that can't be synchronised (sparse gradients), a
            dtype that is not floating-point, `gather_dtype` or `fsdp_options` where nothing is gathered, a CUDA graph
            of a model whose parameters would move, DTensors, or parameters that FSDP2 or another `DataParallel` of
            other parameters has; a mesh of three axes, or without this process. If the module was wrapped before, that
            wrapper must not be used any more.
        MismatchError: ranks hold different models; names the first parameter and the ranks.

    Example:
        >>> model = DataParallel(torch.nn.Linear(4, 2), sync="bucketed")
        >>> loss = model(torch.ones(8, 4)).mean()
        >>> model.backward(loss, samples=8)
    """

    def __init__(
        self,
        module: torch.nn.Module,
        sync: str | Sync = "bucketed",
        group: dist.ProcessGroup | DeviceMesh | Comm | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        gather_dtype: torch.dtype | None = None,
        units: list[torch.nn.Module] | None = None,
        fsdp_options: Mapping[str, Any] | None = None,
        find_unused_parameters: bool = False,
        virtual_ranks: int | None = None,
    ) -> None:
        super().__init__()
        fault_injection.arm_from_environment()
        tuned = sync == "auto"
        plan = DEFAULT if tuned else Sync.of(sync)
        check_dtypes(reduce_dtype=reduce_dtype, gather_dtype=gather_dtype)
        check_gathers(plan, sync, gather_dtype, fsdp_options)
        if not isinstance(module, torch.nn.Module) or isinstance(module, DataParallel):
            raise UsageError(f"DataParallel({type(module).__name__})", remedy="pass the bare torch.nn.Module")
        check_parameters(module, plan.compression_config)
        check_not_sharded(module)
        check_no_dtensors(module)
        comm = comm_of(group, None if tuned else plan)
        if virtual_ranks is not None:
            check_virtual_ranks(virtual_ranks, comm.size, rank=comm.rank)
            check_virtual_plan(module, sync, plan, comm, reduce_dtype)
        options = FSDPOptions.of(fsdp_options, comm)
        if comm.size > 1 and (tuned or plan.shard != "none"):
            check_no_cuda_graphs(module, sync)
        strategy = "auto" if tuned else str(plan)
        facts = model_signature(
            module,
            f"{strategy}, {comm.layout}, reduce dtype {reduce_dtype}, gather dtype {gather_dtype}, "
            f"{find_unused_parameters=}, {options}, {virtual_ranks=}",
        )
        verify_same(facts, "the model", comm.group, remedy=_SAME_MODEL)
        broadcast_tensors(comm, [*module.parameters(), *module.buffers()])
        self.module = module
        self.comm = comm
        if plan.shard == "parameters" and comm.size > 1:
            self.engine: Reducer = FSDPEngine(module, comm, plan, reduce_dtype, units, gather_dtype, options)
        else:
            self.engine = _reducer_of(module, comm, plan, reduce_dtype, virtual_ranks)
        self.engine.usage_varies = find_unused_parameters
        if tuned and comm.size > 1:
            self.engine.tuner = Tuner(self.engine)
        unsynchronised_step_guard.register_engine(self.engine)

    @property
    def plan(self) -> Sync:
        """How gradients are synchronised; with ``sync="auto"``, at present."""
        return self.engine.plan

    @property
    def tuning(self) -> Tuner | None:
        """The tuner of ``sync="auto"``; None without it, and in a world of one."""
        return self.engine.tuner if isinstance(self.engine.tuner, Tuner) else None

    def rejoin(self) -> None:
        """Continue on the ranks of the default process group, after it was destroyed and made anew.

        The old group may be broken. Parameters and buffers stay what they are on this rank; gradients are dropped.
        Optimizers of the model rejoin after it (`ShardedOptimizer.rejoin`).
        """
        old = self.engine
        assert not isinstance(old, FSDPEngine), "FSDP2 can't move to other ranks"
        unsynchronised_step_guard.forget_engine(old)
        old.abandon()
        self.comm = Comm()
        self.engine = _reducer_of(self.module, self.comm, old.plan, old.reduce_dtype, old.virtual_ranks)
        self.engine.step, self.engine.usage_varies = old.step, old.usage_varies
        self.engine.finite_check, self.engine.on_round_end = old.finite_check, old.on_round_end
        self.engine.replica_check_every = old.replica_check_every
        if old.keeps_copies:
            self.engine.keep_copies()
        if old.weights.agreed:
            self.engine.weights.reference = old.weights.reference
        unsynchronised_step_guard.register_engine(self.engine)

    # ------------------------------------------------------------------ copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with the present plan; one rank may copy alone, to average weights for example.

        Raises:
            UsageError: FSDP2 has sharded the module, and it can't be copied.
        """
        if isinstance(self.engine, FSDPEngine):
            raise UsageError(
                "FSDP2 can't copy a model with sync='full-shard'",
                rank=self.comm.rank,
                remedy="copy the bare module before wrapping, and load model.whole_parameters() into it",
            )
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        own = {key: value for key, value in self.__dict__.items() if key not in ("engine", "comm")}
        made.__dict__.update(copy.deepcopy(own, memo))
        made.comm = self.comm
        made.engine = _reducer_of(
            made.module, self.comm, self.plan, self.engine.reduce_dtype, self.engine.virtual_ranks
        )
        made.engine.step = self.engine.step
        made.engine.launch_queue.hook = self.engine.launch_queue.hook
        made.engine.replica_check_every = self.engine.replica_check_every
        made.engine.usage_varies = self.engine.usage_varies
        unsynchronised_step_guard.register_engine(made.engine)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be pickled: a process group exists in its process only."""
        raise UsageError(
            f"{type(self).__name__} can't be pickled: its process group exists in this process only",
            rank=self.comm.rank,
            remedy="pickle or save model.module, or its state_dict(), and wrap it again after loading",
        )

    # ------------------------------------------------------------------ forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; hooks on its outputs detect when a plain ``backward()`` begins."""
        call = self._before_forward(args, kwargs)
        outputs = self.module(*args, **kwargs)
        self._after_forward(outputs, call)
        return outputs

    @torch.compiler.disable()
    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        engine = self.engine
        engine.recover()
        if not torch.is_grad_enabled():  # an evaluation
            engine.check_latest()
        engine.parameter_gather.before_forward()
        step_state.begin_phase(engine.step, "forward")
        if fault_injection.armed:
            fault_injection.begin_step(engine.step)
        engine.inside_ddp = getattr(torch_ddp.DistributedDataParallel, "_active_ddp_module", None) is not None
        return engine.before_forward(args, kwargs)

    @torch.compiler.disable()
    def _after_forward(self, outputs: Any, call: object) -> None:
        step_state.enter_phase("outside")
        engine = self.engine
        engine.parameter_gather.end_if_over()
        if not torch.is_grad_enabled():
            return
        for tensor in pytree.tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:  # a hook on a leaf would stay
                tensor.register_hook(lambda _grad: engine.backward_reached(call))

    def backward(
        self, loss: torch.Tensor | None, samples: float | None = None, *, retain_graph: bool = False
    ) -> None:
        """Run backward and synchronise: the result is the gradient of the mean over all samples.

        The global gradient is Σ nᵢ·gᵢ / Σ nᵢ over all ranks and all backwards since ``zero_grad()``, where gᵢ
        is the gradient of `loss` and nᵢ = `samples`. Inside `accumulate` nothing is sent yet.

        Args:
            loss: scalar, the mean over this rank's samples; None on a rank that has none (``samples=0``).
            samples: number of samples (or tokens) over which `loss` is the mean; None: every rank counts the same, as
                with ``loss.backward()``.
            retain_graph: as in ``torch.Tensor.backward``.

        Raises:
            UsageError: `loss` is no scalar, or `samples` is negative, not finite, or 0 without need.
            BackwardFailed: another rank raised in its backward; no rank has a gradient.
            SyncError: ranks mixed calls with and without samples, or another rank is gone.
        """
        check_loss(loss, samples, self.comm.rank, self.engine.step)
        weight, counted = None, 0.0 if samples is None else float(samples)
        if loss is not None:
            if samples:
                self.engine.start_weights(samples)
            weight, counted = self.engine.weights.of_loss(loss, samples)
        if samples is None:
            self.engine.begin(Status.SHARE)
        else:
            self.engine.begin(Status.SAMPLES, counted)
        if self.engine.finite_check is not None and loss is not None:
            self.engine.finite_check.losses.append(loss.detach())
        try:
            if samples is None and wait_counters.samples == 0:
                raise missing_samples_error(self.comm.rank, self.engine.step)
            if loss is None or samples == 0:
                self.engine.contribute_nothing(loss)
            else:
                loss.backward(weight, retain_graph=retain_graph)
        except BaseException:  # Ctrl-C too: the other ranks wait for this round
            with contextlib.suppress(SyncError):
                self.engine.finish(failed=True)
            raise
        self.engine.finish()

    # ------------------------------------------------------------------ accumulation, clipping, timings

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep the gradients of backwards in this block local; the next backward outside sends the sum.

        What counts is where *backward* runs. ``optimizer.step()`` synchronises any gradients that are still local.
        """
        before = self.engine.sync_enabled
        self.engine.sync_enabled = False
        try:
            yield
        finally:
            self.engine.sync_enabled = before

    no_sync = accumulate

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that begins now synchronises; programs for torch's DDP set it instead of `no_sync`."""
        return self.engine.sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, synchronise: bool) -> None:
        self.engine.sync_enabled = bool(synchronise)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients so that the norm over all parameters and shards is at most `max_norm`.

        Args:
            max_norm: the largest norm allowed; ``math.inf`` only measures.
            norm_type: the p of the p-norm; may be ``math.inf``.

        Returns:
            The norm before clipping, a scalar tensor, the same on every rank.

        Raises:
            UsageError: `max_norm` or `norm_type` is not positive.
        """
        if not max_norm > 0 or not norm_type > 0:
            raise UsageError(f"clip_grad_norm_({max_norm!r}, {norm_type!r})", remedy="both must be above 0")
        unsynchronised_step_guard.ensure_synchronised(self.engine)
        return clip_global_norm_(self.engine, max_norm, norm_type)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, GradBucket], Any]) -> None:
        """Reduce every bucket by ``hook(state, bucket)`` instead of a collective of the strategy.

        It is called once per bucket and round, on all ranks in the same order, as for torch's DistributedDataParallel,
        whose hooks work here. Weights compose: the mean over ranks of what it sees is the mean over all samples. In a
        world of one rank it is not called. All ranks register the same hook.

        Args:
            state: passed to the hook.
            hook: returns a future of the mean over ranks of ``bucket.buffer()``, the mean itself, or None if it has
                written the mean there.

        Raises:
            UsageError: `hook` can't be called, or gradients are compressed, reduced by FSDP2 or the strategy is
                ``"auto"``.
            SyncError: there is a hook already, gradients wait to be synchronised, or the first backward with a sharded
                optimizer is over.
        """
        self.engine.register_comm_hook(state, hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; with ``set_to_none=True`` too, buckets keep their memory."""
        self.engine.drop()
        super().zero_grad(set_to_none)

    def broadcast_buffers(self, source: int = 0) -> None:
        """Copy the buffers (running statistics of BatchNorm, for example) from rank `source` to all ranks."""
        broadcast_tensors(self.comm, list(self.module.buffers()), source=source)

    @property
    def timings(self) -> SyncTimings:
        """The cost of the latest synchronised backward and the step after it, on this rank."""
        return self.engine.timings

    @property
    def samples(self) -> float:
        """Samples of all ranks behind the latest gradient, 0 without ``samples=``; a GPU is waited for."""
        self.engine.check_latest()
        return self.engine.weights.total

    def compressed_buckets(self) -> list[CompressionStats]:
        """Return bytes and error of each compressed bucket; empty before the first step."""
        compressed = [bucket.compressed for bucket in self.engine.buckets]
        return [each.stats() for each in compressed if each is not None]

    def wait_for_parameters(self) -> None:
        """Wait for parameters that a sharded optimizer's ``step()`` has left in flight.

        This thread needs no call: torch's functions wait where they use a parameter. Call it before another thread, or
        code that bypasses torch's functions, reads parameters.
        """
        self.engine.parameter_gather.wait_all()

    def whole_parameters(self) -> list[torch.Tensor]:
        """Return copies of all parameters, whole on every rank, in registration order (each once).

        With ``"full-shard"`` this gathers them, so all ranks must call it.
        """
        return self.engine.whole(list(self.module.parameters()))

    def bucket_plan(self) -> list[tuple[int, list[str]]]:
        """Return (bytes, names of parameters) per collective, in launch order; empty before the first backward."""
        return self.engine.bucket_plan()


def _reducer_of(
    module: torch.nn.Module,
    comm: Comm,
    plan: Sync,
    reduce_dtype: torch.dtype | None,
    virtual_ranks: int | None,
) -> Reducer:
    named = list(module.named_parameters())
    trained = [(name, param) for name, param in named if param.requires_grad]
    frozen = [(name, param) for name, param in named if not param.requires_grad]
    if virtual_ranks is not None:
        return VirtualRankReducer(trained, comm, plan, reduce_dtype, frozen, module, virtual_ranks)
    return Reducer(trained, comm, plan, reduce_dtype, frozen, module)


def check_optimizer_owned(name: str, model: object, optimizer: object, *, wrapped: bool = True) -> None:
    """Raise unless `optimizer` updates parameters of `model`.

    Args:
        name: the class that takes them, for the message.
        model: a `DataParallel` or `DistributedDataParallel`, or with ``wrapped=False`` any bare module.
        optimizer: a torch optimizer.
        wrapped: whether the model must be wrapped.

    Raises:
        UsageError: the model is not wrapped, the optimizer is none, or holds no parameter of the model.
    """
    ours = isinstance(model, DataParallel | DistributedDataParallel)
    if not ours and (
        wrapped
        or not isinstance(model, torch.nn.Module)
        or isinstance(model, torch.nn.parallel.DistributedDataParallel)
    ):
        raise UsageError(
            f"{name}({type(model).__name__}, ...)", remedy="wrap the model: paceline.DataParallel(model)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"{name}(model, {type(optimizer).__name__}, ...)", remedy="pass the optimizer of the model"
        )
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    named = model.engine.named_parameters() if ours else model.named_parameters()
    if not any(id(param) in held for _, param in named):
        raise UsageError(
            f"{name}: the {type(optimizer).__name__} holds no parameter of this model",
            remedy="pass the optimizer that was made from this model's parameters",
        )
