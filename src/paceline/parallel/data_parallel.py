"""`DataParallel`: a module whose gradients are the mean over all ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from paceline._core.step_state import step_state, wait_counters
from paceline.errors import SyncError, UsageError
from paceline.parallel.compression.compressed_bucket import CompressionStats
from paceline.parallel.compression.compression_config import Compression
from paceline.parallel.engine import step_guard
from paceline.parallel.engine.comm import Comm
from paceline.parallel.engine.grad_norm import clip_global_norm_
from paceline.parallel.engine.launch_queue import SyncTimings
from paceline.parallel.engine.loss_weights import counted_filler
from paceline.parallel.engine.module_sync import broadcast_tensors, model_signature
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.engine.round_status import Status
from paceline.parallel.sharding.fsdp import FSDPEngine
from paceline.parallel.strategy import Sync
from paceline.parallel.tuning.tuner import DEFAULT, Tuner
from paceline.testing import fault_injection
from paceline.world.object_collectives import verify_same

__all__ = ["DataParallel"]

_SAME_MODEL = "build the same model, in the same order and with the same options, on every rank"


class DataParallel(torch.nn.Module):
    """Wraps a module so that after backward every rank holds the same gradient: the mean over all samples.

    Parameters and buffers are checked to be alike on all ranks and copied from rank 0. After that,
    ``loss.backward()`` synchronises as torch's DistributedDataParallel does (every rank counts the same), and
    ``model.backward(loss, samples=n)`` weighs each rank by its samples, which is exact for unequal batches.

    Args:
        module: the model, on its device; the same on every rank.
        sync: a strategy's name (``"naive"``, ``"flat"``, ``"overlap"``, ``"bucketed"``, ``"sharded"``,
            ``"full-shard"``) or a `Sync`, which may also say how gradients are compressed; or ``"auto"``, which
            finds the fastest exact way while it trains, see `paceline.parallel.tuning.tuner`.
        group: the ranks to synchronise with, as a process group, the data axis of a device mesh or a `Comm`;
            None: all. Without a process group, a world of one.
        reduce_dtype: dtype in which gradients of bf16 and fp16 parameters are accumulated and reduced, for
            example ``torch.float32``; None: the parameters' own.
        gather_dtype: for ``"full-shard"``, the dtype in which units are gathered and computed with, and their gradients
            reduced unless `reduce_dtype` says otherwise; shards stay as they are. None: the parameters' own. Under
            autocast alone every unit's lower copy is held from forward to backward, which is the whole model again.
        units: for ``"full-shard"``, the submodules that are gathered one at a time; None: the members of
            every ``ModuleList`` with at least 100,000 parameters.

    Raises:
        UsageError: an unknown strategy, no bare module, parameters that can't be synchronised (sparse gradients), a
            dtype that is not of floating point, `gather_dtype` where nothing is gathered, or a CUDA graph
            of a model whose parameters are to move.
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
    ) -> None:
        super().__init__()
        fault_injection.arm_from_environment()
        tuned = sync == "auto"
        plan = DEFAULT if tuned else Sync.of(sync)
        _refuse_unfit_dtypes(reduce_dtype=reduce_dtype, gather_dtype=gather_dtype)
        if gather_dtype is not None and plan.shard != "parameters":
            raise UsageError(
                f"gather_dtype={gather_dtype} with {sync!r}, which gathers no parameters",
                remedy='use sync="full-shard", or autocast',
            )
        _refuse_unfit(module, plan.compression_config)
        comm = group if isinstance(group, Comm) else Comm(_process_group(group))
        if comm.size > 1 and (tuned or plan.shard != "none"):
            _refuse_graphs(module, sync)
        way = "auto" if tuned else str(plan)
        facts = model_signature(module, f"{way}, reduce dtype {reduce_dtype}, gather dtype {gather_dtype}")
        verify_same(facts, "the model", comm.group, remedy=_SAME_MODEL)
        broadcast_tensors(comm, [*module.parameters(), *module.buffers()])
        self.module = module
        self.comm = comm
        self.engine = self._build_engine(plan, reduce_dtype, gather_dtype, units)
        if tuned and self.comm.size > 1:
            self.engine.tuner = Tuner(self.engine)
        step_guard.guard(self.engine)

    def _build_engine(
        self,
        plan: Sync,
        reduce_dtype: torch.dtype | None,
        gather_dtype: torch.dtype | None,
        units: list[torch.nn.Module] | None,
    ) -> Reducer | FSDPEngine:
        if plan.shard == "parameters" and self.comm.size > 1:
            return FSDPEngine(self.module, self.comm, plan, reduce_dtype, units, gather_dtype)
        named = list(self.module.named_parameters())
        trained = [(name, param) for name, param in named if param.requires_grad]
        frozen = [(name, param) for name, param in named if not param.requires_grad]
        return Reducer(trained, self.comm, plan, reduce_dtype, frozen)

    @property
    def plan(self) -> Sync:
        """How gradients are synchronised; with ``sync="auto"``, now."""
        return self.engine.plan

    @property
    def tuning(self) -> Tuner | None:
        """What ``sync="auto"`` is doing and has found; None without it, and in a world of one."""
        return self.engine.tuner

    # ------------------------------------------------------------------ forward and backward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; its outputs tell the engine when a plain ``backward()`` begins."""
        call = self._before_forward(args, kwargs)
        outputs = self.module(*args, **kwargs)
        self._after_forward(outputs, call)
        return outputs

    @torch.compiler.disable()
    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        engine = self.engine
        engine.recover()
        step_state.begin_phase(engine.step, "forward")
        if fault_injection.armed:
            fault_injection.begin_step(engine.step)
        return engine.before_forward(args, kwargs)

    @torch.compiler.disable()
    def _after_forward(self, outputs: Any, call: object) -> None:
        step_state.enter_phase("outside")
        if not torch.is_grad_enabled():
            return
        engine = self.engine
        for tensor in pytree.tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _grad: engine.reach(call))

    def backward(
        self, loss: torch.Tensor | None, samples: float | None = None, *, retain_graph: bool = False
    ) -> None:
        """Run backward and synchronise: the result is the gradient of the mean over all samples.

        The global gradient is Σ nᵢ·gᵢ / Σ nᵢ over all ranks and all backwards since ``zero_grad()``, where gᵢ
        is the gradient of `loss` and nᵢ = `samples`. Inside `accumulate` nothing is sent yet.

        Args:
            loss: scalar, the mean over this rank's samples; None on a rank that has none (``samples=0``).
            samples: how many samples (or tokens) `loss` is the mean of; None: every rank counts the same,
                as with ``loss.backward()``.
            retain_graph: as in ``torch.Tensor.backward``.

        Raises:
            UsageError: `loss` is no scalar, or `samples` is negative, not finite, or 0 without need.
            BackwardFailed: another rank raised in its backward; no rank has a gradient.
            SyncError: ranks mixed calls with and without samples, or another rank is gone.
        """
        samples = self._checked(loss, samples)
        weight = None
        if loss is not None:
            factor = self.engine.weights.of_loss(samples)
            weight = torch.full_like(loss, factor)
            if samples is not None and loss.dtype in (torch.bfloat16, torch.float16):
                rounded = torch.full((), factor, dtype=loss.dtype)  # not `weight`: nobody waits for a GPU
                samples = self.engine.weights.samples_of(rounded.item())
        if samples is None:
            self.engine.begin(Status.SHARE)
        else:
            self.engine.begin(Status.SAMPLES, samples)
        if self.engine.finite_check is not None and loss is not None:
            self.engine.finite_check.losses.append(loss.detach())
        try:
            if samples is None and wait_counters.samples == 0:
                raise counted_filler(self.comm.rank, self.engine.step)
            if loss is None or samples == 0:
                self.engine.take_part(loss)
            else:
                loss.backward(weight, retain_graph=retain_graph)
        except BaseException:  # Ctrl-C too: the other ranks wait for this round
            self._fail()
            raise
        self.engine.finish()

    def _fail(self) -> None:
        """Complete the round without a result, and let the exception that caused it speak."""
        with contextlib.suppress(SyncError):
            self.engine.finish(failed=True)

    def _checked(self, loss: torch.Tensor | None, samples: float | None) -> float | None:
        """Return `samples` once both arguments make sense."""
        where = {"rank": self.comm.rank, "step": self.engine.step}
        if loss is None and samples != 0:
            raise UsageError(
                f"backward(None, samples={samples!r})",
                remedy="a rank without a loss passes samples=0",
                **where,
            )
        if loss is not None and not isinstance(loss, torch.Tensor):
            raise UsageError(
                f"the loss is a {type(loss).__name__}, not a tensor",
                remedy="pass what the model computed",
                **where,
            )
        if loss is not None and loss.numel() != 1:
            raise UsageError(
                f"loss has shape {list(loss.shape)}, not one number",
                remedy="take its mean over this rank's samples",
                **where,
            )
        if samples is None:
            return None
        if not math.isfinite(samples) or samples < 0:
            raise UsageError(f"samples={samples!r}", remedy="pass the number of samples, 0 or more", **where)
        return float(samples)

    # ------------------------------------------------------------------ accumulation, clipping, timings

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep the gradients of backwards in this block to this rank; the next one outside sends the sum.

        What counts is where *backward* runs. ``optimizer.step()`` synchronises what is left over.
        """
        before = self.engine.sync_enabled
        self.engine.sync_enabled = False
        try:
            yield
        finally:
            self.engine.sync_enabled = before

    no_sync = accumulate

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
        step_guard.close(self.engine)
        return clip_global_norm_(self.engine, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; with ``set_to_none=True`` too, buckets stay where they are."""
        self.engine.drop()
        super().zero_grad(set_to_none)

    def broadcast_buffers(self, source: int = 0) -> None:
        """Copy the buffers (running statistics of BatchNorm, for example) from rank `source` to all ranks."""
        broadcast_tensors(self.comm, list(self.module.buffers()), source=source)

    @property
    def timings(self) -> SyncTimings:
        """What the latest synchronised backward and the step behind it cost on this rank."""
        return self.engine.timings

    @property
    def samples(self) -> float:
        """Samples of all ranks behind the latest gradient (0 where backward got none)."""
        return self.engine.weights.total

    def compressed_buckets(self) -> list[CompressionStats]:
        """Return what compression does to each bucket it is used on: bytes and error; none before the first step."""
        return [bucket.compressed.told() for bucket in self.engine.buckets if bucket.compressed is not None]

    def whole_parameters(self) -> list[torch.Tensor]:
        """Return copies of all parameters, whole on every rank, in registration order (each once).

        With ``"full-shard"`` this gathers them, so all ranks must call it.
        """
        return self.engine.whole([param for param in self.module.parameters()])

    def bucket_plan(self) -> list[tuple[int, list[str]]]:
        """Return (bytes, names of parameters) per collective, in launch order; empty before the first backward."""
        return self.engine.bucket_plan()


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    return group.get_group() if isinstance(group, DeviceMesh) else group


def _refuse_unfit_dtypes(**dtypes: object) -> None:
    """Raise for a dtype in which gradients or parameters would be lost, by the name of the argument."""
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise UsageError(
                f"{name}={dtype!r} is no dtype of floating point",
                remedy="give for example torch.float32, or None for the parameters' own",
            )


def _refuse_unfit(module: torch.nn.Module, compression: Compression | None) -> None:
    """Raise for what is no bare module, and for parameters that can't be in a dense buffer, or compressed, by name."""
    if not isinstance(module, torch.nn.Module) or isinstance(module, DataParallel):
        raise UsageError(f"DataParallel({type(module).__name__})", remedy="pass the bare torch.nn.Module")
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) and isinstance(child, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise UsageError(
                f"parameter {f'{name}.weight'.lstrip('.')!r} has sparse gradients",
                remedy="build the embedding with sparse=False",
            )
    for name, param in module.named_parameters():
        if isinstance(param, torch.nn.parameter.UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet (a lazy module)",
                remedy="run one forward before wrapping",
            )
        if compression is not None and param.requires_grad and not compression.exempts(name, param):
            compression.refuse_unfit(name, param)


def _refuse_graphs(module: torch.nn.Module, sync: str | Sync) -> None:
    """Raise where a part of `module` is a CUDA graph, which goes on reading where parameters were when it was made."""
    for name, child in module.named_modules():
        if "make_graphed_callables" in getattr(getattr(child, "forward", None), "__qualname__", ""):
            raise UsageError(
                f"module {name!r} is a CUDA graph, and sync={str(sync)!r} moves parameters to other memory",
                remedy='use a strategy that leaves them where they are, such as "bucketed"',
            )
