"""`full-shard`: PyTorch FSDP2 (``fully_shard``) as an engine of `DataParallel`.

FSDP2 shards parameters, gradients and optimizer state, and runs its own collectives. This engine adds what it lacks:
the weighted mean (FSDP2 only sums here, with the weights of the reducer, see `loss_weights`), parameters that some or
all ranks do not use, ranks without data, the step guard, and over gloo collectives that are sent point to point.

Parameters that FSDP2 can't shard (scalars, complex or non-contiguous ones, other dtypes than the rest) stay whole on
every rank and go through the reducer, whose ledger closes the round for both kinds.

[Note: ranks without data] FSDP2 gathers parameters in forward, so a rank without a batch must run forward and backward
too. It repeats the forwards of its latest backward and contributes zero. A rank that never had a batch receives the
inputs of one that has, before the first forward.

[Note: torch internals] Which parameters got a gradient is observed by hooks on FSDP2's unsharded parameters, which are
private to torch. If a torch version hides them, all parameters count as used: those that no rank used then have zero
gradients instead of None.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from paceline._core.step_state import step_state
from paceline.errors import SyncError, UnsyncedGradients, UsageError
from paceline.parallel.engine.grad_hooks import accumulates_nothing
from paceline.parallel.engine.loss_weights import Factor, multiply_by
from paceline.parallel.engine.reducer import Reducer
from paceline.parallel.engine.round_status import RoundSummary, Status
from paceline.parallel.gradient_collectives import Comm
from paceline.parallel.sharding.fsdp_options import FSDPOptions
from paceline.parallel.strategy import Sync

__all__ = ["FSDPEngine", "default_units"]

UNIT_NUMEL = 100_000
"""Smallest member of a ModuleList that is gathered as a unit of its own."""

_P2P_NBYTES = 2 << 20
"""Below this size gloo's own collectives are used: there the fixed cost decides."""


def default_units(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the submodules that are gathered one at a time: the large members of every ``ModuleList``."""
    return [
        member
        for child in module.modules()
        if isinstance(child, torch.nn.ModuleList)
        for member in child
        if sum(param.numel() for param in member.parameters()) >= UNIT_NUMEL
    ]


class FSDPEngine(Reducer):
    """Applies FSDP2 to a module and runs the reducer's rounds around it.

    Args:
        module: the model; its parameters become DTensors in place.
        comm: the ranks, more than one.
        plan: ``Sync(shard="parameters")``.
        reduce_dtype: dtype of FSDP2's reduce-scatter; None: that of the parameters.
        units: submodules gathered one at a time; None: `default_units`.
        gather_dtype: dtype of gathered parameters; None: their own.
        options: of FSDP2; None: torch's defaults.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        comm: Comm,
        plan: Sync,
        reduce_dtype: torch.dtype | None,
        units: Sequence[torch.nn.Module] | None,
        gather_dtype: torch.dtype | None = None,
        options: FSDPOptions | None = None,
    ) -> None:
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise UsageError(
                f"full-shard needs torch 2.13 or later; this is {torch.__version__}",
                remedy="update torch, or pass sync='sharded'",
            )
        self.module: torch.nn.Module = module
        self.units = default_units(module) if units is None else _checked_units(module, units)
        whole = _unshardable(module)
        # Weakly, so that each is freed once it is sharded.
        self._replaced = {id(p): weakref.ref(p) for p in module.parameters() if p not in whole}
        options = options or FSDPOptions()
        self._shard(comm, options.policy(gather_dtype, reduce_dtype), whole, options)
        named = list(module.named_parameters())
        trained = [(name, param) for name, param in named if param.requires_grad]
        frozen = [(name, param) for name, param in named if not param.requires_grad]
        rest = [(name, param) for name, param in trained if param in whole]
        super().__init__(rest, comm, plan, reduce_dtype, frozen, module)
        self.shards = [(name, param) for name, param in trained if isinstance(param, DTensor)]
        self._dtype = self.shards[0][1].dtype if self.shards else None
        self._ids |= {id(param) for _, param in self.shards}
        self._shard_used = {name: False for name, _ in self.shards}
        self._watched: set[int] = set()
        self._shards_local = False  # FSDP2 holds gradients that were not reduce-scattered
        self._reached: list[object] = []  # inputs of the forwards that the present backward has reached
        self._latest: list[Any] = []  # inputs of the forwards of the previous backward, in the order they ran
        self._inputs_shared = False  # every rank has seen inputs
        self._began_alike = False  # every rank ran the first forward

    def _shard(
        self,
        comm: Comm,
        policy: MixedPrecisionPolicy,
        whole: set[torch.nn.Parameter],
        options: FSDPOptions,
    ) -> None:
        device = next((p.device.type for p in self.module.parameters()), "cpu")
        mesh = comm.mesh(device)
        for part in [*self.units, self.module]:
            fully_shard(part, mesh=mesh, mp_policy=policy, ignored_params=whole, **options.arguments())
        units = [unit for unit in self.units if isinstance(unit, FSDPModule) and unit is not self.module]
        options.set_prefetch(self._root(), units)
        for part in self._fsdp_modules():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True, recurse=False)
            if comm.backend == "gloo" and device == "cpu":
                part.set_custom_reduce_scatter(_P2PReduceScatter(comm.shard_axis))
                part.set_custom_all_gather(_P2PAllGather(comm.shard_axis))

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        for child in self.module.modules():
            if isinstance(child, FSDPModule):
                yield child

    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule), "fully_shard was applied to the root"
        return self.module

    # ------------------------------------------------------------------ forward

    def before_forward(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Return the inputs, for a later backward without data; see [Note: ranks without data].

        Raises:
            UsageError: the model was converted to another dtype since it was wrapped.
        """
        if self.shards and self.shards[0][1].dtype != self._dtype:  # FSDP2 gathers in the old one
            name, param = self.shards[0]
            raise UsageError(
                f"parameter {name!r} was converted to {param.dtype} after the model was wrapped",
                rank=self.comm.rank,
                step=self.step,
                remedy="convert a model before wrapping it",
            )
        self._share_inputs((args, kwargs))
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))

    def backward_reached(self, call: object) -> None:
        """Record a forward that backward reaches, the last one first."""
        super().backward_reached(call)
        if all(call is not other for other in self._reached):
            self._reached.append(call)

    def _only_computes(self) -> bool:
        """Return False; raise for ``torch.autograd.grad``, in which FSDP2 frees what a later backward needs."""
        if accumulates_nothing(self._params_in_graph):
            self._root().reset_iter_state()
            raise UsageError(
                "torch.autograd.grad through a model with sync='full-shard', which FSDP2 does not support",
                rank=self.comm.rank,
                step=self.step,
                remedy='use "sharded" or another strategy for losses made of gradients',
            )
        return False

    def _params_in_graph(self) -> Iterator[torch.Tensor]:
        for fsdp_param in _fsdp_params(self._fsdp_modules()):
            if hasattr(fsdp_param, "_unsharded_param"):
                yield fsdp_param._unsharded_param
        yield from (slot.param for slot in self.slots)

    def _share_inputs(self, call: tuple[Any, Any] | None) -> None:
        """Give inputs, once, to ranks that have none."""
        if self._inputs_shared:
            return
        have = self.comm.gather_values(call is not None)
        if not any(have):
            return
        self._inputs_shared = True
        self._began_alike = all(have)
        if self._began_alike:
            return
        source = have.index(True)
        shared = self.comm.broadcast_value(call, source)
        if call is None and shared is not None:
            self._latest = [shared]

    # ------------------------------------------------------------------ backward

    def start_weights(self, samples: float) -> None:
        """Prepare the weight of a loss. FSDP2 sends in backward, so all ranks agree on the first weight before that."""
        if self._began_alike:
            super().start_weights(samples)
            self._agree_first_weight()

    def _agree_first_weight(self) -> None:
        if self._began_alike and not self.weights.agreed:
            self._agree_weights()

    def begin(self, status: Status, samples: Factor = 0.0) -> None:
        """Open a backward, and decide whether FSDP2 reduces in it."""
        opening = not self._in_backward
        self._agree_first_weight()
        super().begin(status, samples)
        if opening:
            self._root().set_requires_gradient_sync(self._will_sync)
            if not self._shards_local:  # what zero_grad() dropped is unused until backward computes it again
                self._shard_used = {name: param.grad is not None for name, param in self.shards}
            self._watch_shards()

    def _kept_elsewhere(self) -> bool:
        return self._shards_local or any(param.grad is not None for _, param in self.shards)

    def _carry_results(self, factor: Factor) -> None:
        super()._carry_results(factor)
        self._multiply_shards(factor)

    def _watch_shards(self) -> None:
        for fsdp_param in _fsdp_params(self._fsdp_modules()):
            full = getattr(fsdp_param, "_unsharded_param", None)
            if full is None or id(full) in self._watched or not full.requires_grad:
                continue
            self._watched.add(id(full))
            name = next((name for name, param in self.shards if param is fsdp_param.sharded_param), None)
            if name is None:  # it has replaced a parameter: the round status reports that
                continue
            full.register_post_accumulate_grad_hook(partial(self._mark_used, name))

    def _mark_used(self, name: str, whole: torch.Tensor) -> None:
        self._shard_used[name] = True
        if self.finite_check is not None and whole.grad is not None:  # before FSDP2 reduces it
            self.finite_check.record_peak(whole.grad)

    def contribute_nothing(self, loss: torch.Tensor | None) -> None:
        """Run FSDP2's collectives with a contribution of zero; see [Note: ranks without data]."""
        if loss is not None:
            loss.backward(torch.zeros_like(loss))
            return
        self._share_inputs(None)
        if not self._latest:
            raise SyncError(
                "no rank has had a batch yet, so backward(None, samples=0) has nothing to repeat",
                rank=self.comm.rank,
                step=self.step,
                remedy="give at least one rank a batch in the first step",
            )
        buffers = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        used = dict(self._shard_used)
        for args, kwargs in self._latest:
            outputs = [
                leaf
                for leaf in pytree.tree_leaves(self.module(*args, **kwargs))
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
        self._watch_shards()
        self._shard_used.update(used)
        for slot in self.slots:
            slot.fired = 0
            if not slot.used:
                slot.param.grad, slot.needs_zero = None, True
        for buffer, before in buffers:
            buffer.copy_(before)

    def finish(self, failed: bool = False) -> None:
        """Close the backward. FSDP2 can't complete a failed round, so this rank then starts afresh."""
        reached, self._reached = self._reached, []
        if reached and not failed:
            self._latest = reached[::-1]
        if self._in_backward and failed:
            self._in_backward = False
            self._root().reset_iter_state()
            self.drop()
            return
        self._shards_local = self._in_backward and not self._will_sync
        super().finish()

    def synchronise(self, failed: bool = False) -> None:
        """Close the round with the ledger.

        Raises:
            UnsyncedGradients: FSDP2 holds gradients of this rank only, which it reduces in backward only.
        """
        if self._shards_local:
            used = ", ".join(repr(name) for name, used in self._shard_used.items() if used)
            raise UnsyncedGradients(
                "the last backward ran inside accumulate(); with full-shard only backward can synchronise "
                f"(parameters {used})",
                rank=self.comm.rank,
                step=self.step,
                remedy="leave accumulate() before the last backward of a step",
            )
        super().synchronise(failed)

    @property
    def sees_waiting(self) -> bool:
        """False: FSDP2 waits inside forward and backward, where the host's clock can't tell it from computing."""
        return False

    # ------------------------------------------------------------------ result

    def _used_flags(self) -> list[float]:
        visible = bool(self._watched) or not self.shards
        return [*super()._used_flags(), *(used or not visible for used in self._shard_used.values())]

    def _reported(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [*super()._reported(), *self.shards]

    def _passing_ids(self) -> frozenset[int]:
        gathered = (getattr(each, "_unsharded_param", None) for each in _fsdp_params(self._fsdp_modules()))
        return frozenset(map(id, gathered))

    def _attach_result(self, summary: RoundSummary) -> None:
        super()._attach_result(summary)
        for (name, param), used in zip(self.shards, summary.used[len(self.slots) :], strict=True):
            self._shard_used[name] = used
            if not used:
                param.grad = None

    def _scale(self, factor: Factor) -> None:
        super()._scale(factor)
        self._multiply_shards(1 / self.comm.size if self.weights.averaged else factor)

    def _multiply_shards(self, factor: Factor) -> None:
        multiply_by(self._shard_grads(), factor)

    def _shard_grads(self) -> list[torch.Tensor]:
        return [param.grad.to_local() for _, param in self.shards if isinstance(param.grad, DTensor)]

    def _check_finite(self, summary: RoundSummary, factor: float) -> None:
        hidden = self.shards and not self._watched  # see [Note: torch internals]
        super()._check_finite(replace(summary, peaks=()) if hidden else summary, factor)

    def parts_by_name(self) -> dict[str, list[torch.Tensor]]:
        """Return this rank's part of the result, by parameter."""
        grads = {name: param.grad for name, param in self.shards}
        shards = {
            name: [grad.to_local()] if isinstance(grad, DTensor) else [] for name, grad in grads.items()
        }
        return super().parts_by_name() | shards

    def drop(self) -> None:
        """Drop all gradients, FSDP2's own included."""
        super().drop()
        self._shards_local = False
        self._shard_used = dict.fromkeys(self._shard_used, False)
        for _, param in self.shards:
            param.grad = None
        for fsdp_param in _fsdp_params(self._fsdp_modules()):
            fsdp_param.unsharded_accumulated_grad = None
            if hasattr(fsdp_param, "_unsharded_param"):
                fsdp_param._unsharded_param.grad = None

    # ------------------------------------------------------------------ parameters and gradients

    @property
    def device(self) -> torch.device:
        """Device of the gradients."""
        return self.shards[0][1].device if self.shards else super().device

    @property
    def splits_gradients(self) -> bool:
        """True: ranks hold different parts."""
        return True

    def local_grads(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients of which this rank holds a shard, and those that every rank holds whole."""
        return self._shard_grads(), super().local_grads()[1]

    def local_grads_of(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of the gradients of `params`, which are some of the model's."""
        grads = super().local_grads_of(params)
        return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]

    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return all parameters of the model with their names, sharded as optimizers hold them."""
        return [*super().named_parameters(), *self.shards]

    def refuse_replaced(self, params: Sequence[torch.Tensor]) -> None:
        """Raise if one of `params` was the model's before FSDP2 replaced it: it would never change."""
        for param in params:
            replaced = self._replaced.get(id(param))
            if replaced is not None and replaced() is param:
                raise UsageError(
                    "the optimizer holds parameters from before the model was wrapped, which FSDP2 has replaced",
                    rank=self.comm.rank,
                    step=self.step,
                    remedy="build the optimizer after wrapping",
                )

    def whole(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return gathered copies of the parameters; a collective."""
        return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in params]


class _OverComm:
    """Runs one of FSDP2's collectives point to point over `comm`; blocks, since gloo has no streams."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm


class _P2PAllGather(_OverComm, DefaultAllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with all ranks' `input_tensor`, which may be its own part of it."""
        if (
            output_tensor.nbytes < _P2P_NBYTES or group != self._comm.group
        ):  # `reshard_after_forward` made others
            return super().__call__(output_tensor, input_tensor, group, async_op)
        own = output_tensor.chunk(self._comm.size)[self._comm.rank]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor)
        with step_state.waiting_for_peers():
            self._comm.all_gather(output_tensor).wait()
        return None


class _P2PReduceScatter(_OverComm, DefaultReduceScatter):
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Write the sum of all ranks' parts of `input_tensor` for this rank to `output_tensor`."""
        if input_tensor.nbytes < _P2P_NBYTES:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        with step_state.waiting_for_peers():
            self._comm.reduce_scatter(input_tensor, output_tensor).wait()
        return None


def _unshardable(module: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the parameters that FSDP2 would reject."""
    sizes: Counter[torch.dtype] = Counter()
    for param in module.parameters():
        if not param.is_complex() and param.is_floating_point():
            sizes[param.dtype] += param.numel()
    main = sizes.most_common(1)[0][0] if sizes else torch.float32
    return {
        param
        for param in module.parameters()
        if param.dtype is not main or param.dim() == 0 or param.numel() == 0 or not param.is_contiguous()
    }


def _fsdp_params(modules: Iterator[FSDPModule]) -> Iterator[Any]:
    """Yield FSDP2's records of its parameters; none if torch hides them."""
    for module in modules:
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            group = getattr(state, "_fsdp_param_group", None)
            groups = [group] if group is not None else []
        for group in groups:
            yield from group.fsdp_params


def _checked_units(module: torch.nn.Module, units: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return `units`, all of which must be submodules of `module`."""
    inside = {id(child) for child in module.modules()}
    for unit in units:
        if id(unit) not in inside:
            raise UsageError(
                f"unit {type(unit).__name__} is not a submodule of the model",
                remedy="pass members of model.modules()",
            )
    return list(units)
